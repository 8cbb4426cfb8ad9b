"""One operator's side of the protocol: when it cuts, and how far it may read until then."""

from __future__ import annotations

import pytest

from cutline.errors import InvariantViolation
from cutline.model.ids import BatchId, Epoch, OperatorId, Position
from cutline.protocol.cut.agent import CLOSED_EPOCHS_REMEMBERED
from cutline.protocol.messages.agent import (
    AppendBarrier,
    BarrierAppeared,
    BatchAppended,
    DataAppeared,
    SetGate,
    TakeSnapshot,
)
from tests.support.driven_agent import DrivenAgent, found_cut, terms

UNALIGNED = 0

# ------------------------------------------------------------------------------------------------- sources


def test_a_source_cuts_at_once_at_its_last_appended_batch() -> None:
    source = DrivenAgent()
    source.batch()
    source.batch()
    assert source.request(1, limit_ms=70) == [
        AppendBarrier(epoch=Epoch(1), batch=BatchId(1), positions={}, aligned=True, terms=terms(70)),
        TakeSnapshot(epoch=Epoch(1), batch=BatchId(1), positions={}, aligned=True, alignment_ms=0),
    ]


def test_a_source_without_a_batch_cuts_before_its_first() -> None:
    source = DrivenAgent()
    source.request(1)
    assert source.barriers == [(1, -1)]


def test_the_barrier_is_appended_before_the_snapshot_is_asked_for() -> None:
    """A snapshot whose barrier is in no log could never be found again."""
    source = DrivenAgent()
    barrier, snapshot = source.request(1)
    assert isinstance(barrier, AppendBarrier)
    assert isinstance(snapshot, TakeSnapshot)


def test_a_source_asked_twice_cuts_once() -> None:
    source = DrivenAgent()
    source.request(1)
    source.batch()
    assert source.request(1) == []
    assert source.barriers == [(1, -1)]


def test_a_source_asked_again_after_the_end_of_the_epoch_does_not_cut() -> None:
    source = DrivenAgent()
    source.close(1)
    source.request(1)
    assert source.barriers == []


def test_a_request_that_comes_after_a_later_one_is_left_to_its_timeout() -> None:
    """Barriers stand in the log in the order of their epochs, or consumers could not cut in order."""
    source = DrivenAgent()
    source.request(2)
    source.request(1)
    assert source.barriers == [(2, -1)]


def test_a_barrier_is_never_requested_of_an_operator_with_inputs() -> None:
    with pytest.raises(InvariantViolation):
        DrivenAgent("a").request(1)


# ------------------------------------------------------------------------------------------------- aligned, one input


def test_an_aligned_cut_waits_until_a_batch_stands_at_the_barrier() -> None:
    me = DrivenAgent("a")
    me.rows("a", count=3)
    me.batch(a=1)
    me.barrier("a", 1)
    me.batch(a=2)
    assert me.barriers == []
    me.batch(a=3)
    assert me.barriers == [(1, 2)]
    assert me.snapshots[0].positions == {"a": 3}
    assert me.snapshots[0].aligned


def test_rows_behind_the_barrier_are_not_admitted_before_the_cut() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.barrier("a", 1)
    me.rows("a", count=2)
    assert me.gates == {"a": 1}
    me.batch(a=1)
    assert me.gates == {"a": 4}


def test_an_idle_operator_cuts_at_once() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.batch(a=1)
    me.barrier("a", 1)
    assert me.barriers == [(1, 0)]


def test_an_operator_that_never_read_anything_cuts_before_its_first_batch() -> None:
    me = DrivenAgent("a")
    me.barrier("a", 1)
    assert me.barriers == [(1, -1)]
    assert me.snapshots[0].positions == {"a": 0}


def test_crossing_a_barrier_moves_no_position() -> None:
    """If it did, Spark would run an empty batch for every barrier."""
    me = DrivenAgent("a")
    me.rows("a")
    me.batch(a=1)
    me.barrier("a", 1)
    me.barrier("a", 2)
    assert me.gates == {"a": 1}
    assert me.barriers == [(1, 0), (2, 0)]


def test_an_empty_entry_does_not_hold_up_the_cut() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.batch(a=1)
    me.empty("a")
    me.barrier("a", 1)
    assert me.barriers == [(1, 0)]
    assert me.gates == {"a": 1}


