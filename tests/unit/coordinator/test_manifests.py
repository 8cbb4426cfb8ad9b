"""What is written down of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from cutline.channels.log import ChannelLog
from cutline.coordinator.history import abort_details, statistics
from cutline.coordinator.manifests import build_manifest, why_not_stored
from cutline.model.checkpoint import Manifest
from cutline.model.cut import BarrierTerms, CutPoint, InFlight, OperatorAck, SubtaskAck, Timings
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.protocol.checkpoint.pending_epoch import EpochState, PendingEpoch
from cutline.protocol.history.known_checkpoints import complete_epoch, is_of_history
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.messages.coordinator import StoreManifest
from cutline.protocol.publish.publishing import CompleteEpoch, Publisher
from tests.support.channels import append_barrier, append_batch, open_log

SOURCE, TOTALS, TABLE = OperatorId("source"), OperatorId("totals"), SinkId("table")
FLOW = FlowName("flow")


def ack(
    operator: OperatorId,
    *,
    batch: int,
    barrier: int,
    positions: dict[OperatorId, Position],
    in_flight: dict[OperatorId, InFlight] | None = None,
    generation: int = 1,
) -> OperatorAck:
    return OperatorAck(
        operator=operator,
        epoch=Epoch(7),
        generation=Generation(generation),
        cut=CutPoint(batch=BatchId(batch), barrier=Position(barrier), positions=positions, aligned=not positions),
        subtasks=tuple(
            SubtaskAck(subtask=Subtask(number), files=2, size_bytes=100, new_bytes=10, async_ms=1.5)
            for number in (1, 0)
        ),
        record_sha256="0" * 64,
        timings=Timings(start_delay_ms=1, alignment_ms=2, sync_ms=3.5, async_ms=4),
        in_flight=in_flight or {},
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


LINEAGES = dict.fromkeys((SOURCE, TOTALS), Lineage.begin(Generation(1)))


def action(tmp_path: Path, *, with_amounts: bool = True, **changes: OperatorAck) -> StoreManifest:
    """``changes``: acknowledgements that say otherwise."""
    amount = logs(tmp_path)[SOURCE].in_flight(Position(1), Position(3))
    acks = {
        SOURCE: ack(SOURCE, batch=2, barrier=3, positions={}),
        TOTALS: ack(
            TOTALS,
            batch=0,
            barrier=1,
            positions={SOURCE: Position(1)},
            in_flight={SOURCE: amount} if with_amounts else {},
        ),
        **{OperatorId(name): one for name, one in changes.items()},
    }
    return StoreManifest(epoch=Epoch(7), previous_epoch=Epoch(5), started_ms=1_000, acks=acks)


def manifest(tmp_path: Path, before: CompleteEpoch | None = None, *, with_amounts: bool = True) -> Manifest:
    cut = action(tmp_path, with_amounts=with_amounts)
    return build_manifest(FLOW, Generation(1), cut, LINEAGES, before=before, completed_ms=1_040)


def test_the_channels_state_is_what_lies_between_reader_and_barrier(tmp_path: Path) -> None:
    flight = manifest(tmp_path).channels[SOURCE].in_flight[TOTALS]
    assert (flight.first, flight.end, flight.entries, flight.rows, flight.size_bytes) == (1, 3, 2, 10, 8)


def test_a_consumer_that_has_not_seen_the_barrier_measures_nothing_and_the_range_is_known(tmp_path: Path) -> None:
    flight = manifest(tmp_path, with_amounts=False).channels[SOURCE].in_flight[TOTALS]
    assert (flight.first, flight.end, flight.entries, flight.rows, flight.size_bytes) == (1, 3, None, None, None)


def test_the_history_sums_what_was_measured_and_counts_what_was_not(tmp_path: Path) -> None:
    details = statistics(manifest(tmp_path))
    assert (details["in_flight_entries"], details["in_flight_rows"], details["in_flight_unmeasured"]) == (2, 10, 0)
    details = statistics(manifest(tmp_path / "early", with_amounts=False))
    assert (details["in_flight_entries"], details["in_flight_rows"], details["in_flight_unmeasured"]) == (0, 0, 1)


def test_a_consistent_cut_may_be_stored(tmp_path: Path) -> None:
    assert why_not_stored(action(tmp_path), LINEAGES) is None
    assert why_not_stored(action(tmp_path / "old", with_amounts=False), LINEAGES) is None


def test_a_cut_past_a_barrier_is_never_stored(tmp_path: Path) -> None:
    past = ack(TOTALS, batch=0, barrier=1, positions={SOURCE: Position(4)})
    assert "past the barrier at 3" in (why_not_stored(action(tmp_path, totals=past), LINEAGES) or "")


def test_a_cut_is_not_stored_when_producer_and_consumer_disagree_about_the_barrier(tmp_path: Path) -> None:
    amount = {SOURCE: InFlight(first=Position(1), end=Position(2))}
    other = ack(TOTALS, batch=0, barrier=1, positions={SOURCE: Position(1)}, in_flight=amount)
    assert "at 2, but it is at 3" in (why_not_stored(action(tmp_path, totals=other), LINEAGES) or "")


def test_a_cut_is_not_stored_with_the_lineage_of_another_generation(tmp_path: Path) -> None:
    """The word of its start is lost: what its log looks like now is not known."""
    newer = ack(TOTALS, batch=0, barrier=1, positions={SOURCE: Position(1)}, generation=2)
    assert "generation 2" in (why_not_stored(action(tmp_path, totals=newer), LINEAGES) or "")


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
