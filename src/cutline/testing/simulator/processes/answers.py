"""Answers to what the protocol's choice of a recovery path asks, from the simulated disk, sinks and bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_EPOCH, START, BatchId, Epoch, OperatorId
from cutline.protocol.history.evolution import Definition
from cutline.protocol.history.histories import takeovers_in
from cutline.protocol.history.lineage import lineage_of
from cutline.protocol.publish.immediate import end_of
from cutline.protocol.recovery.facts import (
    InputAhead,
    InputSince,
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
from cutline.testing.simulator.processes.remote_tier import check_sealed
from cutline.testing.simulator.storage import savepoints
from cutline.testing.simulator.storage.bucket import Bucket
from cutline.testing.simulator.storage.checkpoints import Checkpoint, EntryName, content_names
from cutline.testing.simulator.storage.disk import Disk
from cutline.testing.simulator.storage.log import Data
from cutline.testing.simulator.storage.sinks import FLOW
from cutline.testing.simulator.world import Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow

_AWAY = "the remote tier is away"


def definition_of(flow: SimulatedFlow) -> Definition:
    graph = flow.graph
    return Definition(
        flow=FLOW,
        inputs=graph.inputs,
        schemas=dict.fromkeys(graph.operators, b""),
        sinks=dict(graph.sinks),
        is_per_operator=flow.settings.is_per_operator,
    )


def first_facts(flow: SimulatedFlow, target: Epoch | str | None) -> RecoveryFacts:
    """What is known without asking anything that may be away."""
    disk = flow.disk
    epoch = savepoints.put_back(disk, target) if isinstance(target, str) else target
    return RecoveryFacts(
        definition=definition_of(flow),
        stored=stored_facts(disk),
        sinks=sink_facts(flow),
        restore_to=RestoreTo(epoch=epoch) if epoch is not None else None,
        pins=frozenset(disk.pins),
        last_epoch=disk.last_epoch,
        last_completed=max((one for one, how in disk.outcomes.items() if how == "completed"), default=NO_EPOCH),
        has_completed="completed" in disk.outcomes.values(),
        has_remote=flow.site.bucket is not None,
        has_run=disk.has_run,
        announced=frozenset(disk.announced),
    )


def stored_facts(disk: Disk) -> StoredFacts:
    return StoredFacts(
        generations=tuple(disk.generations[one] for one in sorted(disk.generations)),
        epochs=tuple(_stored_epoch(disk, one) for one in disk.complete()),
    )


def _stored_epoch(disk: Disk, checkpoint: Checkpoint) -> StoredEpoch:
    manifest = checkpoint.manifest
    gone = [name for name in manifest.operators if disk.record_of(checkpoint, name) is None]
    return StoredEpoch(
        epoch=manifest.epoch,
        manifest=manifest,
        problem=f"the record of {gone[0]} is gone" if gone else "",
        recorded=frozenset(manifest.operators) - set(gone) if gone else frozenset(),
    )


def sink_facts(flow: SimulatedFlow) -> tuple[SinkFacts, ...]:
    return tuple(
        SinkFacts(
            sink=sink,
            operator=target.operator,
            # Of one that publishes immediately the numbers are no epochs of the flow.
            published=NO_EPOCH if target.is_immediate else target.ledger.published,
            recorded=flow.disk.published.get(sink, NO_EPOCH),
            seen=flow.disk.seen.get(sink),
            highest=NO_EPOCH if target.is_immediate else target.ledger.highest,
            publish="at_once" if target.is_immediate else "checkpoint",
            claim=target.claimed(),
            takeovers=takeovers_in(target.claimed()),
            newest_batch=target.ledger.published if target.is_immediate else NO_EPOCH,
        )
        for sink, target in flow.sinks.items()
    )


# ------------------------------------------------------------------------------------------------- one by one


def is_required(need: NeedFacts) -> bool:
    """Whether a start waits for the remote tier to find this out."""
    if isinstance(need, NeedFirstRemote | NeedRemoteHistory):
        return need.is_required
    return not isinstance(need, NeedRemoteEpochs)


def unanswered(facts: RecoveryFacts, need: NeedFacts) -> RecoveryFacts:
    """The remote tier is away, and a start does not wait for it."""
    if isinstance(need, NeedFirstRemote):
        return replace(facts, first_remote=RemoteRecords(problem=_AWAY, stored=facts.stored))
    if isinstance(need, NeedRemoteHistory):
        return replace(facts, remote_history=RemoteHistory(problem=_AWAY))
    return replace(facts, remote_epochs=frozenset())


def answered(flow: SimulatedFlow, facts: RecoveryFacts, need: NeedFacts) -> RecoveryFacts:
    """RemoteAway: the remote tier does not answer."""
    bucket = flow.site.bucket
    match need:
        case NeedSinkLimits():
            return replace(facts, sinks=sink_facts(flow))
        case NeedRemoteHistory():
            return replace(facts, remote_history=_remote_history(bucket))
        case NeedFirstRemote():
            return replace(facts, first_remote=_download_records(flow, bucket))
        case NeedRemote():
            return replace(facts, remote=_download_records(flow, bucket))
        case NeedRemoteEpochs():
            return replace(facts, remote_epochs=frozenset(bucket.epochs() if bucket is not None else ()))
        case NeedPublishedBefore():
            return replace(facts, published_before={**facts.published_before, need.epoch: _noted(bucket, need.epoch)})
        case NeedContent():
            problem = _download_content(flow, bucket, need.manifest)
            return replace(facts, contents={**facts.contents, need.manifest.epoch: problem})
        case NeedLive():
            return replace(facts, live=_live(flow, need.generation, need.complete))
        case NeedSegments():
            return replace(facts, missing_segments={})
        case NeedInputSince():
            found = InputSince(epoch=need.manifest.epoch, operators=need.operators, tier=need.tier)
            return replace(facts, input_since=(*facts.input_since, found))
        case NeedInputAhead():
            return replace(facts, input_ahead=InputAhead())
        case NeedEntries():
            return replace(facts, has_entries=False)
        case _:
            assert_never(need)


def _remote_history(bucket: Bucket | None) -> RemoteHistory:
    if bucket is None:
        return RemoteHistory(problem="there is no remote tier")
    return RemoteHistory(generations=tuple(bucket.generations()), epochs=tuple(bucket.completed()))


def _noted(bucket: Bucket | None, epoch: Epoch) -> PublishedBefore:
    if bucket is None:
        return PublishedBefore(problem="there is no remote tier")
    note = bucket.published_before(epoch)
    return PublishedBefore(everywhere=note.everywhere, seen=note.seen)


def _download_records(flow: SimulatedFlow, bucket: Bucket | None) -> RemoteRecords:
    """Generations, records, then manifests; what is here already stays as it is."""
    if bucket is None:
        return RemoteRecords(problem="there is no remote tier", stored=stored_facts(flow.disk))
    disk = flow.disk
    epochs = bucket.epochs()
    for record in bucket.generations():
        disk.generations.setdefault(record.generation, record)
    for epoch in epochs:
        manifest = bucket.manifest(epoch)
        if manifest is None:
            continue
        for key in Checkpoint(manifest).record_keys().values():
            found = bucket.record(key)
            if found is None:
                raise Violation(f"epoch {epoch} is in the remote tier without the record of {key[1]}")
            disk.records.setdefault(key, found)
        if epoch not in disk.manifests:
            disk.put_manifest(manifest)
            disk.only_records.add(epoch)
    return RemoteRecords(epochs=frozenset(epochs), stored=stored_facts(disk))


def _download_content(flow: SimulatedFlow, bucket: Bucket | None, manifest: Manifest) -> str:
    if bucket is None:
        return "there is no remote tier"
    disk = flow.disk
    if bucket.manifest(manifest.epoch) is None:
        return "it was collected there"
    check_sealed(bucket, manifest)
    for name in content_names(manifest, disk.records):
        content = bucket.download(name)
        if not isinstance(name, EntryName):
            disk.blobs.add(name)
        elif content is not None:
            disk.logs[name.channel].put(content)
    disk.only_records.discard(manifest.epoch)
    flow.world.counts["downloads"] += 1
    return ""


def _live(
    flow: SimulatedFlow, current: GenerationRecord, complete: Mapping[OperatorId, BatchId]
) -> dict[OperatorId, LiveOperator]:
    disk, found = flow.disk, {}
    for name in complete:
        lineage, log = lineage_of(current.lineage[name]), disk.logs[name]
        problem = log.damage(lineage)
        if problem:
            found[name] = LiveOperator(log=None, log_problem=problem)
            continue
        view, spark = log.view(lineage), disk.spark.get((name, current.spark_dirs[name]))
        damage = "its directory is not on this host"
        if spark is not None:
            behind = flow.settings.is_per_operator
            damage = spark.damage(view.last_batch, complete[name], may_be_behind=behind) or ""
            if not damage and behind:
                damage = _catch_up_problem(flow, name, spark.committed, current)
        found[name] = LiveOperator(
            log=LogFacts(
                start=view.entries[0].seq if view.entries else view.end,
                end=view.end,
                last_batch=view.last_batch,
                positions=view.positions,
                place=end_of(view.entries),
            ),
            damage=(damage,) if damage else (),
            resumes_at=view.positions_after(spark.committed) if spark is not None else {},
        )
    return found


def _catch_up_problem(flow: SimulatedFlow, name: OperatorId, committed: BatchId, current: GenerationRecord) -> str:
    """Why a directory that is behind its log cannot go on from it: the log must say how, and all it reads be there."""
    view = flow.disk.logs[name].view(lineage_of(current.lineage[name]))
    if committed >= view.last_batch:
        return ""
    following = [entry.batch for entry in view.entries if isinstance(entry, Data) and entry.batch > committed]
    if following != list(range(committed + 1, view.last_batch + 1)):
        return f"its log does not hold all batches after {committed}"
    read = view.positions_after(committed)
    for channel in flow.graph.inputs[name]:
        if flow.disk.logs[channel].start > read.get(channel, START):
            return f"the log of {channel} does not reach back to where it reads"
    return ""


__all__ = ["answered", "first_facts", "is_required", "sink_facts", "stored_facts", "unanswered"]
