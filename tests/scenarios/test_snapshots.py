"""Snapshots and sink commits of one operator."""

from __future__ import annotations

import errno
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.base import durable
from cutline.config.options import OperatorOptions, build_options
from cutline.errors import FencedError
from cutline.model.checkpoint import OperatorRecord
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, Generation, OperatorId, Position
from cutline.model.plan import OperatorPlan
from cutline.protocol.messages.agent import ResendAck, TakeSnapshot
from cutline.protocol.messages.wire import (
    EpochClosed,
    OperatorAcked,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
    ToCoordinator,
)
from cutline.protocol.publish.commit import CommitPermit
from cutline.testing.twins.engine import MemoryEngine
from cutline.testing.twins.sink import MemorySink
from cutline.worker.operator_spec import OperatorPorts, OperatorSpec, OperatorStart
from cutline.worker.sink_commits import SinkCommits
from cutline.worker.snapshots import Snapshotter
from tests.support.channels import append_barrier
from tests.support.outbox import KeptOutbox
from tests.support.stored_flow import FLOW, ORDERS, SUBTASKS, TABLE, TOTALS, StoredFlow

LONG = 10.0


class Desk:
    """A snapshotter of ``totals`` and what it reports."""

    def __init__(self, flow: StoredFlow, *, completed_batch: int = NO_BATCH, follows_inputs: bool = False) -> None:
        self.flow = flow
        self.sink = MemorySink()
        outbox = KeptOutbox()
        self.heard = outbox.heard
        self.fatal: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        spec = OperatorSpec(
            flow=FLOW,
            operator=TOTALS,
            plan=OperatorPlan(operator=TOTALS, subtasks=SUBTASKS, is_stateful=True, schema_ipc=b""),
            inputs=(ORDERS,),
            consumers=(),
            sinks={TABLE: self.sink},
            options=build_options({}),
            own_options=OperatorOptions(),
        )
        start = OperatorStart(
            operator=TOTALS,
            generation=flow.recovered.generation,
            channel=flow.log(TOTALS),
            spark_dir=flow.recovered.generation,
            last_epoch=NO_EPOCH,
            open_epochs=frozenset(),
            completed_batch=BatchId(completed_batch),
        )
        ports = OperatorPorts(
            engine=MemoryEngine(),
            query_dirs=flow.store.query_dirs,
            checkpoints=flow.store.checkpoints,
            spark_checkpoint_dir=flow.spark_dir(TOTALS),
            inputs={ORDERS: flow.log(ORDERS)} if follows_inputs else {},
            wire=lambda *_: None,
            on_fatal=self.fatal.put,
            check_fence=lambda: None,
        )
        self.snapshotter = Snapshotter(spec, start, ports, outbox, on_committed=lambda _: None, on_fatal=self.fatal.put)
        self.sink_commits = SinkCommits(spec, ports, outbox=outbox, on_fatal=self.fatal.put)
        self.snapshotter.start()
        self.sink_commits.start()

    def stop(self) -> None:
        self.snapshotter.stop()
        self.sink_commits.stop()

    def cut(self, epoch: int) -> None:
        barrier = append_barrier(self.flow.log(TOTALS), epoch)
        self.snapshotter.request(
            TakeSnapshot(
                epoch=Epoch(epoch),
                batch=barrier.batch,
                positions=dict(barrier.positions),
                aligned=True,
                alignment_ms=3,
                start_delay_ms=2,
            )
        )

    def next(self) -> ToCoordinator:
        return self.heard.get(timeout=LONG)

    def acked(self) -> OperatorAcked:
        event = self.next()
        assert isinstance(event, OperatorAcked)
        return event

    def path(self, epoch: int) -> Path:
        return self.flow.layout.record(Epoch(epoch), TOTALS, self.flow.recovered.generation)

    def closed(self, epoch: int, *, completed: bool) -> None:
        self.snapshotter.epoch_closed(EpochClosed(epoch=Epoch(epoch), completed=completed))

    def record(self, epoch: int) -> OperatorRecord:
        from cutline.base import records

        return records.load("operator", self.path(epoch), OperatorRecord)

    def permit(self, epoch: int, *, after: int, through: int) -> CommitPermit:
        return CommitPermit(
            flow=FLOW,
            operator=TOTALS,
            sink=TABLE,
            epoch=Epoch(epoch),
            generation=Generation(1),
            previous_epoch=Epoch(epoch - 1),
            after_batch=BatchId(after),
            through_batch=BatchId(through),
        )


@pytest.fixture
def flow(tmp_path: Path) -> StoredFlow:
    flow = StoredFlow(tmp_path)
    flow.start()
    return flow


