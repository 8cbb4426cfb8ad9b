"""What is written down of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from cutline.channels.log import ChannelLog
from cutline.coordinator.manifests import abort_details, build_manifest, complete_epoch, is_of_history, statistics
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.ports import Manifest
from cutline.protocol.checkpoint.pending_epoch import EpochState, PendingEpoch
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.messages.coordinator import (
    BarrierTerms,
    CutPoint,
    OperatorAck,
    StoreManifest,
    SubtaskAck,
    Timings,
)
from cutline.protocol.publish.publishing import CompleteEpoch, Publisher
from tests.support.channels import append_barrier, append_batch, open_log

SOURCE, TOTALS, TABLE = OperatorId("source"), OperatorId("totals"), SinkId("table")
FLOW = FlowName("flow")


def ack(operator: OperatorId, *, batch: int, barrier: int, positions: dict[OperatorId, Position]) -> OperatorAck:
    return OperatorAck(
        operator=operator,
        epoch=Epoch(7),
        generation=Generation(1),
        cut=CutPoint(batch=BatchId(batch), barrier=Position(barrier), positions=positions, aligned=not positions),
        subtasks=tuple(
            SubtaskAck(subtask=Subtask(number), files=2, size_bytes=100, new_bytes=10, async_ms=1.5)
            for number in (1, 0)
        ),
        record_sha256="0" * 64,
        timings=Timings(start_delay_ms=1, alignment_ms=2, sync_ms=3.5, async_ms=4),
    )


def logs(tmp_path: Path) -> dict[OperatorId, ChannelLog]:
    """source: b0 b1 b2 |7 – totals has read one of the three; b3 comes after the barrier."""
    source = open_log(tmp_path / "source", operator=SOURCE)
    for _ in range(3):
        append_batch(source, rows=5)
    append_barrier(source, 7)
    append_batch(source, rows=100)
    totals = open_log(tmp_path / "totals", operator=TOTALS)
    append_batch(totals, positions={SOURCE: 1})
    append_barrier(totals, 7)
    return {SOURCE: source, TOTALS: totals}


def manifest(tmp_path: Path, before: CompleteEpoch | None = None) -> Manifest:
    acks = {
        SOURCE: ack(SOURCE, batch=2, barrier=3, positions={}),
        TOTALS: ack(TOTALS, batch=0, barrier=1, positions={SOURCE: Position(1)}),
    }
    action = StoreManifest(epoch=Epoch(7), previous_epoch=Epoch(5), started_ms=1_000, acks=acks)
    return build_manifest(FLOW, Generation(1), action, logs(tmp_path), before=before, completed_ms=1_040)


def test_the_channels_state_is_what_lies_between_reader_and_barrier(tmp_path: Path) -> None:
    flight = manifest(tmp_path).channels[SOURCE].in_flight[TOTALS]
    assert (flight.first, flight.end, flight.entries, flight.rows, flight.size_bytes) == (1, 3, 2, 10, 8)


def test_every_operator_and_subtask_has_its_figures(tmp_path: Path) -> None:
    cut = manifest(tmp_path).operators[TOTALS]
    assert (cut.generation, cut.mode, cut.files, cut.size_bytes, cut.new_bytes) == (1, "unaligned", 4, 200, 20)
    assert (cut.start_delay_ms, cut.alignment_ms, cut.sync_ms, cut.async_ms, cut.total_ms) == (1, 2, 3.5, 4, 10.5)
    assert [(one.subtask, one.files, one.async_ms) for one in cut.subtasks] == [(0, 2, 1.5), (1, 2, 1.5)]
    assert manifest(tmp_path / "again").operators[SOURCE].mode == "aligned"


def test_the_history_shows_figures_of_each_operator(tmp_path: Path) -> None:
    details = statistics(manifest(tmp_path))
    assert (details["duration_ms"], details["in_flight_rows"], details["in_flight_bytes"]) == (40, 10, 8)
    assert details["unaligned_operators"] == ["totals"]
    assert details["operators"][TOTALS]["subtasks"] == 2
    assert details["operators"][SOURCE]["total_ms"] == 10.5


def test_an_aborted_epoch_says_who_had_acknowledged_and_who_had_not() -> None:
    pending = PendingEpoch(
        epoch=Epoch(7),
        generations={SOURCE: Generation(1), TOTALS: Generation(1)},
        terms=BarrierTerms(alignment_limit_ms=0),
        started_ms=1_000,
        awaiting={SOURCE: {Subtask(0), Subtask(1)}, TOTALS: {Subtask(0)}},
    )
    pending.move(EpochState.COLLECTING)
    pending.acknowledge(ack(SOURCE, batch=2, barrier=3, positions={}))
    details = abort_details(pending, ended_ms=1_500)
    assert details["duration_ms"] == 500
    assert list(details["operators"]) == [SOURCE]
    assert details["operators"][SOURCE]["batch"] == 2
    assert details["missing"] == {TOTALS: [0]}


def test_a_manifest_alone_says_what_its_sinks_publish(tmp_path: Path) -> None:
    """The epoch before it is collected, and how far the sinks were is lost: its batches must not be published again."""
    before = CompleteEpoch(
        epoch=Epoch(5),
        generation=Generation(1),
        previous_epoch=Epoch(4),
        batches={SOURCE: BatchId(1), TOTALS: BatchId(-1)},
    )
    stored = manifest(tmp_path, before)
    assert [stored.operators[name].after_batch for name in (SOURCE, TOTALS)] == [1, -1]
    publisher = Publisher(FLOW, {TABLE: SOURCE}, {}, retry_ms=1, retry_limit_ms=1, silence_ms=1)
    (commit,) = publisher.due([complete_epoch(stored)], 0)
    assert (commit.permit.after_batch, commit.permit.through_batch) == (1, 2)


def test_a_checkpoint_is_of_the_history_if_its_barriers_are_in_the_logs(tmp_path: Path) -> None:
    stored = manifest(tmp_path)
    mine = Lineage.begin(Generation(1))
    assert is_of_history(stored, {SOURCE: mine, TOTALS: mine})
    after = {SOURCE: mine.fork(Generation(2), Position(4)), TOTALS: mine.fork(Generation(2), Position(2))}
    assert is_of_history(stored, after)
    overtaken = {**after, SOURCE: mine.fork(Generation(2), Position(3))}
    assert not is_of_history(stored, overtaken), "generation 2 writes where the barrier stood"
