"""How a flow comes back: go on where it was (resume), from a checkpoint (local), or from nothing (fresh).

Everything is prepared first; creating the generation record is the moment at which the flow has come back. Killed
before it, the next start finds the old generation; killed after it, the next start goes on from the new one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cutline.base import durable
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.coordinator.manifests import batch_in, epoch_in, incarnations_of, lineage_of
from cutline.errors import (
    CutlineError,
    DamagedRecordError,
    FencedError,
    LostInputError,
    RecoveryError,
)
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_EPOCH, START, BatchId, Epoch, Generation, OperatorId, Position, SinkId
from cutline.model.layout import Layout
from cutline.ports import (
    GenerationRecord,
    LostInput,
    Manifest,
    MetadataStore,
    OperatorPlan,
    PendingRecord,
    Sink,
    SnapshotStore,
)
from cutline.protocol.history.epochs import Incarnation, region_of
from cutline.protocol.history.evolution import Changes, Matcher, Matching
from cutline.protocol.history.lineage import Lineage
from cutline.recovery.directories import Restorer, generation_record
from cutline.recovery.evolve import CarryOver, begin_log
from cutline.recovery.facts import Inventory
from cutline.recovery.logs import missing_ends, missing_input
from cutline.recovery.retired_operators import histories
from cutline.recovery.sinks_at_start import SinksAtStart
from cutline.tiers.remote_at_start import RemoteTier
from cutline.tiers.upload import Published

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The flow as it will run."""

    generation: Generation
    #: resume, alone, regional, local, remote or fresh.
    path: str
    restored_epoch: Epoch | None
    reason: str
    channels: dict[OperatorId, ChannelLog]
    spark_dirs: dict[OperatorId, Generation]
    #: What was written down of it.
    record: GenerationRecord
    #: Complete epochs of the present history, ascending.
    manifests: list[Manifest]
    #: Epochs without an outcome. Every complete epoch is among the manifests, or one of these.
    pending: list[PendingRecord]
    #: All generations up to this one.
    incarnations: list[Incarnation]
    #: Which operators of what was stored are which operators of the code.
    matching: Matching
    #: What did not hold on the way here, for people.
    problems: list[str] = field(default_factory=list)


class _Built(NamedTuple):
    """What a restore goes on from: the logs, and the checkpoints that the flow then has."""

    channels: dict[OperatorId, ChannelLog]
    manifests: list[Manifest]