@pytest.fixture
def desk(flow: StoredFlow) -> Iterator[Desk]:
    desk = Desk(flow)
    yield desk
    desk.stop()


# ------------------------------------------------------------------------------------------------- snapshots


def test_a_snapshot_is_stored_and_acknowledged(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all(batches=2)
    desk.cut(1)
    ack = desk.acked().ack
    record = desk.record(1)
    assert (ack.operator, ack.epoch, ack.generation) == (TOTALS, 1, 1)
    assert (ack.cut.batch, ack.cut.barrier, ack.cut.positions) == (1, 2, {ORDERS: 2})
    assert [subtask.subtask for subtask in ack.subtasks] == [0, 1]
    assert all(subtask.files for subtask in ack.subtasks)
    assert ack.watermark_ms == record.watermark_ms == 1_001
    assert (ack.timings.alignment_ms, ack.timings.start_delay_ms) == (3, 2)
    assert ack.timings.sync_ms > 0 and ack.timings.async_ms > 0
    assert all(subtask.async_ms > 0 for subtask in ack.subtasks)
    assert flow.store.checkpoints.damage(record) == []


def test_before_the_first_batch_every_subtask_acknowledges_all_the_same(desk: Desk) -> None:
    desk.cut(1)
    ack = desk.acked().ack
    assert ack.cut.batch == NO_BATCH
    assert [(subtask.subtask, subtask.files) for subtask in ack.subtasks] == [(0, 0), (1, 0)]


def test_a_snapshot_waits_until_spark_has_committed_the_batch(flow: StoredFlow, desk: Desk) -> None:
    flow.run(ORDERS)
    flow.run(TOTALS, until="appended")
    desk.cut(1)
    with pytest.raises(queue.Empty):
        desk.heard.get(timeout=0.05)
    flow.spark(TOTALS).commit(0)
    assert desk.acked().ack.cut.batch == 0


def test_a_snapshot_lies_at_its_batch_even_when_later_ones_are_committed(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all()
    barrier = append_barrier(flow.log(TOTALS), 1)
    flow.run_all(batches=2)
    action = TakeSnapshot(
        epoch=Epoch(1), batch=barrier.batch, positions=dict(barrier.positions), aligned=True, alignment_ms=0
    )
    desk.snapshotter.request(action)
    desk.acked()
    record = desk.record(1)
    assert (record.batch, record.barrier) == (0, barrier.seq)
    assert "commits/1" not in {file.path for file in record.files()}


def test_a_snapshot_that_fails_is_reported_and_the_next_is_taken(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all()
    missing = flow.spark_dir(TOTALS) / "offsets" / "0"
    content = missing.read_bytes()
    missing.unlink()
    desk.cut(1)
    failed = desk.next()
    assert isinstance(failed, SnapshotFailed)
    assert (failed.operator, failed.epoch, failed.generation) == (TOTALS, 1, 1)
    missing.write_bytes(content)
    desk.cut(2)
    assert desk.acked().ack.epoch == 2


def test_a_sink_that_cannot_prepare_fails_the_snapshot_and_not_the_thread(flow: StoredFlow, desk: Desk) -> None:
    """A sink may raise anything."""
    flow.run_all()
    desk.sink.prepare_failures.append(ValueError("schema has changed"))
    desk.cut(1)
    failed = desk.next()
    assert isinstance(failed, SnapshotFailed)
    assert "schema has changed" in failed.reason
    desk.cut(2)
    assert desk.acked().ack.epoch == 2


@pytest.mark.parametrize(("number", "is_fatal"), [(errno.EIO, True), (errno.EROFS, True), (errno.ENOSPC, False)])
def test_a_disk_that_fails_ends_the_flow_and_a_full_one_only_the_snapshot(
    flow: StoredFlow, desk: Desk, monkeypatch: pytest.MonkeyPatch, number: int, is_fatal: bool
) -> None:
    """After it a later sync may succeed without what the disk has lost."""
    flow.run_all()
    syncs: list[Path] = []

    def fails(path: Path) -> None:
        syncs.append(path)
        raise OSError(number, "it fails")

    monkeypatch.setattr(durable, "fsync_file", fails)
    desk.cut(1)
    assert isinstance(desk.next(), SnapshotFailed)
    assert desk.fatal.empty() is not is_fatal
    assert len(syncs) == 1


def test_an_epoch_that_ends_while_its_snapshot_waits_is_left_alone(flow: StoredFlow, desk: Desk) -> None:
    flow.run(ORDERS)
    flow.run(TOTALS, until="appended")
    desk.cut(1)
    desk.closed(1, completed=False)
    flow.spark(TOTALS).commit(0)
    desk.cut(2)
    assert desk.acked().ack.epoch == 2
    assert not desk.path(1).exists()


def test_a_cut_that_comes_after_the_end_of_its_epoch_takes_no_snapshot(flow: StoredFlow, desk: Desk) -> None:
    """Nobody would ever let go of what it stores."""
    flow.run_all()
    desk.closed(1, completed=False)
    desk.cut(1)
    desk.cut(2)
    assert desk.acked().ack.epoch == 2
    assert not flow.layout.checkpoint(Epoch(1)).exists()


def test_snapshots_are_taken_in_the_order_of_their_epochs(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all()
    for epoch in (1, 2, 3):
        desk.cut(epoch)
    assert [desk.acked().ack.epoch for _ in range(3)] == [1, 2, 3]


def test_a_stop_gives_up_what_waits(flow: StoredFlow, desk: Desk) -> None:
    flow.run(ORDERS)
    flow.run(TOTALS, until="appended")
    desk.cut(1)
    desk.stop()
    assert desk.heard.empty()


def test_what_is_in_flight_is_in_the_record_and_in_the_acknowledgement(flow: StoredFlow) -> None:
    """orders: b0 b1 b2 |1 – totals has read one of them."""
    desk = Desk(flow, follows_inputs=True)
    for _ in range(3):
        flow.run(ORDERS)
    flow.run(TOTALS, read=1)
    append_barrier(flow.log(ORDERS), 1)
    desk.cut(1)
    ack = desk.acked().ack
    flight = ack.in_flight[ORDERS]
    assert (flight.first, flight.end, flight.entries) == (1, 3, 2)
    assert flight.rows and flight.size_bytes
    assert desk.record(1).in_flight == ack.in_flight
    desk.stop()


def test_a_snapshot_does_not_wait_for_the_barriers_of_its_inputs(flow: StoredFlow) -> None:
    desk = Desk(flow, follows_inputs=True)
    flow.run_all()
    desk.cut(1)
    ack = desk.acked().ack
    assert ack.in_flight == desk.record(1).in_flight == {}
    assert ack.cut.positions == {ORDERS: 1}, "where the range begins; the producer knows where it ends"
    desk.stop()


# ------------------------------------------------------------------------------------------------- said again


def resend(desk: Desk, epoch: int) -> None:
    desk.snapshotter.resend(ResendAck(epoch=Epoch(epoch)))


def test_an_acknowledgement_can_be_said_again(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all()
    desk.cut(1)
    first = desk.acked()
    resend(desk, 1)
    assert desk.acked() == first


def test_a_failure_can_be_said_again(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all()
    desk.sink.prepare_failures.append(ValueError("cannot"))
    desk.cut(1)
    first = desk.next()
    resend(desk, 1)
    assert desk.next() == first


def test_there_is_nothing_to_say_again_of_an_epoch_that_is_over_or_unknown(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all()
    desk.cut(1)
    desk.acked()
    desk.closed(1, completed=True)
    resend(desk, 1)
    resend(desk, 5)
    desk.cut(2)
    assert desk.acked().ack.epoch == 2


def test_an_operator_that_restarts_before_it_was_heard_acknowledges_what_it_has_stored(
    flow: StoredFlow, desk: Desk
) -> None:
    flow.run_all()
    desk.cut(1)
    first = desk.acked()
    again = Desk(flow)
    flow.spark_dir(TOTALS).rename(flow.spark_dir(TOTALS).with_name("gone"))
    barrier = flow.log(TOTALS).barriers()[0]
    again.snapshotter.request(
        TakeSnapshot(epoch=Epoch(1), batch=barrier.batch, positions={}, aligned=True, alignment_ms=99)
    )
    assert again.acked() == first
    again.stop()


def test_what_was_stored_for_an_epoch_is_gone_when_it_was_aborted(flow: StoredFlow, desk: Desk) -> None:
    """The coordinator has discarded it before; our record came a moment later."""
    flow.run_all()
    desk.cut(1)
    desk.acked()
    assert desk.path(1).exists()
    desk.closed(1, completed=False)
    desk.cut(2)
    desk.acked()
    assert not flow.layout.checkpoint(Epoch(1)).exists()


def test_that_an_epoch_was_missed_is_reported(desk: Desk) -> None:
    desk.snapshotter.report_failure(Epoch(4), "epoch 5 was cut before it")
    failed = desk.next()
    assert isinstance(failed, SnapshotFailed)
    assert (failed.epoch, failed.generation, failed.reason) == (4, 1, "epoch 5 was cut before it")


# ------------------------------------------------------------------------------------------------- what is bound


def bound(desk: Desk, epoch: int) -> list[int]:
    return [batch.batch for batch in desk.record(epoch).sinks[TABLE].staged]


def test_an_epoch_binds_everything_since_the_newest_complete_one(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all(batches=2)
    desk.cut(1)
    desk.acked()
    flow.run_all()
    desk.cut(2)
    desk.acked()
    assert bound(desk, 1) == [0, 1]
    assert bound(desk, 2) == [0, 1, 2]
    assert desk.sink.prepared == {1: [0, 1], 2: [0, 1, 2]}
    desk.closed(1, completed=True)
    flow.run_all()
    desk.cut(3)
    desk.acked()
    assert bound(desk, 3) == [2, 3]


def test_an_aborted_epoch_leaves_its_batches_to_the_next(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all(batches=2)
    desk.cut(1)
    desk.acked()
    desk.closed(1, completed=False)
    flow.run_all()
    desk.cut(2)
    desk.acked()
    assert bound(desk, 2) == [0, 1, 2]


def test_what_was_complete_before_the_start_is_not_bound_again(flow: StoredFlow) -> None:
    flow.run_all(batches=3)
    desk = Desk(flow, completed_batch=1)
    desk.cut(1)
    desk.acked()
    desk.stop()
    assert bound(desk, 1) == [2]


def test_a_late_end_of_an_older_epoch_takes_nothing_back(flow: StoredFlow, desk: Desk) -> None:
    for epoch in (1, 2):
        flow.run_all()
        desk.cut(epoch)
        desk.acked()
    desk.closed(2, completed=True)
    desk.closed(1, completed=True)
    flow.run_all()
    desk.cut(3)
    desk.acked()
    assert bound(desk, 3) == [2]


# ------------------------------------------------------------------------------------------------- commits


@pytest.fixture
def complete(flow: StoredFlow) -> Iterator[Desk]:
    """Epochs 1 (batches 0, 1) and 2 (batch 2) are complete."""
    flow.run_all(batches=2)
    flow.checkpoint(1)
    flow.run_all()
    flow.checkpoint(2)
    desk = Desk(flow)
    yield desk
    desk.stop()


def test_a_commit_publishes_the_batches_that_the_permit_covers(complete: Desk) -> None:
    complete.sink_commits.publish(complete.permit(1, after=-1, through=1))
    complete.sink_commits.publish(complete.permit(2, after=1, through=2))
    assert complete.next() == SinkCommitted(operator=TOTALS, sink=TABLE, epoch=Epoch(1), has_rows=True)
    assert complete.next() == SinkCommitted(operator=TOTALS, sink=TABLE, epoch=Epoch(2), has_rows=True)
    assert complete.sink.visible == {1: [0, 1], 2: [2]}


def test_a_commit_that_fails_is_reported_and_can_be_asked_for_again(complete: Desk) -> None:
    complete.sink.commit_failures.append(ValueError("no network to postgresql://bob:hunter2@db/x"))
    permit = complete.permit(1, after=-1, through=1)
    complete.sink_commits.publish(permit)
    failed = complete.next()
    assert isinstance(failed, SinkCommitFailed)
    assert failed.reason == "ValueError: no network to postgresql://***@db/x"
    complete.sink_commits.publish(permit)
    assert isinstance(complete.next(), SinkCommitted)
    assert complete.sink.visible == {1: [0, 1]}


def test_a_commit_without_a_manifest_publishes_nothing(complete: Desk) -> None:
    complete.sink_commits.publish(complete.permit(7, after=2, through=3))
    assert isinstance(complete.next(), SinkCommitFailed)
    assert complete.sink.visible == {}


def test_a_commit_whose_record_is_damaged_publishes_nothing(complete: Desk) -> None:
    path = complete.path(1)
    path.write_bytes(path.read_bytes().replace(b'"batch":0', b'"batch":9'))
    complete.sink_commits.publish(complete.permit(1, after=-1, through=1))
    assert isinstance(complete.next(), SinkCommitFailed)
    assert complete.sink.visible == {}


def test_a_fenced_sink_ends_the_flow(complete: Desk) -> None:
    complete.sink.commit_failures.append(FencedError("another history"))
    complete.sink_commits.publish(complete.permit(1, after=-1, through=1))
    assert isinstance(complete.fatal.get(timeout=LONG), FencedError)
    assert complete.heard.empty()


def test_a_slow_snapshot_does_not_hold_up_a_commit(complete: Desk) -> None:
    complete.flow.run(ORDERS)
    complete.flow.run(TOTALS, until="appended")
    complete.cut(3)
    complete.sink_commits.publish(complete.permit(1, after=-1, through=1))
    assert isinstance(complete.next(), SinkCommitted)


def test_positions_in_the_record_are_those_of_the_cut(flow: StoredFlow, desk: Desk) -> None:
    flow.run_all()
    desk.cut(1)
    desk.acked()
    assert desk.record(1).positions == {OperatorId("orders"): Position(1)}
