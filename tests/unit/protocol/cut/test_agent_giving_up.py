"""Limits of an operator's own, epochs that it gives up, and what it answers when it is asked."""

from __future__ import annotations

import pytest

from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.cut.agent import AS_FLOW, CutState
from cutline.protocol.messages.agent import ReportFailure, ResendAck, SetGate
from tests.support.driven_agent import DrivenAgent, found_cut

# ------------------------------------------------------------------------------------------------- whose limit


def waiting(own_limit_ms: int | None, limit_ms: int | None, *, is_binding: bool = False) -> DrivenAgent:
    """Two inputs, the barrier stands on one of them."""
    me = DrivenAgent("a", "b", own_limit_ms=own_limit_ms)
    me.barrier("a", 1, limit_ms, is_binding=is_binding)
    return me


@pytest.mark.parametrize(
    ("own", "flow", "deadline"), [(AS_FLOW, 50, 50), (AS_FLOW, None, None), (200, 50, 200), (None, 50, None)]
)
def test_an_operator_follows_its_own_limit_if_it_has_one(own: int | None, flow: int | None, deadline: int) -> None:
    assert waiting(own, flow).agent.next_deadline_ms() == deadline


def test_a_limit_of_its_own_may_be_to_never_wait() -> None:
    assert waiting(0, None).barriers == [(1, -1)]


@pytest.mark.parametrize(("own", "asked", "deadline"), [(200, 50, 50), (0, None, None), (None, 50, 50)])
def test_what_was_asked_for_by_name_goes_before_the_operators_own_limit(
    own: int | None, asked: int | None, deadline: int | None
) -> None:
    me = waiting(own, asked, is_binding=True)
    assert me.barriers == []
    assert me.agent.next_deadline_ms() == deadline


def test_the_barrier_goes_on_with_the_terms_it_came_with() -> None:
    """The next operator has limits of its own."""
    me = DrivenAgent("a", own_limit_ms=200)
    barrier, *_ = me.barrier("a", 1, 50, started_ms=7)
    assert getattr(barrier, "terms", None) is not None
    assert (barrier.terms.alignment_limit_ms, barrier.terms.started_ms) == (50, 7)  # type: ignore[union-attr]


def test_a_snapshot_says_how_long_its_barrier_was_under_way() -> None:
    me = DrivenAgent("a", "b")
    me.now_ms = 130
    me.barrier("a", 1, started_ms=100)
    me.now_ms = 150
    me.barrier("b", 1, started_ms=100)
    assert (me.snapshots[0].start_delay_ms, me.snapshots[0].alignment_ms) == (30, 20)


def test_clocks_that_differ_give_no_negative_delay() -> None:
    me = DrivenAgent("a")
    me.barrier("a", 1, started_ms=5_000)
    assert me.snapshots[0].start_delay_ms == 0


# ------------------------------------------------------------------------------------------------- patience


def test_an_operator_gives_up_an_epoch_that_nobody_ends() -> None:
    me = DrivenAgent("a", "b", patience_ms=1_000)
    me.rows("a")
    me.barrier("a", 1)
    me.rows("a")
    assert me.agent.next_deadline_ms() == 1_000
    me.pass_ms(999)
    assert me.state_of(1) is CutState.ALIGNING
    assert me.gates["a"] == 1
    assert me.pass_ms(1) == [
        ReportFailure(epoch=Epoch(1), reason="no alignment within 1000 ms"),
        SetGate(channel=OperatorId("a"), admit=Position(3)),
    ]
    assert me.state_of(1) is CutState.MISSED
    assert me.agent.next_deadline_ms() is None


def test_a_given_up_epoch_is_never_cut_for() -> None:
    me = DrivenAgent("a", "b", patience_ms=1_000)
    me.barrier("a", 1)
    me.pass_ms(1_000)
    me.rows("a")
    me.batch(a=2)
    me.barrier("b", 1)
    me.rows("b")
    assert me.barriers == []
    assert me.gates == {"a": 2, "b": 2}, "its barriers hold nothing any more"
    assert len([action for action in me.actions if isinstance(action, ReportFailure)]) == 1


def test_a_given_up_epoch_lets_the_next_one_be_cut() -> None:
    me = DrivenAgent("a", "b", patience_ms=1_000)
    me.barrier("a", 1)
    me.now_ms = 500
    me.barrier("a", 2)
    me.barrier("b", 2)
    assert me.barriers == []
    me.pass_ms(500)
    assert me.barriers == [(2, -1)]
    assert list(me.failures) == [1]


def test_the_timer_is_that_of_the_alignment_that_lasts_longest() -> None:
    """A later epoch's barrier may be the first to appear, on the other input."""
    me = DrivenAgent("a", "b", patience_ms=1_000)
    me.barrier("a", 2)
    me.now_ms = 600
    me.barrier("b", 1)
    assert me.agent.next_deadline_ms() == 1_000
    me.pass_ms(400)
    assert list(me.failures) == [2]
    assert me.agent.next_deadline_ms() == 1_600


