"""Fresh directories and forked logs from a checkpoint, checked byte by byte before anything depends on them.

A kill on the way leaves only files that nothing refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cutline.base import durable
from cutline.channels.log import ChannelLog
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.history import Identity
from cutline.model.ids import NO_BATCH, Generation, OperatorId, Position, SinkId
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.protocol.history.lineage import lineage_of
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.logs import check_segments


def verified_record(checkpoints: CheckpointStore, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
    """An operator's part of a checkpoint. Raises DamagedRecordError unless every byte is as written."""
    record = checkpoints.load_record(manifest, operator)
    damage = checkpoints.damage(record)
    if damage:
        raise DamagedRecordError("; ".join(damage), operator=operator, epoch=manifest.epoch)
    return record


def _check_inputs(manifest: Manifest, region: Collection[OperatorId], logs: Mapping[OperatorId, ChannelLog]) -> None:
    """Check that the logs from outside the region still hold, byte for byte, all that the region will read again."""
    for name in sorted(region):
        for channel_name, position in manifest.operators[name].positions.items():
            if channel_name in region:
                continue
            channel = logs[channel_name]
            if channel.start > position:
                raise DamagedRecordError(
                    f"log begins at {channel.start}, {name} reads from {position} on", channel=channel_name
                )
            for entry in channel.data_entries(position):
                check_segments(channel, entry, flow=manifest.flow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Builds what operators need to continue after an epoch, in a generation of their own."""

    flow: FlowAtRest
    generation: Generation
    #: The identity that the generation will have; a region needs none.
    identity: Identity = ""
    #: The claims that this start may replace; an evolution that publishes replaces some.
    claims: dict[SinkId, str] = field(default_factory=dict)
    #: Receives damage that does not prevent the recovery.
    note: Callable[[str], None]
    #: Whether source positions are moved past lost input.
    may_lose_input: bool = False
    #: The directories that operators have run in since the checkpoint, by their names in the code.
    ran_in: Mapping[OperatorId, Path] = field(default_factory=dict)

    def build(self, manifest: Manifest, operators: Collection[OperatorId]) -> dict[OperatorId, ChannelLog]:
        """Build the directories and return the logs. Raises DamagedRecordError if the checkpoint is damaged."""
        missing = sorted(set(operators) - set(manifest.operators))
        if missing:
            raise DamagedRecordError(f"it holds nothing of {', '.join(missing)}", epoch=manifest.epoch)
        names = [name for name in self.flow.graph.names if name in operators]
        records = {name: self.record(manifest, name) for name in names}
        channels = {name: self.forked_channel(manifest, name) for name in names}
        for name, record in records.items():
            self.place(record, name)
        return channels

    def build_region(
        self, manifest: Manifest, region: Collection[OperatorId], logs: Mapping[OperatorId, ChannelLog]
    ) -> dict[OperatorId, ChannelLog]:
        """The same for a region; ``logs``: the present logs, from which it will read again."""
        _check_inputs(manifest, region, logs)
        return self.build(manifest, region)

    def record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        record = verified_record(self.flow.checkpoints, manifest, operator)
        self.flow.progress.add_bytes(manifest.operators[operator].size_bytes)
        return record

    def place(self, record: OperatorRecord, name: OperatorId) -> None:
        """Build the directory that an operator continues in. Positions in lost input are moved if that is allowed."""
        query_dirs = self.flow.query_dirs
        folder = self.flow.layout.spark_checkpoint_dir(name, self.generation)
        query_dirs.restore(record, folder)
        live = self.ran_in.get(name)
        if record.batch == NO_BATCH and live is not None:
            query_dirs.begin_as_before(folder, live)
        if self.may_lose_input and not record.positions:
            query_dirs.skip_lost_input(folder, live or folder)
        # The generation's record will say that the operator runs there.
        durable.sync_tree(folder)

    def forked_channel(self, manifest: Manifest, name: OperatorId) -> ChannelLog:
        """A log up to its barrier that continues in the new generation, with the data in flight checked."""
        cut = manifest.channels[name]
        lineage = lineage_of(cut.lineage).fork(self.generation, Position(cut.barrier + 1))
        first = min((flight.first for flight in cut.in_flight.values()), default=cut.barrier)
        folder = self.flow.layout.channel(name)
        try:
            channel = ChannelLog.open(name, folder, lineage)
        except DamagedRecordError as error:
            # Older epochs are lost then; this one may still have all it needs.
            self.note(f"{name}: {error}")
            channel = ChannelLog.open(name, folder, lineage, first)
        if channel.end != cut.barrier + 1:
            raise DamagedRecordError(f"log ends at {channel.end}, barrier is at {cut.barrier}", channel=name)
        if channel.start > first:
            raise DamagedRecordError(f"log begins at {channel.start}, needed from {first}", channel=name)
        channel.sync_barriers()
        for entry in channel.data_entries(first, cut.barrier):
            check_segments(channel, entry, flow=manifest.flow)
        return channel
