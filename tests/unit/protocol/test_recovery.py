"""Which complete epochs belong to the history that the flow is in now."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutline.ids import Epoch, Generation
from cutline.protocol.recovery import Incarnation, live_epochs


def began(generation: int) -> Incarnation:
    return Incarnation(generation=Generation(generation), restored_epoch=None, is_fresh=True)


def resumed(generation: int) -> Incarnation:
    return Incarnation(generation=Generation(generation), restored_epoch=None, is_fresh=False)


def restored(generation: int, epoch: int) -> Incarnation:
    return Incarnation(generation=Generation(generation), restored_epoch=Epoch(epoch), is_fresh=False)


def live(complete: dict[int, int], *incarnations: Incarnation) -> list[int]:
    """``complete``: epoch → the generation that completed it."""
    return [int(e) for e in live_epochs([(Epoch(e), Generation(g)) for e, g in complete.items()], incarnations)]


def test_everything_is_live_while_nothing_went_back() -> None:
    assert live({1: 1, 2: 1, 5: 2}, began(1), resumed(2)) == [1, 2, 5]


def test_epochs_come_in_ascending_order() -> None:
    assert live({5: 1, 1: 1, 3: 1}, began(1)) == [1, 3, 5]


def test_what_a_restore_went_back_behind_is_given_up() -> None:
    assert live({1: 1, 2: 1, 3: 1, 4: 2}, began(1), restored(2, 2)) == [1, 2, 4]


def test_a_second_restore_gives_up_what_the_first_one_made() -> None:
    assert live({1: 1, 2: 1, 3: 2, 4: 3}, began(1), restored(2, 1), restored(3, 1)) == [1, 4]


def test_nested_restores_leave_one_history() -> None:
    complete = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 4}
    assert live(complete, began(1), restored(2, 2), restored(3, 4), restored(4, 1)) == [1, 7]


def test_what_was_given_up_once_stays_given_up() -> None:
    """Epoch 3 is below the second restore's epoch, and still belongs to a history that nobody is in."""
    assert live({1: 1, 3: 1, 5: 2}, began(1), restored(2, 1), restored(3, 5)) == [1, 5]


def test_a_resume_gives_nothing_up() -> None:
    assert live({1: 1, 2: 2, 3: 3}, began(1), resumed(2), resumed(3)) == [1, 2, 3]


def test_a_start_from_nothing_gives_everything_up() -> None:
    assert live({1: 1, 2: 1, 3: 2}, began(1), began(2)) == [3]


def test_a_zombie_that_completes_an_epoch_after_the_restore_is_not_heard() -> None:
    assert live({1: 1, 7: 1, 4: 2}, began(1), restored(2, 1)) == [1, 4]


def test_without_generation_records_every_epoch_counts() -> None:
    assert live({1: 1, 2: 3}) == [1, 2]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    return draw(st.lists(st.tuples(st.sampled_from(["complete", "resume", "restore", "fresh"]), st.integers(0, 99))))


@given(histories())
def test_the_live_epochs_are_those_on_the_way_to_the_present(history: list[tuple[str, int]]) -> None:
    """Checked against a model that keeps the history as a list and cuts it at every restore."""
    present: list[int] = []
    complete: dict[int, int] = {}
    incarnations = [began(1)]
    for what, choice in history:
        generation = incarnations[-1].generation
        if what == "complete":
            epoch = len(complete) + 1
            complete[epoch] = generation
            present.append(epoch)
        elif what == "resume":
            incarnations.append(resumed(generation + 1))
        elif what == "fresh":
            incarnations.append(began(generation + 1))
            present = []
        elif present:
            at = choice % len(present)
            incarnations.append(restored(generation + 1, present[at]))
            present = present[: at + 1]
        assert live(complete, *incarnations) == present