class Recovery:
    """Finds the best way back and takes it."""

    def __init__(
        self,
        *,
        graph: FlowGraph,
        plans: Mapping[OperatorId, OperatorPlan],
        layout: Layout,
        snapshots: SnapshotStore,
        metadata: MetadataStore,
        sinks: Mapping[SinkId, Sink] | None = None,
        is_per_operator: bool = False,
        remote: RemoteTier | None = None,
        restore_to: Epoch | None = None,
        changes: Changes | None = None,
        goes_on_without_input: bool = False,
    ) -> None:
        """``sinks`` are open: how far they have published decides which ways back there are.

        ``remote``: the tier that has checkpoints when this host has none. ``restore_to``: the epoch that a person wants
        the whole flow taken back to, nothing else will do then; ``changes``: how its operators have changed since.
        ``goes_on_without_input``: what sources cannot read again is given up.
        """
        self._restore_to = restore_to
        self._changes = changes or Changes()
        self._matching = Matching(operators=())
        self._matcher = Matcher(graph, plans, is_per_operator=is_per_operator)
        self._is_per_operator = is_per_operator
        self._remote = remote
        self._graph = graph
        self._plans = plans
        self._layout = layout
        self._snapshots = snapshots
        self._metadata = metadata
        self._problems: list[str] = []
        self._sinks = SinksAtStart(graph, sinks or {}, self._problem)
        self._inventory = Inventory(
            graph=graph,
            snapshots=snapshots,
            metadata=metadata,
            sinks=self._sinks,
            remote=remote,
            is_per_operator=is_per_operator,
            problem=self._problem,
        )
        self._pending: list[PendingRecord] = []
        #: Operators whose directory is damaged; the logs are whole.
        self._damaged: set[OperatorId] = set()
        self._restorer = Restorer(
            graph=graph,
            layout=layout,
            snapshots=snapshots,
            problem=self._problem,
            goes_on_without=goes_on_without_input,
        )
        #: What is given up of the input on the way that is being tried.
        self._lost: list[LostInput] = []
        self._carry_over = CarryOver(
            graph=graph,
            plans=plans,
            layout=layout,
            snapshots=snapshots,
            sinks=sinks or {},
            published=lambda sink: max(self._sinks.published(sink), metadata.published().get(sink, NO_EPOCH)),
            restorer=self._restorer,
        )

    def check_definition(self) -> None:
        """Raise if the flow as written now cannot go on from what was stored; to be asked before sinks are opened."""
        self._inventory.read_generations()
        if not self._inventory.generations:
            return
        self._matcher.check_mode(self._inventory.generations[-1])
        if self._restore_to is None:
            self._matching = self._matcher.last_run(self._inventory.generations[-1])
        elif not self._is_per_operator:
            # If it cannot be read, it is said so when it is needed.
            with contextlib.suppress(DamagedRecordError, FileNotFoundError):
                manifest = self._snapshots.load_manifest(self._restore_to)
                self._matching = self._matcher.checkpoint(manifest, self._inventory.generations, self._changes)
                for old, new in self._matching.renaming.new_names.items():
                    self._matcher.check_sinks(self._snapshots.load_record(manifest, old), new)

    def recover(self) -> Recovered:
        """Bring the flow back. Raises RecoveryError rather than lose anything silently."""
        self.check_definition()
        # The fence first: from here on no earlier process begins an epoch. What is pending next, and the manifests
        # last: one that an earlier process still stores is then either found, or its epoch is known to be pending.
        generation = self._new_generation()
        if self._inventory.fetch_records_if_lost():
            self.check_definition()
        self._inventory.read_generations()
        self._pending = self._metadata.pending()
        current = self._inventory.generations[-1] if self._inventory.generations else None
        manifests = self._inventory.live()
        self._sinks.refuse_behind(self._metadata.seen(), self._restore_to)
        self._sinks.refuse_to_empty(manifests, self._matching)
        if self._is_per_operator:
            return self._each_by_itself(generation, current, manifests)
        if self._restore_to is not None:
            return self._as_asked(generation, manifests, self._restore_to)
        self._matcher.refuse_returning_names(self._matching, manifests)
        if current is None and not self._inventory.had_any():
            return self._fresh(generation, "first start of this flow")
        if current is not None:
            channels = self._live_channels(current, manifests)
            # Sinks may have published an epoch that cannot be read: going on past it would publish its batches again.
            is_complete = not self._inventory.is_unreadable_after(manifests) and not self._sinks.are_ahead(manifests)
            if channels is not None and is_complete:
                recovered = self._going_on(generation, current, channels, manifests)
                if recovered is not None:
                    return recovered
        return self._from_checkpoint(generation, manifests)

    # ------------------------------------------------------------------ what is there

    def _new_generation(self) -> Generation:
        newest = self._inventory.newest_generation()
        if self._remote is None:
            return self._metadata.next_generation(Generation(newest + 1))
        # A host that knows nothing of the flow can do nothing without the remote tier.
        is_needed = not self._snapshots.generations()
        return self._remote.claim(self._metadata.next_generation, newest, is_needed=is_needed)

    # ------------------------------------------------------------------ what is live

    def _live_channels(
        self, current: GenerationRecord, manifests: list[Manifest]
    ) -> dict[OperatorId, ChannelLog] | None:
        """The open logs, if they are whole; None if one is not. Operators whose directory is damaged are noted."""
        channels: dict[OperatorId, ChannelLog] = {}
        healthy = True
        for operator in self._going_on_names():
            try:
                channel = ChannelLog.open(
                    operator, self._layout.channel(operator), lineage_of(current.lineage[operator])
                )
            except (CutlineError, OSError) as error:
                self._problem(f"{operator}: {error}")
                healthy = False
                continue
            channels[operator] = channel
            folder = self._layout.spark_checkpoint_dir(operator, current.spark_dirs[operator])
            complete = batch_in(manifests, operator)
            behind = self._is_per_operator
            for problem in self._snapshots.live_damage(folder, channel.last_batch, complete, may_be_behind=behind):
                self._problem(f"{operator}: {problem}")
                self._damaged.add(operator)
        if self._is_per_operator and healthy:
            self._note_who_cannot_catch_up(channels, current)
        unread = {name: self._unread_from(name, channels, current) for name in channels}
        for problem in [*missing_ends(channels, manifests), *missing_input(channels, unread)]:
            self._problem(problem)
            healthy = False
        return channels if healthy else None

    def _going_on_names(self) -> list[OperatorId]:
        """All that were there before."""
        return [name for name in self._graph.names if name not in self._matching.added]

    def _unread_from(
        self, name: OperatorId, channels: Mapping[OperatorId, ChannelLog], current: GenerationRecord
    ) -> Position | None:
        """The first entry of a channel that somebody will still read; None without consumers.

        A batch that is in its log but was not committed by Spark is run again, and reads its rows again.
        """
        positions = []
        for consumer in self._graph.consumers(name):
            if consumer not in channels or consumer in self._damaged:
                continue  # if it goes back, what it reads is checked then
            committed = self._committed(consumer, current)
            positions.append(channels[consumer].positions_after(committed).get(name, START))
        return min(positions, default=None)

    def _committed(self, operator: OperatorId, current: GenerationRecord) -> BatchId:
        folder = self._layout.spark_checkpoint_dir(operator, current.spark_dirs[operator])
        return self._snapshots.last_committed(folder)

    def _note_who_cannot_catch_up(self, channels: Mapping[OperatorId, ChannelLog], current: GenerationRecord) -> None:
        """A directory that is behind its log is sound only if the log says how to go on."""
        for operator in self._graph.names:
            if operator in self._damaged:
                continue
            is_stateful = self._plans[operator].is_stateful
            try:
                committed = self._committed(operator, current)
                self._restorer.check_repeatable(operator, committed, channels, is_stateful=is_stateful)
            except CutlineError as error:
                self._problem(f"{operator}: {error}")
                self._damaged.add(operator)

    # ------------------------------------------------------------------ per-operator mode

    def _each_by_itself(
        self,
        generation: Generation,
        current: GenerationRecord | None,
        manifests: list[Manifest],
    ) -> Recovered:
        """Everything goes on where it was; an operator whose directory is damaged goes back alone, and catches up."""
        if self._restore_to is not None:
            raise RecoveryError(
                "in per-operator mode no checkpoint is of the whole flow: there is none to go back to",
                flow=self._graph.flow,
            )
        if current is None:
            if self._inventory.had_any():
                raise self._beyond_repair("all generation records are gone")
            return self._fresh(generation, "first start of this flow")
        self._refuse_unreadable(manifests)
        channels = self._live_channels(current, manifests)
        if channels is None or self._sinks.are_ahead(manifests):
            raise self._beyond_repair("; ".join(self._problems))
        if not self._damaged:
            return self._resume(generation, current, channels, manifests)
        damage = "; ".join(self._problems)
        for operator in sorted(self._damaged):
            folder = self._layout.spark_checkpoint_dir(operator, generation)
            is_stateful = self._plans[operator].is_stateful
            epoch = self._restorer.build_alone(operator, manifests, channels, folder, is_stateful=is_stateful)
            log.warning("operator_goes_back_alone", flow=self._graph.flow, operator=operator, epoch=epoch)
        crashpoint("restore-dirs-built")
        return self._enter(
            generation=generation,
            path="alone",
            epoch=None,
            reason=damage,
            channels=_gone_on(channels, generation),
            spark_dirs={**current.spark_dirs, **dict.fromkeys(self._damaged, generation)},
            manifests=manifests,
        )

    def _refuse_unreadable(self, manifests: list[Manifest]) -> None:
        """An operator's newest epoch cannot be done without: its sinks may have published it."""
        for epoch in self._inventory.unreadable:
            owners = self._snapshots.recorded(epoch) or frozenset(self._graph.names)
            if any(epoch > epoch_in(manifests, owner) for owner in owners):
                raise self._beyond_repair("; ".join(self._problems))

    def _beyond_repair(self, why: str) -> RecoveryError:
        return RecoveryError(
            f"in per-operator mode the logs and the newest checkpoints must be whole: {why}",
            next_step="restore the storage folder from a backup, or start over under a new flow name",
            flow=self._graph.flow,
        )

    # ------------------------------------------------------------------ the three ways

    def _fresh(self, generation: Generation, reason: str) -> Recovered:
        self._matching = Matching(operators=())
        channels = {
            operator: ChannelLog.open(operator, self._layout.channel(operator), Lineage.begin(generation))
            for operator in self._graph.names
        }
        if any(channel.entries() for channel in channels.values()):
            # Their batches would count as done, although the sources begin anew.
            raise RecoveryError(
                "the channels hold data, but all records about it are gone",
                next_step="restore the storage folder from a backup, or start over under a new flow name",
                flow=self._graph.flow,
            )
        spark_dirs = dict.fromkeys(self._graph.names, generation)
        for operator in self._graph.names:
            folder = self._layout.spark_checkpoint_dir(operator, generation)
            shutil.rmtree(folder, ignore_errors=True)
            durable.make_dir(folder)
        return self._enter(
            generation=generation,
            path="fresh",
            epoch=None,
            reason=reason,
            channels=channels,
            spark_dirs=spark_dirs,
            manifests=[],
        )

    def _resume(
        self,
        generation: Generation,
        current: GenerationRecord,
        channels: dict[OperatorId, ChannelLog],
        manifests: list[Manifest],
    ) -> Recovered:
        self._lost = self._restorer.refuse_lost_ahead(current.spark_dirs)
        gone_on = _gone_on(channels, generation)
        joined = self._joined(gone_on, generation)
        recovered = self._enter(
            generation=generation,
            path="resume",
            epoch=None,
            reason="live directories and logs are intact",
            channels={**gone_on, **joined},
            spark_dirs={**current.spark_dirs, **dict.fromkeys(joined, generation)},
            manifests=manifests,
            begun=joined,
        )
        self._restorer.move_on()
        return recovered

    def _joined(
        self, channels: Mapping[OperatorId, ChannelLog], generation: Generation
    ) -> dict[OperatorId, ChannelLog]:
        """Logs and directories of operators that are new: they read all that the logs of their inputs still hold."""
        logs = dict(channels)
        notes: dict[OperatorId, str] = {}
        added = [name for name in self._graph.names if name in self._matching.added]
        for name in added:
            positions = {one: logs[one].start for one in self._graph.node(name).inputs}
            logs[name] = begin_log(self._layout, name, positions, generation)
            self._snapshots.begin_anew(self._layout.spark_checkpoint_dir(name, generation))
            notes[name] = _beginning(positions, "where its log begins")
        self._matching = self._matching.with_notes(notes)
        return {name: logs[name] for name in added}

    def _going_on(
        self,
        generation: Generation,
        current: GenerationRecord,
        channels: dict[OperatorId, ChannelLog],
        manifests: list[Manifest],
    ) -> Recovered | None:
        """As much as possible goes on where it was; None if nothing can."""
        if not self._damaged:
            return self._resume(generation, current, channels, manifests)
        there = frozenset(self._going_on_names())
        region = region_of(self._damaged, {name: self._graph.consumers(name) for name in self._graph.names}) & there
        if not manifests or region == there:
            return None
        return self._regional(region, generation, current, channels, manifests)

    def _regional(
        self,
        region: frozenset[OperatorId],
        generation: Generation,
        current: GenerationRecord,
        channels: dict[OperatorId, ChannelLog],
        manifests: list[Manifest],
    ) -> Recovered | None:
        """Only what is damaged, and what is downstream of it, goes back; None if the newest checkpoint cannot do it."""
        manifest = manifests[-1]
        try:
            self._restorer.check_inputs(manifest, region, channels)
            live = self._layout.live_dirs(current.spark_dirs)
            self._lost = self._restorer.refuse_lost_input(manifest, region, live)
            restored = self._restorer.build(manifest, region, generation)
        except LostInputError:
            raise
        except (CutlineError, OSError) as error:
            self._problem(f"{', '.join(sorted(region))} cannot go back to epoch {manifest.epoch} alone: {error}")
            return None
        gone_on = {**_gone_on(channels, generation), **restored}
        joined = self._joined(gone_on, generation)
        crashpoint("restore-dirs-built")
        return self._enter(
            generation=generation,
            path="regional",
            epoch=manifest.epoch,
            reason="; ".join(self._problems),
            channels={**gone_on, **joined},
            spark_dirs={**current.spark_dirs, **dict.fromkeys([*restored, *joined], generation)},
            manifests=manifests,
            begun=joined,
        )

    def _as_asked(self, generation: Generation, manifests: list[Manifest], epoch: Epoch) -> Recovered:
        chosen = [manifest for manifest in manifests if manifest.epoch <= epoch]
        if not chosen or chosen[-1].epoch != epoch:
            kept = ", ".join(str(manifest.epoch) for manifest in manifests) or "none"
            raise RecoveryError(
                f"epoch {epoch} is not a checkpoint that the flow can go back to",
                next_step=f"choose one of those kept: {kept}",
                flow=self._graph.flow,
            )
        self._matching = self._matcher.checkpoint(chosen[-1], self._inventory.generations, self._changes)
        self._sinks.refuse_to_pass(epoch)
        try:
            built = self._built_or_fetched(chosen, generation)
        except RecoveryError:
            raise
        except (CutlineError, OSError) as error:
            raise RecoveryError(
                f"epoch {epoch} cannot be restored: {error}",
                next_step="choose another checkpoint; nothing has been changed",
                flow=self._graph.flow,
            ) from error
        return self._enter_restored(
            chosen[-1], generation, path="local", reason=f"a person asked for epoch {epoch}", built=built
        )

    def _built_or_fetched(self, manifests: list[Manifest], generation: Generation) -> _Built:
        try:
            return self._built(manifests, generation)
        except RecoveryError:
            raise
        except (CutlineError, OSError) as error:
            if self._remote is None:
                raise
            self._problem(f"epoch {manifests[-1].epoch} is fetched from the remote tier: {error}")
        self._remote.fetch_content(manifests[-1])
        return self._built(manifests, generation)

    def _built(self, manifests: list[Manifest], generation: Generation) -> _Built:
        """All that is needed to go on from the last of these, and the checkpoints that the flow then has."""
        if self._inventory.generations:
            live = self._layout.live_dirs(self._inventory.generations[-1].spark_dirs)
            # It has run under the name of then, or under that of today.
            today = {old: live[new] for old, new in self._matching.renaming.new_names.items() if new in live}
            self._lost = self._restorer.refuse_lost_input(manifests[-1], manifests[-1].operators, {**today, **live})
        if self._matching.is_unchanged:
            return _Built(self._restorer.build(manifests[-1], self._graph.names, generation), manifests)
        epoch = self._inventory.free_epoch()
        carried = self._carry_over.build(manifests, self._matching, epoch=epoch, generation=generation)
        cuts = carried.manifest.operators
        notes = {name: _beginning(cuts[name].positions, "after the checkpoint") for name in self._matching.added}
        self._matching = self._matching.with_notes(notes)
        return _Built(carried.channels, [*manifests, carried.manifest])

    def _enter_restored(
        self, restored: Manifest, generation: Generation, *, path: str, reason: str, built: _Built
    ) -> Recovered:
        crashpoint("restore-dirs-built")
        newest = built.manifests[-1]
        if self._remote is not None and newest is not restored:
            # What was published after it is about to be taken back.
            seen = {sink: epoch for sink, epoch in self._metadata.seen().items() if epoch <= restored.epoch}
            published = Published(everywhere=self._published_everywhere(restored), seen=seen)
            unpublished = [one for one in built.manifests if one.epoch > published.everywhere]
            self._remote.bring(unpublished, generation, published)
        is_other = {new for old, new in self._matching.renaming.new_names.items() if old != new}
        return self._enter(
            generation=generation,
            path=path,
            epoch=restored.epoch,
            reason=reason,
            channels=built.channels,
            spark_dirs=dict.fromkeys(self._graph.names, generation),
            manifests=built.manifests,
            begun=[*is_other, *self._matching.added],
            restored=restored,
        )

    def _published_everywhere(self, manifest: Manifest) -> Epoch:
        """Up to where every sink is, by what it says itself or what was written down."""
        recorded = self._metadata.published()
        sinks = [node.sink for node in self._graph.sinks]
        everywhere = (max(self._sinks.published(sink), recorded.get(sink, NO_EPOCH)) for sink in sinks)
        return min([*everywhere, manifest.epoch])

    def _from_checkpoint(self, generation: Generation, manifests: list[Manifest]) -> Recovered:
        reason = "; ".join(self._problems) or "no generation record"
        for path, usable in self._inventory.usable(manifests):
            manifest = usable[-1]
            try:
                self._matching = self._matcher.checkpoint(manifest, self._inventory.generations, Changes())
                built = self._built(usable, generation)
            except LostInputError:
                raise  # an older checkpoint would need even more of it
            except (CutlineError, OSError) as error:
                self._problem(f"epoch {manifest.epoch} of the {path} tier cannot be used: {error}")
                continue
            self._sinks.refuse_to_pass(manifest.epoch)
            return self._enter_restored(manifest, generation, path=path, reason=reason, built=built)
        if self._inventory.had_any():
            raise RecoveryError(
                f"no checkpoint can be used, and the live state is damaged: {'; '.join(self._problems)}",
                next_step="restore the storage folder from a backup, or start over under a new flow name",
                flow=self._graph.flow,
            )
        log.warning("starting_fresh", flow=self._graph.flow, reason=reason, note="no checkpoint had ever completed")
        return self._fresh(generation, f"no checkpoint had ever completed, and {reason}")

    def _enter(
        self,
        *,
        generation: Generation,
        path: str,
        epoch: Epoch | None,
        reason: str,
        channels: dict[OperatorId, ChannelLog],
        spark_dirs: dict[OperatorId, Generation],
        manifests: list[Manifest],
        begun: Collection[OperatorId] = (),
        restored: Manifest | None = None,
    ) -> Recovered:
        """``begun``: operators whose log goes on from none of their name; ``restored``: what all have gone back to."""
        since, left = histories(
            self._inventory.generations,
            generation=generation,
            names=channels,
            begun_now=begun,
            restored=restored,
            layout=self._layout,
        )
        record = generation_record(
            graph=self._graph,
            plans=self._plans,
            generation=generation,
            path=path,
            epoch=epoch,
            reason=reason,
            lineages={name: channel.lineage for name, channel in channels.items()},
            spark_dirs=spark_dirs,
            is_per_operator=self._is_per_operator,
            begun=since,
            left=left,
            lost_input=self._lost,
        )
        if self._remote is not None and epoch is not None:
            self._remote.tell(record)
            crashpoint("remote-told")
        if not self._snapshots.create_generation(record):
            raise FencedError("this generation was taken by another process", generation=generation)
        crashpoint("restore-generation")
        self._metadata.count_recovery(path)
        level = log.info if path in ("resume", "fresh") else log.warning
        level("recovered", flow=self._graph.flow, path=path, generation=generation, epoch=epoch, reason=reason)
        for lost in self._lost:
            log.warning("input_lost", flow=self._graph.flow, operator=lost.operator, what=lost.what, why=lost.why)
        for one in self._matching.operators if not self._matching.is_unchanged else ():
            level = log.info if one.fate in ("kept", "added") else log.warning
            level(f"operator_{one.fate}", flow=self._graph.flow, was=one.was, now=one.now, note=one.note)
        return Recovered(
            generation=generation,
            path=path,
            restored_epoch=epoch,
            reason=reason,
            channels=channels,
            spark_dirs=spark_dirs,
            record=record,
            manifests=manifests,
            pending=self._pending,
            incarnations=incarnations_of([*self._inventory.generations, record]),
            matching=self._matching,
            problems=self._problems,
        )

    def _problem(self, text: str) -> None:
        self._problems.append(text)
        log.warning("recovery_problem", flow=self._graph.flow, problem=text)


def _gone_on(channels: Mapping[OperatorId, ChannelLog], generation: Generation) -> dict[OperatorId, ChannelLog]:
    """The logs forked at their ends: nothing is given up, and what an old process still writes is read by nobody."""
    lineages = {name: old.lineage.fork(generation, old.end) for name, old in channels.items()}
    return {name: ChannelLog.open(name, old.folder, lineages[name]) for name, old in channels.items()}


def _beginning(positions: Mapping[OperatorId, Position], where: str) -> str:
    """How an operator begins that is new, for people."""
    if not positions:
        return "begins without state, at the beginning of its source"
    shown = ", ".join(f"{name} from entry {position} on" for name, position in positions.items())
    return f"begins without state, reads {shown}, {where}"