def test_without_a_limit_time_alone_never_cuts() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.barrier("a", 1, limit_ms=None)
    me.pass_ms(10**9)
    assert me.barriers == []
    assert me.agent.next_deadline_ms() is None


# ------------------------------------------------------------------------------------------------- aligned, two inputs


def test_the_fast_input_is_blocked_only_until_the_slow_one_reaches_its_barrier() -> None:
    me = DrivenAgent("fast", "slow")
    me.rows("fast")
    me.rows("slow")
    me.batch(fast=1)
    me.barrier("fast", 1)
    me.rows("fast", count=4)
    assert me.gates == {"fast": 1, "slow": 1}
    me.rows("slow")
    me.barrier("slow", 1)
    me.batch(slow=1)
    assert me.barriers == []
    assert me.gates["fast"] == 1
    me.batch(slow=2)
    assert me.barriers == [(1, 2)]
    assert me.snapshots[0].positions == {"fast": 1, "slow": 2}
    assert me.gates["fast"] == 6


def test_the_slow_input_flows_on_while_the_fast_one_waits() -> None:
    me = DrivenAgent("fast", "slow")
    me.barrier("fast", 1)
    me.rows("slow", count=3)
    assert me.gates == {"fast": 0, "slow": 3}


def test_two_idle_inputs_cut_when_the_second_barrier_appears() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1)
    assert me.barriers == []
    me.barrier("b", 1)
    assert me.barriers == [(1, -1)]


def test_people_can_see_which_inputs_are_waited_for() -> None:
    me = DrivenAgent("a", "b")
    me.rows("a")
    me.barrier("a", 1)
    assert me.agent.aligning() == {1: ("a", "b")}
    me.batch(a=1)
    assert me.agent.aligning() == {1: ("b",)}


# ------------------------------------------------------------------------------------------------- unaligned


def test_an_unaligned_operator_cuts_at_the_first_barrier_on_any_input() -> None:
    me = DrivenAgent("a", "b")
    me.rows("a", count=3)
    me.rows("b", count=2)
    me.batch(a=1, b=2)
    me.barrier("a", 1, limit_ms=UNALIGNED)
    assert me.barriers == [(1, 0)]
    assert me.snapshots[0].positions == {"a": 1, "b": 2}
    assert not me.snapshots[0].aligned


def test_an_unaligned_barrier_on_the_other_input_blocks_nothing() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1, limit_ms=UNALIGNED)
    me.rows("b")
    me.barrier("b", 1, limit_ms=UNALIGNED)
    me.rows("b")
    assert me.gates == {"a": 0, "b": 3}
    assert me.barriers == [(1, -1)]


def test_an_unaligned_cut_with_nothing_in_flight_is_an_aligned_one() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.batch(a=1)
    me.barrier("a", 1, limit_ms=UNALIGNED)
    assert me.snapshots[0].aligned


def test_a_cut_lies_before_the_batch_that_is_being_computed() -> None:
    """Batch 1 was planned to read up to 3; the cut at batch 0 leaves what it reads in flight."""
    me = DrivenAgent("a")
    me.rows("a", count=3)
    me.batch(a=1)
    me.barrier("a", 1, limit_ms=UNALIGNED)
    me.batch(a=3)
    assert me.barriers == [(1, 0)]
    assert me.snapshots[0].positions == {"a": 1}


def test_a_source_cuts_while_a_batch_runs() -> None:
    source = DrivenAgent()
    source.batch()
    source.request(1)  # batch 1 is being computed
    source.batch()
    source.request(2)
    assert source.barriers == [(1, 0), (2, 1)]


# ------------------------------------------------------------------------------------------------- the time limit


def test_alignment_that_takes_too_long_switches_to_unaligned() -> None:
    me = DrivenAgent("a", "b")
    me.rows("a", count=2)
    me.batch(a=1)
    me.barrier("a", 1, limit_ms=50)
    assert me.agent.next_deadline_ms() == 50
    me.pass_ms(49)
    assert me.barriers == []
    me.pass_ms(1)
    assert me.barriers == [(1, 0)]
    assert me.snapshots[0].positions == {"a": 1, "b": 0}
    assert me.snapshots[0].alignment_ms == 50
    assert not me.snapshots[0].aligned
    assert me.agent.next_deadline_ms() is None


