"""How batches are numbered for sinks that publish immediately, and what of their content belongs to the history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.errors import SinkError
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, Position, SinkId
from cutline.model.staging import StagedBatch
from cutline.protocol.publish.immediate import (
    LogFacts,
    Standing,
    check_numbering,
    compare,
    end_of,
    generation_of,
    is_place,
    place_of,
)

FLOW, SINK = FlowName("f"), SinkId("s")


def place(generation: int, batch: int) -> Epoch:
    return place_of(Generation(generation), BatchId(batch))


def data(batch: int, generation: int = 1, *, rows: bool = True) -> DataEntry:
    staged = StagedBatch(
        generation=Generation(generation),
        batch=BatchId(batch),
        rows=int(rows),
        bytes=0,
        pieces=[{"path": "x"}] if rows else [],
    )
    return DataEntry(
        seq=Position(batch),
        generation=Generation(generation),
        batch=BatchId(batch),
        rows=0,
        segments=[],
        staged={SINK: staged},
        positions={},
    )


def barrier(batch: int, generation: int = 1) -> BarrierEntry:
    return BarrierEntry(
        seq=Position(batch + 1),
        generation=Generation(generation),
        epoch=Epoch(1),
        batch=BatchId(batch),
        positions={},
        aligned=True,
        alignment_limit_ms=None,
    )


@given(*(st.tuples(st.integers(1, 10_000), st.integers(0, 1_000_000)) for _ in range(2)))
def test_numbers_grow_with_generation_and_batch_and_are_no_epochs(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (place(*one) < place(*other)) == (one < other)
    assert is_place(place(*one))
    assert not is_place(one[1])


def test_a_number_can_be_read() -> None:
    assert place(3, 42) == 30000000042


def test_a_number_names_its_generation() -> None:
    assert generation_of(place_of(Generation(7), BatchId(42))) == 7
    assert generation_of(NO_EPOCH) == 0


def test_the_end_lies_between_the_last_batch_and_all_that_can_follow_it() -> None:
    assert end_of([]) is None
    assert end_of([data(0), data(1)]) == place(1, 1)
    assert end_of([barrier(NO_BATCH)]) == place(1, NO_BATCH)
    # The same whether or not the batch itself was truncated away.
    entries: list[Entry] = [data(0), data(1), barrier(1, generation=2)]
    for left in (entries, entries[-1:]):
        end = end_of(left)
        assert end is not None
        assert place(1, 1) <= end < place(2, 2)


def test_a_target_is_numbered_one_way() -> None:
    check_numbering(NO_EPOCH, "at_once", flow=FLOW, sink=SINK)
    check_numbering(Epoch(7), "checkpoint", flow=FLOW, sink=SINK)
    check_numbering(place(1, 0), "at_once", flow=FLOW, sink=SINK)
    for highest, publish in ((Epoch(7), "at_once"), (place(1, 0), "checkpoint")):
        with pytest.raises(SinkError, match="numbers otherwise"):
            check_numbering(highest, publish, flow=FLOW, sink=SINK)


def standing(log: LogFacts, *, published: Epoch, seen: Epoch = NO_EPOCH) -> Standing:
    return compare(SINK, log, published=published, seen=seen).standing


def test_what_the_log_shows_stands_and_what_is_above_it_was_given_up() -> None:
    log = LogFacts(entries=[data(0), data(1)])
    assert standing(log, published=place(1, 1), seen=place(1, 1)) is Standing.STANDS
    assert standing(log, published=place(1, 0)) is Standing.STANDS
    found = compare(SINK, log, published=place(1, 2), seen=NO_EPOCH)
    assert (found.standing, found.end) == (Standing.AHEAD, place(1, 1))


def test_a_sink_that_lost_batches_is_behind() -> None:
    log = LogFacts(entries=[data(0), data(1), data(2, rows=False)])
    assert standing(log, published=place(1, 0), seen=place(1, 1)) is Standing.BEHIND
    # The flow is restored to before what the records say: then only what the log still has is needed.
    found = compare(SINK, log, published=place(1, 0), seen=place(1, 5))
    assert (found.standing, found.needed) == (Standing.BEHIND, place(1, 1))
    assert standing(log, published=place(1, 1), seen=place(1, 5)) is Standing.STANDS


def test_a_log_that_knows_nothing_of_the_sink_is_another_storage_unless_it_gave_that_up() -> None:
    assert standing(LogFacts(entries=[]), published=NO_EPOCH) is Standing.STANDS
    assert standing(LogFacts(entries=[]), published=place(1, 3)) is Standing.UNKNOWN
    given_up = LogFacts(entries=[], given_up=[place(1, 3)])
    assert standing(given_up, published=place(1, 3)) is Standing.AHEAD
