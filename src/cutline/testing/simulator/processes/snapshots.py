"""One operator's snapshots: wait for Spark's commit, store and sync what is new, store the record, acknowledge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.model.cut import CutPoint, InFlight, OperatorAck, SubtaskAck
from cutline.model.ids import BatchId, Epoch, OperatorId, Subtask
from cutline.protocol.messages.agent import TakeSnapshot
from cutline.protocol.messages.wire import EpochClosed, OperatorAcked, SnapshotFailed
from cutline.protocol.publish.commit import StagedOutput
from cutline.testing.simulator.storage.checkpoints import Blob, Record
from cutline.testing.simulator.storage.log import Data
from cutline.testing.simulator.storage.spark_dir import Counts
from cutline.testing.simulator.world import Steps

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.operator import OperatorProcess


class Snapshots:
    """Dies with its process; what it has stored does not."""

    def __init__(self, process: OperatorProcess, completed_batch: BatchId) -> None:
        self._process = process
        self._world = process.world
        self._disk = process.disk
        self._staged = StagedOutput(completed_batch)
        self._acks: dict[Epoch, OperatorAck] = {}
        self._closed: set[Epoch] = set()
        #: Content that epochs under way refer to, so that no collection takes it.
        self.references: dict[Epoch, tuple[Blob, ...]] = {}

    def take(self, action: TakeSnapshot) -> None:
        self._staged.cut(action.epoch, action.batch)
        self._world.spawn(self._snapshot(action), self._process)

    def resend(self, epoch: Epoch) -> None:
        if epoch in self._acks:
            self._process.say(OperatorAcked(ack=self._acks[epoch]))

    def failed(self, epoch: Epoch, reason: str) -> None:
        process = self._process
        process.say(
            SnapshotFailed(operator=process.operator, epoch=epoch, generation=process.generation, reason=reason)
        )

    def closed(self, event: EpochClosed) -> None:
        self._closed.add(event.epoch)
        self._staged.closed(event.epoch, completed=event.completed)
        self.references.pop(event.epoch, None)
        self._acks.pop(event.epoch, None)
        if not event.completed:
            self._process.flow.discard(event.epoch)

    def _snapshot(self, action: TakeSnapshot) -> Steps:
        process, world, disk = self._process, self._world, self._disk
        while process.query.spark.committed < action.batch:
            yield 5
            if action.epoch in self._closed:
                return
        yield process.slow(world.between(0, 5))
        counts = process.query.spark.states.get(action.batch)
        if counts is None:
            self.failed(action.epoch, "the state is gone")
            return
        blobs = self._blobs_of(counts)
        # Referred to before it is looked for: what is found must still be there when the record names it.
        self.references[action.epoch] = blobs
        for blob in blobs:
            if blob not in disk.blobs:
                yield process.slow(world.between(0, 3))
                refused, unknown = world.strikes("store_refused"), world.strikes("store_unknown")
                if not refused:
                    disk.link_blob(blob)
                if refused or unknown:
                    self.failed(action.epoch, "content could not be stored")
                    return
            # What was found too: its writer may have died before the sync.
            self.sync_blob(blob)
        process.sync_log()
        yield process.slow(world.between(0, 3))
        if action.epoch in self._closed:
            self.references.pop(action.epoch, None)
            return
        self._store_record(action, blobs, self._in_flight(action))

    def _in_flight(self, action: TakeSnapshot) -> dict[OperatorId, InFlight]:
        """What the cut leaves unread before the inputs' barriers, as far as these have appeared."""
        process = self._process
        barrier = process.view().find_barrier(action.epoch)
        if barrier is None or barrier.alone is not None:
            return {}
        found: dict[OperatorId, InFlight] = {}
        for channel, lineage in process.input_lineage.items():
            there = self._disk.logs[channel].view(lineage).find_barrier(action.epoch)
            if there is not None:
                found[channel] = InFlight(first=action.positions[channel], end=there.seq)
        return found

    def sync_blob(self, blob: Blob) -> None:
        self._disk.sync(("blob", blob))

    def _blobs_of(self, counts: Counts) -> tuple[Blob, ...]:
        """One per subtask, by content."""
        operator = self._process.operator
        subtasks = self._process.flow.graph.subtasks[operator]
        split: list[list[tuple[int, int]]] = [[] for _ in range(subtasks)]
        for path, count in sorted(counts.items()):
            split[path % subtasks].append((path, count))
        return tuple((operator, Subtask(number), tuple(part)) for number, part in enumerate(split))

    def _store_record(
        self, action: TakeSnapshot, blobs: tuple[Blob, ...], in_flight: dict[OperatorId, InFlight]
    ) -> None:
        process, disk = self._process, self._disk
        view = process.view()
        barrier = view.find_barrier(action.epoch)
        if barrier is None:
            self.failed(action.epoch, "the barrier was truncated away")
            return
        record = Record(
            operator=process.operator,
            epoch=action.epoch,
            generation=process.generation,
            batch=action.batch,
            barrier=barrier.seq,
            positions=action.positions,
            aligned=action.aligned,
            blobs=blobs,
            in_flight=in_flight,
            staged=tuple(
                next(iter(entry.staged.values()))
                for entry in view.entries
                if isinstance(entry, Data)
                and entry.content
                and entry.staged
                and self._staged.binds(entry.batch, action.batch)
            ),
        )
        if self._world.strikes("store_refused"):
            self.failed(action.epoch, "the record could not be stored")
            return
        key = (action.epoch, process.operator, process.generation)
        before = disk.records.get(key)
        if before is not None:
            # Of an earlier process: good if what it names is still there, now that it is referred to.
            self.references[action.epoch] = before.blobs
            if any(blob not in disk.blobs for blob in before.blobs):
                self.failed(action.epoch, "content of the stored record is gone")
                return
        stored = disk.create_record(record, is_synced=False)
        if self._world.strikes("store_unknown"):
            self.failed(action.epoch, "the record may have been stored")
            return
        if before is None:
            disk.sync(("record", key))
        self._acknowledge(stored)

    def _acknowledge(self, record: Record) -> None:
        """Made from the record and nothing else: said again, it says the same."""
        ack = OperatorAck(
            operator=record.operator,
            epoch=record.epoch,
            generation=record.generation,
            cut=CutPoint(
                batch=record.batch, barrier=record.barrier, positions=record.positions, aligned=record.aligned
            ),
            subtasks=tuple(
                SubtaskAck(subtask=subtask, files=1, size_bytes=len(content), new_bytes=0)
                for _, subtask, content in record.blobs
            ),
            in_flight=record.in_flight,
            record_sha256=f"{record.epoch}-{record.operator}-{record.generation}",
        )
        self._acks[record.epoch] = ack
        self._process.say(OperatorAcked(ack=ack))