def test_patience_does_not_lengthen_the_limit() -> None:
    me = DrivenAgent("a", "b", patience_ms=1_000)
    me.barrier("a", 1, 50)
    assert me.agent.next_deadline_ms() == 50
    me.pass_ms(50)
    assert me.barriers == [(1, -1)]
    assert me.failures == {}


def test_what_is_cut_is_not_given_up() -> None:
    source = DrivenAgent(patience_ms=1_000)
    source.request(1)
    source.pass_ms(10_000)
    assert source.failures == {}
    assert source.state_of(1) is CutState.CUT


def test_an_epoch_that_an_earlier_life_gave_up_and_read_past_is_never_cut_for() -> None:
    me = DrivenAgent("a", "b", last_epoch=1, open_epochs=[1], last_batch=0, positions={"a": 2})
    me.barrier("a", 1)
    assert me.failures == {1: "an earlier process of the operator had given it up"}
    me.rows("a")
    me.barrier("b", 1, 0)
    me.pass_ms(10**6)
    assert me.barriers == []
    assert me.state_of(1) is CutState.MISSED


def test_an_epoch_that_an_earlier_life_read_past_on_one_input_is_not_cut_for_when_the_other_shows_first() -> None:
    """The log of ``b`` is shown first, and its barrier says not to wait: the cut would lie behind a's barrier."""
    me = DrivenAgent("a", "b", last_epoch=1, open_epochs=[1], last_batch=0, positions={"a": 2})
    me.barrier("b", 1, 0)
    assert me.barriers == []
    assert me.agent.next_deadline_ms() is None, "nothing but the log of a can decide it"
    me.barrier("a", 1, 0)
    me.rows("a")
    me.pass_ms(1_000)
    assert me.barriers == []
    assert list(me.failures) == [1]


def test_an_operator_that_has_seen_again_what_it_had_read_cuts_as_ever() -> None:
    me = DrivenAgent("a", "b", last_epoch=1, open_epochs=[1], last_batch=0, positions={"a": 2})
    me.barrier("b", 1, 0)
    me.rows("a")
    assert me.barriers == []
    me.rows("a")
    assert me.barriers == [(1, 0)]
    assert me.snapshots[0].positions == {"a": 2, "b": 0}


# ------------------------------------------------------------------------------------------------- out of order


def test_an_epoch_that_comes_after_a_later_one_was_cut_is_missed_and_says_so() -> None:
    me = DrivenAgent("a")
    me.barrier("a", 2)
    me.barrier("a", 1)
    me.rows("a")
    assert me.barriers == [(2, -1)]
    assert me.failures == {1: "epoch 2 was cut before it"}
    assert me.gates == {"a": 3}


def test_a_source_that_is_asked_out_of_order_says_so() -> None:
    source = DrivenAgent()
    source.request(2)
    assert source.request(1) == [ReportFailure(epoch=Epoch(1), reason="epoch 2 was cut before it")]
    assert source.request(1) == []


def test_the_order_is_kept_over_a_restart() -> None:
    source = DrivenAgent(last_epoch=2, open_epochs=[1, 2], last_batch=3, found_cuts=[found_cut(2, 3)])
    source.request(1)
    assert source.barriers == []
    assert list(source.failures) == [1]


def test_the_end_of_a_missed_epoch_leaves_nothing_behind() -> None:
    source = DrivenAgent()
    source.request(2)
    source.request(1)
    source.close(1)
    assert source.state_of(1) is CutState.CLOSED
    assert source.ask(1) == []


# ------------------------------------------------------------------------------------------------- being asked


def test_who_has_cut_says_so_again() -> None:
    source = DrivenAgent()
    source.request(1)
    assert source.ask(1) == [ResendAck(epoch=Epoch(1))]
    assert source.ask(1) == [ResendAck(epoch=Epoch(1))]
    assert source.barriers == [(1, -1)]


def test_who_found_its_cut_in_the_log_says_so_too() -> None:
    source = DrivenAgent(last_epoch=1, open_epochs=[1], last_batch=4, found_cuts=[found_cut(1, 4)])
    assert source.ask(1) == [ResendAck(epoch=Epoch(1))]


def test_who_has_given_up_says_so_again() -> None:
    me = DrivenAgent("a", "b", patience_ms=1_000)
    me.barrier("a", 1)
    me.pass_ms(1_000)
    assert me.ask(1) == [ReportFailure(epoch=Epoch(1), reason="no alignment within 1000 ms")]


def test_who_still_waits_or_has_seen_nothing_says_nothing() -> None:
    me = DrivenAgent("a", "b")
    me.barrier("a", 1)
    assert me.ask(1) == []
    assert me.ask(2) == []
    assert me.state_of(1) is CutState.ALIGNING
    assert me.state_of(2) is CutState.UNSEEN


def test_nobody_says_anything_of_an_epoch_that_is_over() -> None:
    source = DrivenAgent()
    source.request(1)
    source.close(1)
    assert source.ask(1) == []
    assert source.state_of(1) is CutState.CLOSED