def test_the_limit_counts_from_the_first_barrier() -> None:
    me = DrivenAgent("a", "b")
    me.rows("b")
    me.now_ms = 1_000
    me.barrier("a", 1, limit_ms=50)
    me.now_ms = 1_040
    me.barrier("b", 1, limit_ms=50)
    assert me.agent.next_deadline_ms() == 1_050
    assert me.barriers == []


def test_alignment_in_time_is_aligned() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1, limit_ms=50)
    me.now_ms = 20
    me.barrier("b", 1, limit_ms=50)
    assert me.snapshots[0].aligned
    assert me.snapshots[0].alignment_ms == 20


def test_any_event_after_the_limit_makes_the_switch() -> None:
    """The timer may be late; what happens meanwhile must not be held up further."""
    me = DrivenAgent("a", "b")
    me.barrier("a", 1, limit_ms=50)
    me.now_ms = 60
    me.rows("b")
    assert me.barriers == [(1, -1)]


def test_the_limit_travels_with_the_barrier() -> None:
    me = DrivenAgent("a")
    (first, *_) = me.barrier("a", 1, limit_ms=70)
    assert isinstance(first, AppendBarrier)
    assert first.terms.alignment_limit_ms == 70


# ------------------------------------------------------------------------------------------------- several epochs


def test_epochs_in_flight_are_cut_in_order() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.barrier("a", 1)
    me.rows("a")
    me.barrier("a", 2)
    me.batch(a=1)
    assert me.barriers == [(1, 0)]
    me.batch(a=3)
    assert me.barriers == [(1, 0), (2, 1)]


def test_a_later_unaligned_epoch_does_not_overtake_an_aligned_one() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1, limit_ms=None)
    me.barrier("a", 2, limit_ms=UNALIGNED)
    assert me.barriers == []
    me.barrier("b", 1)
    assert me.barriers == [(1, -1), (2, -1)]


def test_an_expired_epoch_behind_a_waiting_one_asks_for_no_timer() -> None:
    """A deadline in the past that nothing can meet would make the operator's thread spin."""
    me = DrivenAgent("a", "b")
    me.barrier("a", 1, limit_ms=None)
    me.barrier("a", 2, limit_ms=10)
    me.pass_ms(20)
    assert me.barriers == []
    assert me.agent.next_deadline_ms() is None


def test_the_timer_is_that_of_the_epoch_that_can_be_cut_next() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1, limit_ms=100)
    me.barrier("a", 2, limit_ms=10)
    assert me.agent.next_deadline_ms() == 100
    me.pass_ms(100)
    assert me.barriers == [(1, -1), (2, -1)]


def test_two_epochs_that_become_ready_together_are_cut_together() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1)
    me.barrier("a", 2)
    me.barrier("b", 1)
    me.barrier("b", 2)
    assert me.barriers == [(1, -1), (2, -1)]


def test_the_gate_stands_at_the_next_barrier_after_a_cut() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.barrier("a", 1)
    me.rows("a")
    me.barrier("a", 2)
    me.rows("a")
    me.batch(a=1)
    assert me.gates == {"a": 3}


# ------------------------------------------------------------------------------------------------- epochs that end


def test_the_end_of_an_epoch_opens_the_gate_without_a_cut() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1)
    me.rows("a")
    assert me.gates["a"] == 0
    assert me.close(1) == [SetGate(channel=OperatorId("a"), admit=Position(2))]
    assert me.barriers == []
    assert me.agent.next_deadline_ms() is None


def test_a_barrier_of_an_epoch_that_is_over_blocks_nothing() -> None:
    me = DrivenAgent("a")
    me.close(1)
    me.rows("a")
    me.barrier("a", 1)
    me.rows("a")
    assert me.gates == {"a": 3}
    assert me.barriers == []


def test_the_barrier_of_the_slow_input_after_the_end_blocks_nothing() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1)
    me.close(1)
    me.rows("b")
    me.barrier("b", 1)
    me.rows("b")
    assert me.gates["b"] == 3
    assert me.barriers == []


