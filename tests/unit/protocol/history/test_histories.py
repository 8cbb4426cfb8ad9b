"""Generations compared by identity, and what the claim of a sink says about them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutline.model.history import Takeover
from cutline.model.ids import Epoch, Generation
from cutline.protocol.history import histories
from cutline.protocol.history.remote_claims import has_diverged
from tests.support.recovery_facts import ORDERS, TOTALS, began, manifest

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


def takeover(identity: str, epoch: int = 0) -> Takeover:
    return Takeover(generation=Generation(1), identity=identity, epoch=Epoch(epoch), started_ms=0)


def test_generations_of_former_versions_differ_by_what_they_say() -> None:
    one, same, other = began(1), began(1), began(2)
    assert histories.identity_of(one) == histories.identity_of(same) != histories.identity_of(other)
    assert histories.identity_of(began(1, identity=A)) == A


def test_a_claim_tells_who_took_the_sink_over() -> None:
    claim = ""
    for identity, epoch in ((A, 0), (B, 3)):
        claim = f"token {histories.with_takeover(claim, takeover(identity, epoch))}"
    assert histories.takeovers_in(claim) == (takeover(A), takeover(B, 3))


def test_a_claim_of_a_former_version_tells_nothing() -> None:
    assert histories.takeovers_in("") is None
    assert histories.takeovers_in("6f1b1c2d") is None
    assert histories.takeovers_in("12345 ") is None


@given(st.text())
def test_any_text_is_a_claim_that_tells_something_or_nothing(text: str) -> None:
    found = histories.takeovers_in(text)
    assert found is None or all(isinstance(one, Takeover) for one in found)


def test_a_claim_does_not_grow_for_ever() -> None:
    claim = ""
    for number in range(200):
        claim = f"token {histories.with_takeover(claim, takeover(f'{number:032x}'))}"
    found = histories.takeovers_in(claim)
    assert found is not None
    assert found[-1].identity == f"{199:032x}"
    assert len(found) == 50


def test_what_was_dropped_from_the_list_is_not_forgotten() -> None:
    """Otherwise a storage that others went on from long ago would seem to share what they published since."""
    claim = f"token {histories.with_takeover('', takeover(A))}"
    for number in range(60):
        claim = (
            f"token {histories.with_takeover(claim, takeover(f'{number:032x}', 1 if not number else 1_000 + number))}"
        )
    taken = histories.takeovers_in(claim)
    assert taken is not None
    assert histories.common_epoch(histories.others_after(taken, {A})) in (0, 1)


def test_restarts_without_a_checkpoint_do_not_fill_the_list() -> None:
    claim = f"token {histories.with_takeover('', takeover(A))}"
    own = set[str]()
    for number in range(60):
        own.add(f"{number:032x}")
        claim = f"token {histories.with_takeover(claim, takeover(f'{number:032x}', 7), own)}"
    assert histories.takeovers_in(claim) == (takeover(A), takeover(f"{59:032x}", 7))


def test_a_start_shares_the_epoch_that_an_evolution_was_made_from() -> None:
    made = [manifest(3), manifest(50, evolved_from=3)]
    assert histories.continued_epoch(None, made, TOTALS, is_per_operator=False) == 3
    assert histories.continued_epoch(Epoch(2), made, TOTALS, is_per_operator=False) == 2
    assert histories.continued_epoch(None, [*made, manifest(51)], TOTALS, is_per_operator=False) == 51


def test_a_sink_of_an_operator_that_joins_shares_what_the_flow_has() -> None:
    """In per-operator mode every operator has epochs of its own."""
    before = [manifest(3, operators=[ORDERS])]
    assert histories.continued_epoch(None, before, TOTALS, is_per_operator=False) == 3
    assert histories.continued_epoch(None, before, TOTALS, is_per_operator=True) == 0
    assert histories.continued_epoch(None, [], TOTALS, is_per_operator=False) == 0


def test_only_takeovers_after_the_last_known_one_are_of_others() -> None:
    taken = (takeover(A), takeover(B, 3), takeover(C, 5))
    assert histories.others_after(taken, {A, B, C}) == ()
    assert histories.others_after(taken, {C}) == ()  # C has given up what B did, on request
    assert histories.others_after(taken, {A}) == (takeover(B, 3), takeover(C, 5))
    assert histories.others_after(taken, set()) == taken


def test_the_common_epoch_is_where_the_first_of_the_others_began_or_went_back_to() -> None:
    assert histories.common_epoch(()) is None
    assert histories.common_epoch((takeover(B, 7), takeover(C, 9))) == 7
    assert histories.common_epoch((takeover(B, 7), takeover(C, 4))) == 4


def test_a_process_has_diverged_from_a_remote_tier_that_another_host_went_on_in() -> None:
    there = [began(1, identity=A), began(5, identity=B)]
    assert has_diverged(there, {A, C}, Generation(7))
    assert not has_diverged(there, {A, B}, Generation(7))
    # What has begun since is the fence's business.
    assert not has_diverged(there, {A}, Generation(3))
