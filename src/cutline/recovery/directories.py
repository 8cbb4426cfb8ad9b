"""What a restore to an epoch needs, built and checked before anything is decided: directories and forked logs.

For the whole flow or for a region of it; killed on the way, only files nobody knows of are left.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from cutline.base.clock import now_ms
from cutline.channels.log import ChannelLog
from cutline.coordinator.manifests import lineage_of, spans_of
from cutline.errors import CutlineError, DamagedRecordError, LostInputError, RecoveryError, StoreError
from cutline.model.entries import DataEntry
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_BATCH, NO_EPOCH, START, BatchId, Epoch, Generation, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports import GenerationRecord, LostInput, Manifest, OperatorPlan, OperatorRecord, SnapshotStore, Spans
from cutline.protocol.history.lineage import Lineage


class Restorer:
    """Takes operators back to an epoch."""

    def __init__(
        self,
        *,
        graph: FlowGraph,
        layout: Layout,
        snapshots: SnapshotStore,
        problem: Callable[[str], None],
        goes_on_without: bool = False,
    ) -> None:
        """``problem`` hears of what does not hold and does not hinder.

        ``goes_on_without``: input that is gone hinders nobody either, because a person has said so.
        """
        self._goes_on_without = goes_on_without
        self._graph = graph
        self._layout = layout
        self._snapshots = snapshots
        self._problem = problem
        #: The directories that operators have run on, as far as they were looked at.
        self._live: dict[OperatorId, Path] = {}
        #: Where operators go on whose positions must be moved first.
        self._to_move: list[Path] = []

    def build(
        self, manifest: Manifest, operators: Collection[OperatorId], generation: Generation
    ) -> dict[OperatorId, ChannelLog]:
        """Fresh directories and logs that go on after the epoch. Raises DamagedRecordError if it cannot be trusted."""
        records = self._verified_records(manifest, operators)
        channels = {name: self.forked_channel(manifest, name, generation) for name in records}
        for name, record in records.items():
            self.place(record, name, generation)
        return channels

    def place(self, record: OperatorRecord, name: OperatorId, generation: Generation) -> None:
        """The directory that an operator goes on in. Positions that cannot be read are moved if they may be."""
        folder = self._layout.spark_checkpoint_dir(name, generation)
        self._snapshots.restore(record, folder)
        live = self._live.get(record.operator) or self._live.get(name)
        if record.batch == NO_BATCH and live is not None:
            self._snapshots.begin_as_before(folder, live)
        if self._goes_on_without and not record.positions:
            self._snapshots.skip_lost_input(folder, live or folder)

    def refuse_lost_input(
        self, manifest: Manifest, operators: Collection[OperatorId], live_dirs: Mapping[OperatorId, Path]
    ) -> list[LostInput]:
        """Raise LostInputError if a source of one of these cannot read again what it has read since.

        ``live_dirs``: where they have run since, which says what that was. Returns what is lost, if the flow may go on
        without it.
        """
        lost: list[LostInput] = []
        for name in sorted(operators):
            if name not in manifest.operators or name not in live_dirs:
                continue
            self._live[name] = live_dirs[name]
            try:
                found = self._snapshots.lost_input(self._snapshots.load_record(manifest, name), live_dirs[name])
            except StoreError as error:
                raise LostInputError(
                    f"whether the input since epoch {manifest.epoch} can be read again cannot be known: {error.what}",
                    next_step=error.next_step or "see whether the server runs; nothing has been changed",
                    flow=self._graph.flow,
                    operator=name,
                    epoch=manifest.epoch,
                ) from error
            if found and not self._goes_on_without:
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                raise LostInputError(
                    f"input that was read since epoch {manifest.epoch} is gone: {found[0].what}{more}; "
                    "going back would silently lose its rows",
                    next_step="put it back and start again, or restore a later checkpoint; nothing has been changed. "
                    'missing_input = "continue" goes on without it',
                    flow=self._graph.flow,
                    operator=name,
                    epoch=manifest.epoch,
                )
            lost += found
        return lost

    def refuse_lost_ahead(self, live: Mapping[OperatorId, Generation]) -> list[LostInput]:
        """The same for sources that go on where they are, and what they have not read yet.

        Their positions are moved by ``move_on``, when what is lost has been written down: afterwards nobody can tell.
        """
        lost: list[LostInput] = []
        for name in self._graph.names:
            if self._graph.node(name).inputs or name not in live:
                continue
            folder = self._layout.spark_checkpoint_dir(name, live[name])
            try:
                found = self._snapshots.lost_ahead(name, folder)
            except StoreError as error:
                self._problem(f"{name}: whether its input is there cannot be known: {error}")
                continue  # its query will wait for the server
            if found and not self._goes_on_without:
                raise LostInputError(
                    f"input that was not read yet is gone: {found[0].what} ({found[0].why})",
                    next_step='put it back and start again; missing_input = "continue" goes on without it',
                    flow=self._graph.flow,
                    operator=name,
                )
            if found:
                self._to_move.append(folder)
            lost += found
        return lost

    def move_on(self) -> None:
        """Move the positions of sources that go on where they are, past what is lost."""
        for folder in self._to_move:
            self._snapshots.skip_lost_input(folder, folder)
        self._to_move.clear()

    def build_alone(
        self,
        operator: OperatorId,
        manifests: Sequence[Manifest],
        channels: Mapping[OperatorId, ChannelLog],
        folder: Path,
        *,
        is_stateful: bool,
    ) -> Epoch:
        """A directory from which one operator catches up with its own log, which goes on as it is.

        Built from the newest of its snapshots that can be trusted; without one, from nothing, if its log and those it
        reads are there from the beginning. Returns the epoch, NO_EPOCH for nothing. Raises RecoveryError if neither
        will do.
        """
        for manifest in reversed([one for one in manifests if operator in one.operators]):
            cut = manifest.operators[operator]
            try:
                repeated = self._to_repeat(operator, cut.batch, cut.positions, channels, is_stateful=is_stateful)
                record = self.verified_record(manifest, operator)
                self._snapshots.restore(record, folder)
                self._plan_ahead(folder, repeated, is_stateful=is_stateful)
            except (CutlineError, OSError) as error:
                self._problem(f"epoch {manifest.epoch} of {operator} cannot be used: {error}")
                continue
            return manifest.epoch
        try:
            repeated = self._to_repeat(operator, NO_BATCH, {}, channels, is_stateful=is_stateful)
        except DamagedRecordError as error:
            raise RecoveryError(
                f"no checkpoint of it can be used, and its log does not reach back to the beginning: {error}",
                next_step="restore the storage folder from a backup, or start over under a new flow name",
                flow=self._graph.flow,
                operator=operator,
            ) from error
        self._snapshots.begin_anew(folder)
        self._plan_ahead(folder, repeated, is_stateful=is_stateful)
        return NO_EPOCH

    def check_repeatable(
        self, operator: OperatorId, committed: BatchId, channels: Mapping[OperatorId, ChannelLog], *, is_stateful: bool
    ) -> None:
        """Raise DamagedRecordError if its log does not say how to go on after the batch that it has finished."""
        own = channels[operator]
        if committed < own.last_batch:
            self._to_repeat(operator, committed, own.positions_after(committed), channels, is_stateful=is_stateful)

    def _to_repeat(
        self,
        operator: OperatorId,
        after: BatchId,
        read: Mapping[OperatorId, Position],
        channels: Mapping[OperatorId, ChannelLog],
        *,
        is_stateful: bool,
    ) -> list[DataEntry]:
        """The batches in its log that follow ``after``, with all that is needed to run them again."""
        own = channels[operator]
        entries = [entry for entry in own.data_entries() if entry.batch > after]
        if [entry.batch for entry in entries] != list(range(after + 1, own.last_batch + 1)):
            raise DamagedRecordError(f"its log does not hold all batches after {after}", channel=operator)
        unplanned = [entry.batch for entry in entries if not entry.plan]
        if unplanned:
            raise DamagedRecordError(f"its log does not say how batch {unplanned[0]} was planned", channel=operator)
        # Without state nothing is run again, so no input is read again.
        for name in self._graph.node(operator).inputs if is_stateful else ():
            first = read.get(name, START)
            if channels[name].start > first:
                raise DamagedRecordError(f"log begins at {channels[name].start}, needed from {first}", channel=name)
            for entry in channels[name].data_entries(first):
                _check_segments(channels[name], entry)
        return entries

    def _plan_ahead(self, folder: Path, repeated: Sequence[DataEntry], *, is_stateful: bool) -> None:
        """Without state there is nothing to rebuild: the query begins right behind its log."""
        for entry in repeated if not is_stateful else ():
            self._snapshots.put_plan(folder, entry.batch, entry.plan)
            self._snapshots.commit_plan(folder, entry.batch)

    def verified_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        record = self._snapshots.load_record(manifest, operator)
        damage = self._snapshots.damage(record)
        if damage:
            raise DamagedRecordError("; ".join(damage), operator=operator, epoch=manifest.epoch)
        return record

    def _verified_records(
        self, manifest: Manifest, operators: Collection[OperatorId]
    ) -> dict[OperatorId, OperatorRecord]:
        missing = sorted(set(operators) - set(manifest.operators))
        if missing:
            raise DamagedRecordError(f"it holds nothing of {', '.join(missing)}", epoch=manifest.epoch)
        return {name: self.verified_record(manifest, name) for name in self._graph.names if name in operators}

    def forked_channel(self, manifest: Manifest, name: OperatorId, generation: Generation) -> ChannelLog:
        """A log up to its barrier, going on in the new generation, with the data in flight checked byte by byte."""
        cut = manifest.channels[name]
        lineage = lineage_of(cut.lineage).fork(generation, Position(cut.barrier + 1))
        first = min((flight.first for flight in cut.in_flight.values()), default=cut.barrier)
        folder = self._layout.channel(name)
        try:
            channel = ChannelLog.open(name, folder, lineage)
        except DamagedRecordError as error:
            # Older epochs are then lost; this one may still have all it needs.
            self._problem(f"{name}: {error}")
            channel = ChannelLog.open(name, folder, lineage, first)
        if channel.end != cut.barrier + 1:
            raise DamagedRecordError(f"log ends at {channel.end}, barrier is at {cut.barrier}", channel=name)
        if channel.start > first:
            raise DamagedRecordError(f"log begins at {channel.start}, needed from {first}", channel=name)
        for entry in channel.data_entries(first, cut.barrier):
            _check_segments(channel, entry)
        return channel

    def check_inputs(
        self, manifest: Manifest, region: Collection[OperatorId], channels: Mapping[OperatorId, ChannelLog]
    ) -> None:
        """The logs from outside the region still hold all that the region will read again, byte for byte."""
        for name in sorted(region):
            for channel_name, position in manifest.operators[name].positions.items():
                if channel_name in region:
                    continue
                channel = channels[channel_name]
                if channel.start > position:
                    raise DamagedRecordError(
                        f"log begins at {channel.start}, {name} reads from {position} on", channel=channel_name
                    )
                for entry in channel.data_entries(position):
                    _check_segments(channel, entry)


def _check_segments(channel: ChannelLog, entry: DataEntry) -> None:
    for segment in entry.segments:
        channel.segments.ensure(segment, deep=True)


def generation_record(
    *,
    graph: FlowGraph,
    plans: Mapping[OperatorId, OperatorPlan],
    generation: Generation,
    path: str,
    epoch: Epoch | None,
    reason: str,
    lineages: Mapping[OperatorId, Lineage],
    spark_dirs: Mapping[OperatorId, Generation],
    is_per_operator: bool,
    begun: Mapping[OperatorId, Generation],
    left: Mapping[OperatorId, Spans],
    lost_input: Sequence[LostInput] = (),
) -> GenerationRecord:
    """What is written down of an incarnation; creating it is the moment at which it exists."""
    return GenerationRecord(
        generation=generation,
        started_ms=now_ms(),
        path=path,
        restored_epoch=epoch,
        reason=reason,
        lineage={name: spans_of(one) for name, one in lineages.items()},
        spark_dirs=dict(spark_dirs),
        inputs={node.operator: list(node.inputs) for node in graph.operators},
        schemas={name: base64.b64encode(plan.schema_ipc).decode() for name, plan in plans.items()},
        is_per_operator=is_per_operator,
        begun=dict(begun),
        left=dict(left),
        lost_input=list(lost_input),
    )