def test_the_end_of_an_epoch_lets_the_next_one_be_cut() -> None:
    me = DrivenAgent("a", "b")
    for epoch in (1, 2):
        me.barrier("a", epoch)
    me.barrier("b", 2)  # b's producer was told too late of epoch 1
    assert me.barriers == []
    me.close(1)
    assert me.barriers == [(2, -1)]


def test_the_end_of_an_epoch_after_the_cut_changes_nothing() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.batch(a=1)
    me.barrier("a", 1)
    assert me.close(1) == []
    assert me.close(1) == []
    assert me.barriers == [(1, 0)]


def test_epochs_closed_long_ago_stay_closed() -> None:
    me = DrivenAgent("a")
    ended = 3 * CLOSED_EPOCHS_REMEMBERED
    for epoch in range(1, ended):
        me.close(epoch)
    for epoch in (1, CLOSED_EPOCHS_REMEMBERED, ended - 1):
        me.barrier("a", epoch)
    me.rows("a")
    assert me.barriers == []
    assert me.gates == {"a": 4}
    me.barrier("a", ended)
    assert me.agent.aligning() == {ended: ("a",)}


# ------------------------------------------------------------------------------------------------- wrong or repeated


def test_repeated_events_change_nothing() -> None:
    me = DrivenAgent("a")
    row = DataAppeared(channel=OperatorId("a"), seq=Position(0), has_rows=True)
    barrier = BarrierAppeared(channel=OperatorId("a"), seq=Position(1), epoch=Epoch(1), terms=terms())
    batch = BatchAppended(batch=BatchId(0), positions={OperatorId("a"): Position(1)})
    for event in (row, barrier, batch):
        me.tell(event)
    before = list(me.actions)
    for event in (row, barrier, batch, barrier, row):
        assert me.tell(event) == []
    assert me.actions == before
    assert me.barriers == [(1, 0)]


def test_a_batch_that_spark_runs_again_moves_nothing() -> None:
    me = DrivenAgent("a")
    me.rows("a", count=2)
    me.batch(a=1)
    me.batch(a=2)
    me.tell(BatchAppended(batch=BatchId(0), positions={OperatorId("a"): Position(1)}))
    me.barrier("a", 1)
    assert me.snapshots[0].batch == 1
    assert me.snapshots[0].positions == {"a": 2}


def test_a_skipped_batch_is_a_bug() -> None:
    me = DrivenAgent("a")
    with pytest.raises(InvariantViolation, match="batch 1 comes after batch -1"):
        me.tell(BatchAppended(batch=BatchId(1), positions={}))


def test_a_batch_that_read_past_the_gate_is_a_bug() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1)
    me.rows("a")
    with pytest.raises(InvariantViolation, match="the gate stands at 0"):
        me.batch(a=2)


def test_an_entry_of_a_channel_that_is_no_input_is_a_bug() -> None:
    me = DrivenAgent("a")
    with pytest.raises(InvariantViolation):
        me.tell(DataAppeared(channel=OperatorId("x"), seq=Position(0), has_rows=True))


def test_a_batch_that_read_one_input_keeps_the_position_of_the_other() -> None:
    me = DrivenAgent("a", "b")
    me.rows("a")
    me.rows("b")
    me.batch(a=1, b=1)
    me.rows("a")
    me.batch(a=2)
    me.barrier("a", 1, limit_ms=UNALIGNED)
    assert me.snapshots[0].positions == {"a": 2, "b": 1}


def test_a_barrier_carries_the_positions_of_its_cut() -> None:
    """With them a barrier says all there is to a cut, also when the entry of its batch is truncated away."""
    me = DrivenAgent("a", "b")
    me.rows("a", count=2)
    me.batch(a=1)
    barrier, snapshot, *_ = me.barrier("a", 1, limit_ms=UNALIGNED)
    assert isinstance(barrier, AppendBarrier)
    assert isinstance(snapshot, TakeSnapshot)
    assert barrier.positions == snapshot.positions == {"a": 1, "b": 0}


def test_what_a_snapshot_says_does_not_change_with_later_batches() -> None:
    me = DrivenAgent("a")
    me.rows("a", count=2)
    me.batch(a=1)
    me.barrier("a", 1, limit_ms=UNALIGNED)
    me.batch(a=2)
    assert me.snapshots[0].positions == {"a": 1}


