"""A checkpoint under the names of today: operators renamed, dropped and added since it was taken.

What it holds is carried over into a checkpoint of its own, with a number of its own, which is then restored like any
other. The old one is not touched. In every log the new one has a barrier, which says by the new names how far its
operator has read: whoever opens the log later needs to know nothing of what names were before.
Only the start that goes back makes such a checkpoint, and it counts from the moment at which that start's generation
exists. Killed before, only files nobody knows of are left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.channels.log import ChannelLog
from cutline.coordinator.manifests import channel_cut, operator_cut
from cutline.errors import RecoveryError
from cutline.model import entries as codec
from cutline.model.entries import BarrierEntry, Entry
from cutline.model.graph import FlowGraph
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
from cutline.ports import (
    Manifest,
    OperatorPlan,
    OperatorRecord,
    Sink,
    SnapshotFile,
    SnapshotStore,
    SubtaskRecord,
)
from cutline.protocol.history.evolution import Matching
from cutline.protocol.history.lineage import Lineage, Span
from cutline.protocol.messages.coordinator import Timings
from cutline.protocol.publish.commit import CommitPermit
from cutline.recovery.directories import Restorer
from cutline.worker.snapshots import acknowledgement


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedOver:
    """What a start needs to go on from."""

    manifest: Manifest
    channels: dict[OperatorId, ChannelLog]


class CarryOver:
    """Makes the checkpoint, the logs and the directories of one start."""

    def __init__(
        self,
        *,
        graph: FlowGraph,
        plans: Mapping[OperatorId, OperatorPlan],
        layout: Layout,
        snapshots: SnapshotStore,
        sinks: Mapping[SinkId, Sink],
        published: Callable[[SinkId], Epoch],
        restorer: Restorer,
    ) -> None:
        """``published``: how far a sink is, by all that is known."""
        self._graph = graph
        self._plans = plans
        self._layout = layout
        self._snapshots = snapshots
        self._sinks = sinks
        self._published = published
        self._restorer = restorer

    def build(
        self, manifests: Sequence[Manifest], matching: Matching, *, epoch: Epoch, generation: Generation
    ) -> CarriedOver:
        """Carry over the last of these checkpoints as ``epoch``; those before it may still have to be published.

        Raises DamagedRecordError if it cannot be trusted, RecoveryError if a sink cannot publish what it should have.
        """
        manifest = manifests[-1]
        old_names = {new: old for old, new in matching.renaming.new_names.items()}
        # Everything is looked at before anything is written: whoever tries another checkpoint instead finds no traces.
        records = {new: self._restorer.verified_record(manifest, old) for new, old in old_names.items()}
        old_logs = {new: self._restorer.forked_channel(manifest, old, generation) for new, old in old_names.items()}
        for new, old in old_names.items():
            self._publish(manifests, old, new)
        channels: dict[OperatorId, ChannelLog] = {}
        made: dict[OperatorId, OperatorRecord] = {}
        for name in self._graph.names:  # inputs before those that read them
            folder = self._layout.spark_checkpoint_dir(name, generation)
            if name in records:
                channels[name] = self._log_of(manifest, old_logs[name], name, matching, generation)
                record = matching.renaming.record(records[name], self._read_blob)
                record = msgspec.structs.replace(record, sinks={})  # it is published, or will be by the old epochs
                self._restorer.place(record, name, generation)
            else:
                channels[name] = ChannelLog.open(name, self._layout.channel(name), Lineage.begin(generation))
                record = self._new_record(name, channels)
                self._snapshots.begin_anew(folder)
            made[name] = msgspec.structs.replace(record, epoch=epoch, generation=generation, barrier=channels[name].end)
            _append_cut(channels[name], epoch, record.batch, record.positions, is_aligned=record.aligned)
        crashpoint("carry-logs")
        carried = self._stored(manifest, made, channels)
        crashpoint("carry-manifest")
        return CarriedOver(manifest=carried, channels=channels)

    def _stored(
        self,
        manifest: Manifest,
        made: Mapping[OperatorId, OperatorRecord],
        channels: Mapping[OperatorId, ChannelLog],
    ) -> Manifest:
        """The records, then the manifest that names them."""
        stored = {name: self._snapshots.store_record(record) for name, record in made.items()}
        cuts = {name: operator_cut(acknowledgement(one), made[name].batch) for name, one in stored.items()}
        read: dict[OperatorId, dict[OperatorId, Position]] = {name: {} for name in made}
        for consumer, record in made.items():
            for name, position in record.positions.items():
                read[name][consumer] = position
        any_record = next(iter(made.values()))
        carried = Manifest(
            flow=self._graph.flow,
            epoch=any_record.epoch,
            generation=any_record.generation,
            previous_epoch=manifest.epoch,
            started_ms=now_ms(),
            completed_ms=now_ms(),
            carried_from=manifest.epoch,
            operators=cuts,
            channels={name: channel_cut(channels[name], cuts[name].barrier, read[name]) for name in cuts},
        )
        self._snapshots.store_manifest(carried)
        return carried

    # ------------------------------------------------------------------ logs

    def _log_of(
        self, manifest: Manifest, log: ChannelLog, new: OperatorId, matching: Matching, generation: Generation
    ) -> ChannelLog:
        """The log up to the old barrier; of one that has another name now, what somebody will read, in its folder."""
        if log.operator == new:
            return log
        barrier = manifest.channels[log.operator].barrier
        flights = manifest.channels[log.operator].in_flight
        kept = [flight.first for consumer, flight in flights.items() if consumer in matching.renaming.new_names]
        first = min([*kept, barrier])
        folder = self._layout.channel(new)
        durable.make_dir(codec.generation_dir(folder, generation))
        durable.make_dir(codec.data_dir(folder))
        for entry in log.entries(first):
            copied = self._copied(entry, log, folder, matching, generation)
            durable.create(codec.entry_path(folder, generation, entry.seq), codec.encode(copied))
        durable.fsync_dir(codec.data_dir(folder))
        channel = ChannelLog.open(new, folder, Lineage(spans=(Span(generation, first),)))
        for copy in channel.data_entries():
            for segment in copy.segments:
                channel.segments.ensure(segment, deep=False)  # executors may look for it elsewhere
        return channel

    def _copied(self, entry: Entry, log: ChannelLog, folder: Path, matching: Matching, generation: Generation) -> Entry:
        positions = matching.renaming.keys(entry.positions)
        if isinstance(entry, BarrierEntry):
            return msgspec.structs.replace(entry, generation=generation, positions=positions)
        segments = []
        for segment in entry.segments:
            # The folder may hold segments of another operator that once had this name.
            name = f"{log.operator}.{segment.name}"
            target = codec.data_dir(folder) / name
            if not target.exists():
                os.link(log.segments.bring_near(segment.name), target)
            segments.append(msgspec.structs.replace(segment, name=name))
        # What it has staged is published by the old epochs.
        return msgspec.structs.replace(
            entry, generation=generation, positions=positions, segments=segments, staged={}, plan={}
        )

    def _read_blob(self, file: SnapshotFile) -> bytes:
        return self._layout.blob(file.sha256).read_bytes()

    # ------------------------------------------------------------------ records

    def _new_record(self, name: OperatorId, channels: Mapping[OperatorId, ChannelLog]) -> OperatorRecord:
        """Of an operator that was not there: nothing has been read of what lies before the barriers, and nothing will.

        Those before it have processed that; it begins where they go on.
        """
        inputs = self._graph.node(name).inputs
        subtasks = range(self._plans[name].subtasks)
        return OperatorRecord(
            flow=self._graph.flow,
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

    def _publish(self, manifests: Sequence[Manifest], old: OperatorId, new: OperatorId) -> None:
        """What complete epochs hold for sinks of an operator that has another name now, and have yet to publish.

        Later no epoch would be found that holds anything of it. Each is published under its own number, as it would
        have been before: whoever takes the sink back to it finds it there.
        """
        for sink in self._graph.sinks_of(new) if old != new else ():
            for manifest in manifests:
                if old not in manifest.operators or manifest.epoch <= self._published(sink):
                    continue
                cut = manifest.operators[old]
                permit = CommitPermit(
                    flow=self._graph.flow,
                    operator=new,
                    sink=sink,
                    epoch=manifest.epoch,
                    generation=manifest.generation,
                    previous_epoch=manifest.previous_epoch,
                    after_batch=cut.after_batch,
                    through_batch=cut.batch,
                )
                prepared = self._snapshots.load_record(manifest, old).sinks.get(sink)
                staged = [batch for batch in prepared.staged if permit.covers(batch.batch)] if prepared else []
                try:
                    self._sinks[sink].commit(permit, staged, prepared.token if prepared else {})
                except Exception as error:  # a sink may raise anything
                    raise RecoveryError(
                        f"sink {sink} has yet to publish epoch {manifest.epoch}, and cannot: {error}",
                        next_step="mend the cause and start again; nothing has been changed",
                        flow=self._graph.flow,
                        operator=new,
                    ) from error


def begin_log(
    layout: Layout, name: OperatorId, positions: Mapping[OperatorId, Position], generation: Generation
) -> ChannelLog:
    """The log of an operator that joins a flow which goes on: its first entry says where it begins to read."""
    channel = ChannelLog.open(name, layout.channel(name), Lineage.begin(generation))
    _append_cut(channel, NO_EPOCH, NO_BATCH, positions, is_aligned=True)
    return channel


def _append_cut(
    channel: ChannelLog, epoch: Epoch, batch: BatchId, positions: Mapping[OperatorId, Position], *, is_aligned: bool
) -> None:
    """A barrier that nobody waits for: its epoch is over. It says where its operator is."""
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
