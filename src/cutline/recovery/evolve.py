"""Restores a checkpoint after an evolution: operators were renamed, dropped or added since it was taken.

Its content becomes a new checkpoint with its own number, which is restored like any other. The old one is not touched.
In every log the new one has a barrier, which says by the new names how far its operator has read: a later reader of the
log need not know former names.
Only the start that restores makes such a checkpoint, and it counts as soon as that start's generation exists. A kill
before that leaves only files that nothing refers to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.channels import entry_files as codec
from cutline.channels.log import ChannelLog
from cutline.coordinator.manifests import operator_cut
from cutline.errors import RecoveryError
from cutline.model.checkpoint import ChannelCut, Manifest, OperatorRecord, SnapshotFile, SubtaskRecord
from cutline.model.cut import InFlight, Timings
from cutline.model.entries import BarrierEntry, Entry
from cutline.model.ids import (
    NO_BATCH,
    NO_EPOCH,
    START,
    BatchId,
    Epoch,
    Generation,
    OperatorId,
    Position,
    SinkId,
    Subtask,
)
from cutline.model.layout import Layout
from cutline.model.remote import SinkProgress
from cutline.objects.waiting import wait_for_store
from cutline.ports.sinks import Claimable
from cutline.protocol.history.evolution import Evolution
from cutline.protocol.history.histories import history_in
from cutline.protocol.history.lineage import Lineage, Span, spans_of
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.recovery.facts import SinkFacts
from cutline.protocol.recovery.plan import RestorePlan
from cutline.protocol.recovery.sink_rules import published_everywhere
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.directories import Restorer
from cutline.recovery.logs import ensure
from cutline.worker.snapshots import acknowledgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolved:
    """The state that a start continues from."""

    manifest: Manifest
    channels: dict[OperatorId, ChannelLog]


def evolve(restorer: Restorer, manifests: Sequence[Manifest], evolution: Evolution, *, epoch: Epoch) -> Evolved:
    """Make ``epoch`` from the last of these checkpoints; sinks may have yet to publish those before it.

    Raises DamagedRecordError if it is damaged, RecoveryError if a sink cannot publish an epoch that it must publish.
    """
    return _Evolving(restorer, manifests, evolution).evolved(epoch)


def upload_evolved(
    plan: RestorePlan,
    manifests: Sequence[Manifest],
    sinks: Sequence[SinkFacts],
    flow: FlowAtRest,
    generation: Generation,
) -> None:
    """Upload an evolved checkpoint before the flow continues from it.

    Otherwise a host that is lost right afterwards would leave only checkpoints with the former operators.
    """
    if flow.remote is None or plan.evolved_epoch is None or plan.epoch is None:
        return
    restored = plan.epoch
    # What was published after it is about to be rewound.
    seen = {sink: epoch for sink, epoch in flow.metadata.seen().items() if epoch <= restored}
    published = SinkProgress(everywhere=published_everywhere(sinks, restored), seen=seen)
    flow.remote.upload([one for one in manifests if one.epoch > published.everywhere], generation, published)


class _Evolving:
    """Makes the checkpoint, the logs and the directories of one start."""

    def __init__(self, restorer: Restorer, manifests: Sequence[Manifest], evolution: Evolution) -> None:
        self._restorer = restorer
        self._flow = restorer.flow
        self._generation = restorer.generation
        self._manifests = manifests
        self._manifest = manifests[-1]
        self._renaming = evolution.renaming
        self._claimed: set[SinkId] = set()

    def evolved(self, epoch: Epoch) -> Evolved:
        restorer, manifest = self._restorer, self._manifest
        old_names = {new: old for old, new in self._renaming.new_names.items()}
        # Everything is checked before anything is written: a start that tries another checkpoint finds no traces.
        records = {new: restorer.record(manifest, old) for new, old in old_names.items()}
        old_logs = {new: restorer.forked_channel(manifest, old) for new, old in old_names.items()}
        for new, old in old_names.items():
            self._publish(old, new)
        channels: dict[OperatorId, ChannelLog] = {}
        made: dict[OperatorId, OperatorRecord] = {}
        for name in self._flow.graph.names:  # inputs before their consumers
            if name in records:
                channels[name] = self._log_of(old_logs[name], name)
                record = self._renaming.record(records[name], self._read_blob)
                # Its staged output is published, or the old epochs publish it.
                record = msgspec.structs.replace(record, sinks={}, in_flight={})
                restorer.place(record, name)
            else:
                lineage = Lineage.begin(self._generation)
                channels[name] = ChannelLog.open(name, self._flow.layout.channel(name), lineage)
                record = self._new_record(name, channels)
                self._flow.query_dirs.begin_anew(self._flow.layout.spark_checkpoint_dir(name, self._generation))
            barrier = channels[name].end
            made[name] = msgspec.structs.replace(record, epoch=epoch, generation=self._generation, barrier=barrier)
            _append_cut(channels[name], epoch, record.batch, record.positions, is_aligned=record.aligned)
        crashpoint("carry-logs")
        evolved = self._stored(epoch, made, channels)
        crashpoint("carry-manifest")
        return Evolved(manifest=evolved, channels=channels)

    def _stored(
        self, epoch: Epoch, made: Mapping[OperatorId, OperatorRecord], channels: Mapping[OperatorId, ChannelLog]
    ) -> Manifest:
        """Store the records, then the manifest that names them."""
        checkpoints = self._flow.checkpoints
        stored = {name: checkpoints.store_record(record) for name, record in made.items()}
        cuts = {name: operator_cut(acknowledgement(one), made[name].batch) for name, one in stored.items()}
        in_flight: dict[OperatorId, dict[OperatorId, InFlight]] = {name: {} for name in made}
        for consumer, record in made.items():
            for name, position in record.positions.items():
                in_flight[name][consumer] = channels[name].in_flight(position, cuts[name].barrier)
        evolved = Manifest(
            flow=self._flow.graph.flow,
            epoch=epoch,
            generation=self._generation,
            previous_epoch=self._manifest.epoch,
            started_ms=now_ms(),
            completed_ms=now_ms(),
            # Not a moment of the flow passes, and its sinks are as they were.
            flow_ms=self._manifest.flow_ms or self._manifest.completed_ms,
            published=self._manifest.published,
            carried_from=self._manifest.epoch,
            history=self._restorer.identity,
            code=self._manifest.code,  # its content is what that code made
            operators=cuts,
            channels={
                name: ChannelCut(
                    barrier=cut.barrier, lineage=spans_of(channels[name].lineage), in_flight=in_flight[name]
                )
                for name, cut in cuts.items()
            },
        )
        checkpoints.store_manifest(evolved)
        return evolved

    # ------------------------------------------------------------------ logs

    def _log_of(self, log: ChannelLog, new: OperatorId) -> ChannelLog:
        """The log up to the old barrier; for a renamed operator, the part that will be read, in its new folder."""
        if log.operator == new:
            return log
        generation, cut = self._generation, self._manifest.channels[log.operator]
        flights = cut.in_flight.items()
        kept = [flight.first for consumer, flight in flights if consumer in self._renaming.new_names]
        first = min([*kept, cut.barrier])
        folder = self._flow.layout.channel(new)
        durable.make_dir(codec.generation_dir(folder, generation))
        durable.make_dir(codec.data_dir(folder))
        copied = [self._copied(entry, log, folder) for entry in log.entries(first)]
        durable.fsync_dir(codec.data_dir(folder))  # before an entry names what is in it
        for entry in copied:
            durable.create(codec.entry_path(folder, generation, entry.seq), codec.encode(entry))
        channel = ChannelLog.open(new, folder, Lineage(spans=(Span(generation, first),)))
        for copy in channel.data_entries():
            for segment in copy.segments:
                ensure(channel, segment, deep=False, flow=self._flow.graph.flow)  # executors may look for it elsewhere
        return channel

    def _copied(self, entry: Entry, log: ChannelLog, folder: Path) -> Entry:
        generation, positions = self._generation, self._renaming.keys(entry.positions)
        if isinstance(entry, BarrierEntry):
            return msgspec.structs.replace(entry, generation=generation, positions=positions)
        segments = []
        for segment in entry.segments:
            # The folder may hold segments of another operator that once had this name.
            name = f"{log.operator}.{segment.name}"
            target = codec.data_dir(folder) / name
            if not target.exists():
                local = wait_for_store(partial(log.segments.local_copy, segment.name), flow=self._flow.graph.flow)
                os.link(local, target)
            segments.append(msgspec.structs.replace(segment, name=name))
        # The old epochs publish its staged output.
        return msgspec.structs.replace(
            entry, generation=generation, positions=positions, segments=segments, staged={}, plan={}
        )

    def _read_blob(self, file: SnapshotFile) -> bytes:
        return self._flow.layout.blob(file.sha256).read_bytes()

    # ------------------------------------------------------------------ records

    def _new_record(self, name: OperatorId, channels: Mapping[OperatorId, ChannelLog]) -> OperatorRecord:
        """The record of a new operator: it has read nothing before the barriers, and never will.

        The operators before it have processed that input; the new one begins at their barriers.
        """
        inputs = self._flow.graph.node(name).inputs
        subtasks = range(self._flow.plans[name].subtasks)
        return OperatorRecord(
            flow=self._flow.graph.flow,
            operator=name,
            epoch=Epoch(0),
            generation=Generation(0),
            batch=NO_BATCH,
            barrier=START,
            positions={one: _barrier_of(channels[one]) for one in inputs},
            aligned=True,
            watermark_ms=0,
            subtasks=[SubtaskRecord(subtask=Subtask(one), files=[], size_bytes=0, new_bytes=0) for one in subtasks],
            shared=[],
            sinks={},
            timings=Timings(),
        )

    def _publish(self, old: OperatorId, new: OperatorId) -> None:
        """Publish what complete epochs hold for sinks of a renamed operator.

        Later no epoch would be found under its new name. Each is published under its own number, as before the
        renaming: a rewind of the sink to that epoch finds it.
        """
        for sink in self._flow.graph.sinks_of(new) if old != new else ():
            for manifest in self._manifests:
                if old not in manifest.operators or manifest.epoch <= self._published(sink):
                    continue
                cut = manifest.operators[old]
                permit = CommitPermit(
                    flow=self._flow.graph.flow,
                    operator=new,
                    sink=sink,
                    epoch=manifest.epoch,
                    generation=manifest.generation,
                    previous_epoch=manifest.previous_epoch,
                    after_batch=cut.after_batch,
                    through_batch=cut.batch,
                )
                prepared = self._flow.checkpoints.load_record(manifest, old).sinks.get(sink)
                staged = [batch for batch in prepared.staged if permit.covers(batch.batch)] if prepared else []
                try:
                    self._claim(sink)
                    self._flow.sinks[sink].commit(permit, staged, prepared.token if prepared else {})
                except Exception as error:  # a sink may raise anything
                    raise RecoveryError(
                        f"sink {sink} has yet to publish epoch {manifest.epoch}, but cannot: {error}",
                        next_step="fix the cause and start again; nothing has been changed",
                        flow=self._flow.graph.flow,
                        operator=new,
                    ) from error

    def _claim(self, name: SinkId) -> None:
        """A claim without a takeover: the generation does not exist yet, and after a kill it never may.

        The claim that the start makes later replaces this one.
        """
        sink, claims = self._flow.sinks[name], self._restorer.claims
        if isinstance(sink, Claimable) and name not in self._claimed:
            sink.claim(history_in(claims.get(name, "")), expected=claims.get(name, ""))
            claims[name] = sink.claimed()
            self._claimed.add(name)

    def _published(self, sink: SinkId) -> Epoch:
        """The newest epoch of a sink, by its ledger or the coordinator's records."""
        recorded = self._flow.metadata.published().get(sink, NO_EPOCH)
        return max(self._flow.sinks[sink].published() or NO_EPOCH, recorded)


def begin_log(
    layout: Layout, name: OperatorId, positions: Mapping[OperatorId, Position], generation: Generation
) -> ChannelLog:
    """The log of an operator that joins a continuing flow: its first entry says where it begins to read."""
    channel = ChannelLog.open(name, layout.channel(name), Lineage.begin(generation))
    _append_cut(channel, NO_EPOCH, NO_BATCH, positions, is_aligned=True)
    return channel


def _append_cut(
    channel: ChannelLog, epoch: Epoch, batch: BatchId, positions: Mapping[OperatorId, Position], *, is_aligned: bool
) -> None:
    """Append a barrier of a closed epoch, for which no operator waits. It says how far its operator has read."""
    channel.append(
        BarrierEntry(
            seq=channel.end,
            generation=channel.lineage.generation,
            epoch=epoch,
            batch=batch,
            positions=dict(positions),
            aligned=is_aligned,
            alignment_limit_ms=None,
        )
    )
    channel.sync_barriers()


def _barrier_of(channel: ChannelLog) -> Position:
    return channel.barriers()[-1].seq
