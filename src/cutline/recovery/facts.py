"""Reads the facts from which ``cutline.protocol.recovery`` decides. Decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError, DamagedRecordError, RecoveryError, StoreError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.ports.metadata import MetadataStore
from cutline.ports.sinks import Claimable, RewindsSoFar, RewindsToPoints, Sink
from cutline.protocol.history.histories import identities_of, identity_of, takeovers_in
from cutline.protocol.history.known_checkpoints import live_in
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.publish.immediate import end_of
from cutline.protocol.recovery.facts import (
    LiveOperator,
    LogFacts,
    NeedContent,
    NeedEntries,
    NeedFacts,
    NeedFirstRemote,
    NeedInputAhead,
    NeedInputSince,
    NeedLive,
    NeedPublishedBefore,
    NeedRemote,
    NeedRemoteEpochs,
    NeedRemoteHistory,
    NeedSegments,
    NeedSinkLimits,
    PublishedBefore,
    RecoveryFacts,
    RemoteHistory,
    RemoteRecords,
    RestoreTo,
    SinkFacts,
    StoredEpoch,
    StoredFacts,
)
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.inputs import input_ahead, input_since, ran_in
from cutline.recovery.logs import missing_segments
from cutline.recovery.repeating import check_repeatable
from cutline.storage.detached import DetachedLogs
from cutline.tiers.remote_at_start import RemoteAtStart
from cutline.worker.immediate_publishing import ImmediateSink

log = get_logger(__name__)


def declared_against(flow: FlowAtRest, restore_to: RestoreTo | None) -> StoredFacts:
    """The records that decide whether the flow as declared can continue from them."""
    generations = tuple(flow.generations.load_all())
    epoch = restore_to.epoch if restore_to is not None else None
    if epoch is None or epoch not in flow.checkpoints.epochs():
        return StoredFacts(generations=generations)
    found = _stored_epoch(flow, epoch, {})
    return StoredFacts(generations=generations, epochs=(found,), requested_sinks=_requested_sinks(flow, found.manifest))


def sink_facts(graph: FlowGraph, sinks: Mapping[SinkId, Sink], metadata: MetadataStore) -> tuple[SinkFacts, ...]:
    """What these sinks have published; their limits are read only if they matter."""
    recorded, seen = metadata.published(), metadata.seen()
    return tuple(
        SinkFacts(
            sink=node.sink,
            operator=node.operator,
            published=sink.published() or NO_EPOCH,
            recorded=recorded.get(node.sink, NO_EPOCH),
            seen=seen.get(node.sink),
            highest=None,
            on_rollback=node.on_rollback,
            publish=node.publish,
            can_rewind=sink.can_rewind,
            oldest_rewind=None if isinstance(sink, RewindsSoFar) else NO_EPOCH,
            claim=(claim := sink.claimed() if isinstance(sink, Claimable) else ""),
            takeovers=takeovers_in(claim),
            newest_batch=sink.newest_batch() if isinstance(sink, ImmediateSink) else NO_EPOCH,
        )
        for node in graph.sinks
        if (sink := sinks.get(node.sink)) is not None
    )


def with_limits(facts: Iterable[SinkFacts], sinks: Mapping[SinkId, Sink]) -> Iterator[SinkFacts]:
    """The facts, and how far each sink can be rewound."""
    for one in facts:
        sink = sinks[one.sink]
        oldest = sink.oldest_rewind() if isinstance(sink, RewindsSoFar) else NO_EPOCH
        gaps = sink.rewind_gaps() if isinstance(sink, RewindsToPoints) else ()
        yield replace(one, highest=sink.highest(), oldest_rewind=oldest, rewind_gaps=gaps)


def has_run(flow: FlowAtRest) -> bool:
    """Whether this storage has run the flow; asked before the start takes a generation.

    If the coordinator's records are lost, directories of Spark tell it: a download creates none.
    """
    if flow.metadata.has_run() or flow.metadata.last_epoch() > NO_EPOCH:
        return True
    if not flow.generations.load_all():
        return False
    folder = flow.layout.spark_dirs
    has_dirs = folder.is_dir() and any(folder.iterdir())
    return flow.remote is None or (not flow.metadata.issued() and has_dirs)


def _stored_epoch(flow: FlowAtRest, epoch: Epoch, published: Mapping[SinkId, Epoch]) -> StoredEpoch:
    """``published``: the newest epoch of each sink."""
    manifest: Manifest | None = None
    try:
        manifest = flow.checkpoints.load_manifest(epoch)
        for node in flow.graph.sinks:
            # The record holds what a sink has yet to publish; without it the epoch can never be published.
            if node.operator in manifest.operators and epoch > published.get(node.sink, NO_EPOCH):
                flow.checkpoints.load_record(manifest, node.operator)
    except (CutlineError, OSError) as error:
        return StoredEpoch(
            epoch=epoch, manifest=manifest, problem=str(error), recorded=flow.checkpoints.recorded(epoch)
        )
    return StoredEpoch(epoch=epoch, manifest=manifest)


def _requested_sinks(flow: FlowAtRest, manifest: Manifest | None) -> dict[OperatorId, tuple[SinkId, ...]]:
    sinks: dict[OperatorId, tuple[SinkId, ...]] = {}
    if manifest is None:
        return sinks
    for name in manifest.operators:
        # An unreadable record is reported when it is restored.
        with contextlib.suppress(CutlineError, OSError):
            sinks[name] = tuple(flow.checkpoints.load_record(manifest, name).sinks)
    return sinks


def size_of(manifest: Manifest) -> int:
    return sum(cut.size_bytes for cut in manifest.operators.values())


class Gathering:
    """Finds the facts that ``choose`` asks for, on the disk, in the sinks and in the remote tier."""

    def __init__(
        self, flow: FlowAtRest, generation: Generation, *, restore_to: RestoreTo | None, has_run: bool
    ) -> None:
        self._flow = flow
        self._has_run = has_run
        self._generation = generation
        self._restore_to = restore_to
        #: The logs of the newest generation, open, as far as they can be read.
        self.logs: dict[OperatorId, ChannelLog] = {}

    def known_at_once(self, *, may_lose_input: bool) -> RecoveryFacts:
        flow = self._flow
        sinks = self.sinks()
        stored = self._stored(sinks)
        return RecoveryFacts(
            definition=flow.definition,
            stored=stored,
            sinks=sinks,
            restore_to=self._restore_to,
            may_lose_input=may_lose_input,
            pins=flow.metadata.pins(),
            last_epoch=flow.metadata.last_epoch(),
            last_completed=flow.metadata.last_completed(),
            has_completed=flow.metadata.last_completed() > NO_EPOCH,
            has_remote=flow.remote is not None,
            has_run=self._has_run,
            announced=flow.metadata.announced(),
        )

    def sinks(self) -> tuple[SinkFacts, ...]:
        return sink_facts(self._flow.graph, self._flow.sinks, self._flow.metadata)

    def answer(self, facts: RecoveryFacts, need: NeedFacts) -> RecoveryFacts:
        """The facts with the needed one added."""
        flow = self._flow
        match need:
            case NeedSinkLimits():
                return replace(facts, sinks=tuple(with_limits(facts.sinks, flow.sinks)))
            case NeedRemoteHistory(is_required=is_required):
                found_there = self._remote_history(facts, is_required=is_required)
                return replace(facts, remote_history=found_there)
            case NeedFirstRemote(is_required=is_required):
                return replace(facts, first_remote=self._remote_records(facts, is_required=is_required))
            case NeedRemote():
                return replace(facts, remote=self._remote_records(facts, is_required=True))
            case NeedPublishedBefore(epoch=epoch):
                noted = {**facts.published_before, epoch: self._published_before(epoch)}
                return replace(facts, published_before=noted)
            case NeedContent(manifest=manifest):
                return replace(facts, contents={**facts.contents, manifest.epoch: self._content_problem(manifest)})
            case NeedRemoteEpochs():
                return replace(facts, remote_epochs=frozenset(self._remote().epochs()))
            case NeedLive(generation=generation, complete=complete):
                live = {name: self._live_log(name, generation) for name in complete}
                return replace(facts, live={name: self._live(name, need, problem) for name, problem in live.items()})
            case NeedSegments(first=first):
                missing = {
                    name: missing_segments(self.logs[name], position, flow=flow.graph.flow)
                    for name, position in first.items()
                }
                return replace(facts, missing_segments=missing)
            case NeedInputSince():
                current = flow.generations.load_all()[-1]
                found = input_since(flow, need, ran_in(flow, current, need.manifest, need.new_names))
                return replace(facts, input_since=(*facts.input_since, found))
            case NeedInputAhead():
                current = flow.generations.load_all()[-1]
                return replace(facts, input_ahead=input_ahead(flow, current.spark_dirs))
            case NeedEntries():
                return replace(facts, has_entries=self._has_entries())

    # ------------------------------------------------------------------ this host

    def _stored(self, sinks: tuple[SinkFacts, ...]) -> StoredFacts:
        flow = self._flow
        generations = tuple(flow.generations.load_all())
        published = {one.sink: one.published for one in sinks}
        epochs = tuple(_stored_epoch(flow, epoch, published) for epoch in flow.checkpoints.epochs())
        wanted = self._restore_to.epoch if self._restore_to is not None else None
        asked_for = next((one.manifest for one in epochs if one.epoch == wanted), None)
        return StoredFacts(generations=generations, epochs=epochs, requested_sinks=_requested_sinks(flow, asked_for))

    def _live_log(self, name: OperatorId, generation: GenerationRecord) -> str:
        """Open a log; returns why it cannot be read, or an empty text."""
        folder = self._flow.layout.channel(name)
        try:
            self.logs[name] = ChannelLog.open(name, folder, lineage_of(generation.lineage[name]))
        except (CutlineError, OSError) as error:
            return str(error)
        return ""

    def _live(self, name: OperatorId, need: NeedLive, log_problem: str) -> LiveOperator:
        flow, channel = self._flow, self.logs.get(name)
        if channel is None:
            return LiveOperator(log=None, log_problem=log_problem)
        folder = flow.layout.spark_checkpoint_dir(name, need.generation.spark_dirs[name])
        is_behind = flow.is_per_operator
        damage = flow.query_dirs.live_damage(folder, channel.last_batch, need.complete[name], may_be_behind=is_behind)
        log_facts = LogFacts(
            start=channel.start,
            end=channel.end,
            last_batch=channel.last_batch,
            positions=channel.last_positions,
            place=end_of(channel.entries()),
        )
        if not damage and is_behind and self.logs.keys() == need.complete.keys():
            # A directory that is behind its log is usable only if the log says how to continue.
            try:
                check_repeatable(flow, name, flow.query_dirs.last_committed(folder), self.logs)
            except RecoveryError:
                raise  # a store does not answer: that is no damage
            except CutlineError as error:
                damage = [str(error)]
        if damage:
            return LiveOperator(log=log_facts, damage=tuple(damage))
        resumes_at = channel.positions_after(flow.query_dirs.last_committed(folder))
        return LiveOperator(log=log_facts, resumes_at=resumes_at)

    def _has_entries(self) -> bool:
        flow = self._flow
        lineage = Lineage.begin(self._generation)
        logs = (ChannelLog.open(name, flow.layout.channel(name), lineage) for name in flow.graph.names)
        return any(one.entries() for one in logs)

    # ------------------------------------------------------------------ the remote tier

    def _remote(self) -> RemoteAtStart:
        if self._flow.remote is None:
            raise LookupError("the flow has no remote tier")
        return self._flow.remote

    def _remote_history(self, facts: RecoveryFacts, *, is_required: bool) -> RemoteHistory:
        stored = facts.stored.generations
        known = identities_of(stored) | facts.announced

        def is_live(manifest: Manifest, newest: list[GenerationRecord]) -> bool:
            return bool(live_in(((manifest.epoch, manifest.generation),), [*stored, *newest]))

        try:
            generations, epochs = self._remote().history(
                lambda one: identity_of(one) in known, is_live, is_needed=is_required
            )
        except (StoreError, DamagedRecordError) as error:
            return RemoteHistory(problem=str(error))
        return RemoteHistory(generations=tuple(generations), epochs=tuple(epochs))

    def _remote_records(self, facts: RecoveryFacts, *, is_required: bool) -> RemoteRecords:
        try:
            epochs = self._remote().download_records(is_needed=is_required)
        except StoreError as error:
            return RemoteRecords(problem=str(error))
        if not facts.stored.epochs:
            crashpoint("remote-fetched-records")
        return RemoteRecords(epochs=frozenset(epochs), stored=self._stored(facts.sinks))

    def _published_before(self, epoch: Epoch) -> PublishedBefore:
        try:
            noted = self._remote().published_before(epoch)
        except CutlineError as error:
            return PublishedBefore(problem=str(error))
        return PublishedBefore(everywhere=noted.everywhere, seen=noted.seen)

    def _content_problem(self, manifest: Manifest) -> str:
        try:
            progress = self._flow.progress
            progress.tell(f"downloads epoch {manifest.epoch}", size_of(manifest))
            size = DetachedLogs(self._flow.layout).store_downloaded(
                manifest, lambda: self._remote().download_content(manifest, progress.add_bytes)
            )
        except (CutlineError, OSError) as error:
            return str(error)
        if self._restore_to is None:
            crashpoint("remote-fetched")
            log.warning("checkpoint_downloaded", flow=self._flow.graph.flow, epoch=manifest.epoch, bytes=size)
        return ""
