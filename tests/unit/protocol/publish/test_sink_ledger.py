"""The one judgement that every sink asks for: what may be published, what is refused, what a rewind leaves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cutline.errors import FencedError, InvariantViolation, SinkError
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.protocol.publish import sink_ledger
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.sink_ledger import RewindVerdict, SinkLedger, Verdict, judge, judge_rewind

FLOW, SINK = FlowName("orders"), SinkId("totals-out")
EMPTY = SinkLedger(flow=FLOW, sink=SINK)


def permit(epoch: int, generation: int = 1, **other: Any) -> CommitPermit:
    fields: dict[str, Any] = {
        "flow": FLOW,
        "operator": OperatorId("totals"),
        "sink": SINK,
        "epoch": Epoch(epoch),
        "generation": Generation(generation),
        "previous_epoch": NO_EPOCH,
        "after_batch": BatchId(epoch - 1),
        "through_batch": BatchId(epoch),
    }
    return CommitPermit(**(fields | other))


def at(*epochs: int, ledger: SinkLedger = EMPTY, remember: int = 100) -> SinkLedger:
    """A ledger after these epochs; each has its number as its digest."""
    for epoch in epochs:
        ledger = sink_ledger.published(ledger, permit(epoch), str(epoch), remember=remember)
    return ledger


# ------------------------------------------------------------------------------------------------- commits


def test_a_new_epoch_is_published_and_a_repeat_is_not() -> None:
    assert judge(EMPTY, permit(1), "1") is Verdict.PUBLISH
    assert judge(at(1), permit(1), "1") is Verdict.ALREADY
    assert judge(at(1, 2), permit(1), "1") is Verdict.ALREADY
    assert judge(at(1, 2), permit(5), "5") is Verdict.PUBLISH


def test_the_same_number_with_other_content_is_of_another_history() -> None:
    assert judge(at(1, 2), permit(2), "x") is Verdict.OTHER_HISTORY
    assert judge(at(1, 3), permit(2), "2") is Verdict.OTHER_HISTORY


def test_an_epoch_whose_content_the_target_no_longer_knows_counts_as_published() -> None:
    ledger = replace(EMPTY, published=Epoch(3), digests={Epoch(3): None})
    assert judge(ledger, permit(3), "whatever") is Verdict.ALREADY
    assert judge(ledger, permit(2), "whatever") is Verdict.OTHER_HISTORY


def test_a_rewound_epoch_never_comes_again() -> None:
    ledger = sink_ledger.rewind(at(1, 2, 3), Epoch(1))
    assert [judge(ledger, permit(epoch), str(epoch)) for epoch in (1, 2, 3, 4)] == [
        Verdict.ALREADY,
        Verdict.REWOUND,
        Verdict.REWOUND,
        Verdict.PUBLISH,
    ]
    # Also once the new history has passed it.
    assert judge(at(4, ledger=ledger), permit(2), "2") is Verdict.REWOUND


def test_a_replaced_instance_is_fenced_but_its_repeat_does_no_harm() -> None:
    ledger = sink_ledger.claimed(at(1, ledger=sink_ledger.claimed(EMPTY, "old")), "new")
    assert judge(ledger, permit(2), "2", claim="old") is Verdict.FENCED
    assert judge(ledger, permit(2), "2") is Verdict.FENCED
    assert judge(ledger, permit(2), "2", claim="new") is Verdict.PUBLISH
    assert judge(ledger, permit(1), "1", claim="old") is Verdict.ALREADY


def test_without_any_claim_every_instance_publishes_until_another_has() -> None:
    assert judge(EMPTY, permit(1), "1", claim="mine") is Verdict.PUBLISH
    assert judge(replace(EMPTY, is_overtaken=True), permit(1), "1", claim="mine") is Verdict.FENCED
    assert sink_ledger.claimed(replace(EMPTY, is_overtaken=True), "mine").is_held_by("mine")


def test_an_older_generation_is_fenced_where_the_target_records_generations() -> None:
    ledger = sink_ledger.published(EMPTY, permit(1, generation=3), "1")
    assert judge(ledger, permit(2, generation=2), "2") is Verdict.FENCED
    assert judge(ledger, permit(2, generation=3), "2") is Verdict.PUBLISH


def test_the_holder_of_the_claim_publishes_what_an_older_generation_completed() -> None:
    """Found by the simulator (seed 212): an old coordinator completes an epoch while its successor takes over."""
    ledger = sink_ledger.claimed(sink_ledger.published(EMPTY, permit(1, generation=3), "1"), "holder")
    assert judge(ledger, permit(2, generation=2), "2", claim="holder") is Verdict.PUBLISH
    assert judge(ledger, permit(2, generation=2), "2", claim="other") is Verdict.FENCED


def test_another_sinks_permit_is_a_bug_of_the_caller() -> None:
    with pytest.raises(InvariantViolation, match="another sink"):
        judge(EMPTY, permit(1, sink=SinkId("other")), "1")


def test_only_the_last_digests_are_remembered() -> None:
    ledger = at(1, 2, 3, 4, remember=2)
    assert ledger.digests == {3: "3", 4: "4"}
    assert judge(ledger, permit(3), "3") is Verdict.ALREADY
    assert judge(ledger, permit(2), "2") is Verdict.OTHER_HISTORY


# ------------------------------------------------------------------------------------------------- rewinds


def test_a_rewind_is_judged_by_reach_and_claim() -> None:
    ledger = replace(at(3, 5, 8), reach=Epoch(3), claim="mine")
    assert judge_rewind(ledger, Epoch(8)) is RewindVerdict.ALREADY
    assert judge_rewind(ledger, Epoch(5), claim="other") is RewindVerdict.FENCED
    assert judge_rewind(ledger, Epoch(5), claim="mine") is RewindVerdict.REWIND
    assert judge_rewind(ledger, Epoch(2), claim="mine") is RewindVerdict.TOO_FAR


def test_a_rewind_ends_at_the_last_published_epoch_before() -> None:
    ledger = sink_ledger.rewind(at(3, 5, 8), Epoch(7))
    assert (ledger.published, ledger.rewound, ledger.highest) == (5, 8, 8)
    assert sink_ledger.rewind(ledger, Epoch(7)) == ledger
    assert sink_ledger.rewind(ledger, NO_EPOCH).published == NO_EPOCH


# ------------------------------------------------------------------------------------------------- errors


def test_each_refusal_says_where_and_what_to_do() -> None:
    expected = {Verdict.FENCED: FencedError, Verdict.REWOUND: FencedError, Verdict.OTHER_HISTORY: SinkError}
    for verdict, kind in expected.items():
        error = sink_ledger.refusal(verdict, at(7), permit(2), target="table t", path="/t")
        assert type(error) is kind
        assert error.next_step
        assert error.where["flow"] == FLOW and error.where["sink"] == SINK
        assert error.where["epoch"] == 2 and error.where["path"] == "/t"
    assert "epoch 7" in str(sink_ledger.refusal(Verdict.OTHER_HISTORY, at(7), permit(2)))
    for verdict in (Verdict.PUBLISH, Verdict.ALREADY):
        with pytest.raises(InvariantViolation):
            sink_ledger.refusal(verdict, EMPTY, permit(1))


def test_each_refused_rewind_says_where_and_what_to_do() -> None:
    ledger = replace(at(7), reach=Epoch(4))
    error = sink_ledger.rewind_refusal(RewindVerdict.TOO_FAR, ledger, Epoch(2), keep_more="keep more epochs")
    assert isinstance(error, SinkError)
    assert "epoch 4" in str(error) and "keep more epochs" in error.next_step
    assert isinstance(sink_ledger.rewind_refusal(RewindVerdict.FENCED, ledger, Epoch(2)), FencedError)
    for verdict in (RewindVerdict.REWIND, RewindVerdict.ALREADY):
        with pytest.raises(InvariantViolation):
            sink_ledger.rewind_refusal(verdict, ledger, Epoch(2))


# ------------------------------------------------------------------------------------------------- properties


@given(
    epochs=st.sets(st.integers(1, 30), max_size=10),
    to=st.integers(0, 30),
    epoch=st.integers(1, 35),
    digest=st.sampled_from(["own", "other"]),
    claims=st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"])),
)
def test_nothing_is_published_twice_nor_below_what_was_seen(
    epochs: set[int], to: int, epoch: int, digest: str, claims: tuple[str, str]
) -> None:
    ledger = EMPTY
    for number in sorted(epochs):
        ledger = sink_ledger.published(ledger, permit(number), "own")
    ledger = sink_ledger.claimed(sink_ledger.rewind(ledger, Epoch(to)), claims[0])
    verdict = judge(ledger, permit(epoch), digest, claim=claims[1])
    if verdict is Verdict.PUBLISH:
        assert epoch > ledger.highest
        assert claims[0] in ("", claims[1])
    if verdict is Verdict.ALREADY:
        assert epoch in epochs and epoch <= to and digest == "own"
    if epoch > max(epochs, default=0) and claims[0] in ("", claims[1]):
        assert verdict is Verdict.PUBLISH
    if verdict in (Verdict.PUBLISH, Verdict.ALREADY):
        after = ledger if verdict is Verdict.ALREADY else sink_ledger.published(ledger, permit(epoch), digest)
        assert judge(after, permit(epoch), digest, claim=claims[1]) is Verdict.ALREADY


@dataclass
class _Target:
    """What readers see, kept beside the ledger: epoch → content."""

    rows: dict[int, str] = field(default_factory=dict)


class Histories(RuleBasedStateMachine):
    """Instances of a sink come, claim, publish, rewind and come back late; each obeys the verdicts."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = EMPTY
        self.target = _Target()
        self.claim = ""
        self.instances: list[str] = []
        self.next_epoch = 1
        #: Permits that any instance may use at any time, also long after.
        self.permits: list[tuple[int, str]] = []

    @rule()
    def take_over(self) -> None:
        self.claim = f"claim-{len(self.instances)}"
        self.instances.append(self.claim)
        self.ledger = sink_ledger.claimed(self.ledger, self.claim)

    @rule(gap=st.integers(0, 2))
    def complete_an_epoch(self, gap: int) -> None:
        self.next_epoch = max(self.next_epoch, self.ledger.highest + 1) + gap
        self.permits.append((self.next_epoch, f"rows-{len(self.permits)}"))
        self.next_epoch += 1

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if not self.permits:
            return
        epoch, rows = data.draw(st.sampled_from(self.permits))
        claim = data.draw(st.sampled_from(["", *self.instances]))
        verdict = judge(self.ledger, permit(epoch), rows, claim=claim)
        if verdict is Verdict.PUBLISH:
            assert epoch not in self.target.rows
            assert claim == self.claim
            assert epoch > max(self.target.rows, default=0)
            self.target.rows[epoch] = rows
            self.ledger = sink_ledger.published(self.ledger, permit(epoch), rows)
        elif verdict is Verdict.ALREADY:
            assert self.target.rows[epoch] == rows
        else:
            assert isinstance(sink_ledger.refusal(verdict, self.ledger, permit(epoch)), FencedError | SinkError)

    @rule(data=st.data(), to=st.integers(0, 20))
    def rewind(self, data: st.DataObject, to: int) -> None:
        claim = data.draw(st.sampled_from(["", *self.instances]))
        if judge_rewind(self.ledger, Epoch(to), claim=claim) is RewindVerdict.REWIND:
            assert claim == self.claim
            self.target.rows = {epoch: rows for epoch, rows in self.target.rows.items() if epoch <= to}
            self.ledger = sink_ledger.rewind(self.ledger, Epoch(to))

    @invariant()
    def the_ledger_says_what_readers_see(self) -> None:
        assert self.ledger.published == max(self.target.rows, default=0)
        assert dict(self.ledger.digests) == self.target.rows
        assert self.ledger.highest >= self.ledger.published


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