# ------------------------------------------------------------------------------------------------- restart


def test_an_agent_that_starts_finishes_the_snapshots_of_open_cuts() -> None:
    me = DrivenAgent(
        "a",
        last_epoch=5,
        open_epochs=[4, 5],
        last_batch=8,
        positions={"a": 9},
        found_cuts=[found_cut(3, 6, a=7), found_cut(4, 7, a=8), found_cut(5, 8, aligned=False, a=9)],
    )
    read = [{OperatorId("a"): Position(8)}, {OperatorId("a"): Position(9)}]
    assert me.agent.start() == [
        TakeSnapshot(epoch=Epoch(4), batch=BatchId(7), positions=read[0], aligned=True, alignment_ms=0),
        TakeSnapshot(epoch=Epoch(5), batch=BatchId(8), positions=read[1], aligned=False, alignment_ms=0),
    ]


def test_a_cut_before_the_first_batch_is_found_with_the_start_of_every_input() -> None:
    """Without them nobody would know that everything up to the barrier is in flight."""
    me = DrivenAgent("a", "b", last_epoch=1, open_epochs=[1], found_cuts=[found_cut(1, -1)])
    (snapshot,) = me.agent.start()
    assert isinstance(snapshot, TakeSnapshot)
    assert snapshot.positions == {"a": 0, "b": 0}


def test_a_found_cut_is_not_cut_again() -> None:
    source = DrivenAgent(last_epoch=1, open_epochs=[1], last_batch=4, found_cuts=[found_cut(1, 4)])
    source.request(1)
    assert source.barriers == []


def test_barriers_of_a_found_cut_do_not_block() -> None:
    me = DrivenAgent(
        "a", last_epoch=1, open_epochs=[1], last_batch=0, positions={"a": 1}, found_cuts=[found_cut(1, 0, a=1)]
    )
    me.rows("a")
    me.barrier("a", 1)
    me.rows("a")
    assert me.gates == {"a": 3}
    assert me.barriers == []


def test_an_open_epoch_that_was_not_cut_blocks_as_before() -> None:
    me = DrivenAgent("a", last_epoch=1, open_epochs=[1], last_batch=0, positions={"a": 1})
    me.rows("a", count=2)
    me.barrier("a", 1)
    me.rows("a")
    assert me.gates == {"a": 2}
    me.batch(a=2)
    assert me.barriers == [(1, 1)]


def test_a_source_asked_again_after_a_restart_cuts_where_it_is_now() -> None:
    source = DrivenAgent(last_epoch=3, open_epochs=[3], last_batch=7)
    source.request(3)
    assert source.barriers == [(3, 7)]


def test_epochs_of_earlier_incarnations_that_are_not_open_are_over() -> None:
    me = DrivenAgent("a", last_epoch=9, open_epochs=[8])
    for epoch in (3, 9):
        me.barrier("a", epoch)
    me.rows("a")
    assert me.gates == {"a": 3}
    me.barrier("a", 8)
    me.rows("a")
    assert me.gates == {"a": 3}


def test_a_source_ignores_requests_for_epochs_that_were_over_before_it_started() -> None:
    source = DrivenAgent(last_epoch=9)
    source.request(9)
    assert source.barriers == []
    source.request(10)
    assert source.barriers == [(10, -1)]


def test_after_a_restart_batches_go_on_with_the_next_number() -> None:
    me = DrivenAgent("a", last_batch=6, positions={"a": 10}, first_seq={"a": 8})
    me.rows("a", count=3)
    me.batch(a=11)
    assert me.agent.last_batch == 7


def test_every_gate_is_set_when_the_agent_first_hears_anything() -> None:
    """The reader of an input needs its gate before the query starts, also when the input is empty."""
    me = DrivenAgent("a", "b", positions={"b": 5})
    me.pass_ms(0)
    assert me.gates == {"a": 0, "b": 5}


def test_a_gate_that_did_not_move_is_not_set_again() -> None:
    me = DrivenAgent("a")
    me.rows("a")
    me.empty("a")
    me.pass_ms(5)
    assert [action for action in me.actions if isinstance(action, SetGate)] == [
        SetGate(channel=OperatorId("a"), admit=Position(1))
    ]
