"""What is live, usable and open after any history, and who goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.protocol.history.epochs import GenerationStart, is_resumable, live_epochs, lost_behind
from cutline.protocol.history.regions import region_of


def began(generation: int) -> GenerationStart:
    return GenerationStart(generation=Generation(generation), restored_epoch=None, is_fresh=True)


def resumed(generation: int) -> GenerationStart:
    return GenerationStart(generation=Generation(generation), restored_epoch=None, is_fresh=False)


def restored(generation: int, epoch: int) -> GenerationStart:
    return GenerationStart(generation=Generation(generation), restored_epoch=Epoch(epoch), is_fresh=False)


def live(complete: dict[int, int], *generation_starts: GenerationStart) -> list[int]:
    """``complete``: epoch → the generation that completed it."""
    return [int(e) for e in live_epochs([(Epoch(e), Generation(g)) for e, g in complete.items()], generation_starts)]


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
    generation_starts = [began(1)]
    for what, choice in history:
        generation = generation_starts[-1].generation
        if what == "complete":
            epoch = len(complete) + 1
            complete[epoch] = generation
            present.append(epoch)
        elif what == "resume":
            generation_starts.append(resumed(generation + 1))
        elif what == "fresh":
            generation_starts.append(began(generation + 1))
            present = []
        elif present:
            at = choice % len(present)
            generation_starts.append(restored(generation + 1, present[at]))
            present = present[: at + 1]
        assert live(complete, *generation_starts) == present


# ------------------------------------------------------------------------------------------------- pending epochs


def test_a_pending_epoch_can_complete_after_any_number_of_resumes() -> None:
    assert is_resumable(Generation(1), [began(1), resumed(2), resumed(3)])


def test_a_pending_epoch_cannot_complete_once_a_later_generation_went_back() -> None:
    assert not is_resumable(Generation(1), [began(1), restored(2, 7), resumed(3)])
    assert not is_resumable(Generation(1), [began(1), began(2)])


def test_what_went_back_before_the_epoch_began_does_not_matter() -> None:
    assert is_resumable(Generation(2), [began(1), restored(2, 7), resumed(3)])


@given(histories(), st.data())
def test_an_epoch_is_resumable_exactly_when_it_would_be_live_if_it_completed_now(
    history: list[tuple[str, int]], data: st.DataObject
) -> None:
    """It is newer than every complete epoch of its time, so any later step back goes behind it."""
    generation_starts, complete = [began(1)], {0: 1}
    for what, _ in history:
        generation = int(generation_starts[-1].generation)
        if what == "complete":
            complete[len(complete)] = generation
        elif what == "resume":
            generation_starts.append(resumed(generation + 1))
        elif what == "fresh":
            generation_starts.append(began(generation + 1))
        else:
            generation_starts.append(restored(generation + 1, max(complete)))
    begun_in = data.draw(st.integers(1, int(generation_starts[-1].generation)))
    number = max(complete) + 1
    assert is_resumable(Generation(begun_in), generation_starts) == (
        number in live({number: begun_in}, *generation_starts)
    )


# ------------------------------------------------------------------------------------------------- lost predecessors


def lost(*live: tuple[int, int], unreadable: tuple[int, ...] = (), published: tuple[int, ...] = (0,)) -> list[int]:
    """``live``: (epoch, the one before it)."""
    found = lost_behind(
        [(Epoch(epoch), Epoch(before)) for epoch, before in live],
        unreadable={Epoch(epoch) for epoch in unreadable},
        published=[Epoch(epoch) for epoch in published],
    )
    return [int(epoch) for epoch, _ in found]


def test_an_unbroken_history_loses_nothing() -> None:
    assert lost((1, 0), (2, 1), (5, 2)) == []


def test_a_beginning_that_was_let_go_of_is_needed_by_nobody() -> None:
    assert lost((5, 4), (6, 5)) == []


def test_an_epoch_behind_an_unreadable_one_is_lost_and_takes_the_next_along() -> None:
    assert lost((1, 0), (3, 2), (4, 3), unreadable=(2,)) == [3, 4]


def test_an_epoch_behind_one_that_is_missing_in_between_is_lost() -> None:
    assert lost((1, 0), (3, 2)) == [3]


def test_an_unreadable_beginning_takes_the_next_along() -> None:
    assert lost((2, 1), unreadable=(1,)) == [2]


def test_what_every_sink_has_published_needs_no_predecessor() -> None:
    assert lost((1, 0), (3, 2), unreadable=(2,), published=(3, 4)) == []
    assert lost((1, 0), (3, 2), unreadable=(2,), published=(3, 2)) == [3]


def test_after_a_published_one_the_history_goes_on() -> None:
    assert lost((3, 2), (4, 3), unreadable=(2,), published=(3,)) == []


def test_without_sinks_nothing_is_lost() -> None:
    assert lost((1, 0), (3, 2), unreadable=(2,), published=()) == []


def test_the_answer_names_what_was_missing() -> None:
    found = lost_behind([(Epoch(3), Epoch(2))], unreadable={Epoch(2)}, published=[Epoch(0)])
    assert found == [(3, 2)]


@given(
    length=st.integers(1, 8),
    first_kept=st.integers(1, 8),
    unreadable=st.sets(st.integers(1, 8)),
    published=st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
def test_an_epoch_is_usable_when_a_chain_of_readable_ones_leads_to_where_the_slowest_sink_is(
    length: int, first_kept: int, unreadable: set[int], published: list[int]
) -> None:
    """Epochs 1 … length, each after the one before; those below ``first_kept`` were let go of, which needs all sinks
    to have published them."""
    slowest = max(min(published), first_kept - 1)
    published = [max(one, slowest) for one in published]
    history = [epoch for epoch in range(first_kept, length + 1) if epoch not in unreadable]
    expected: list[int] = []
    for epoch in history:
        before = epoch - 1
        was_let_go = before < first_kept and before not in unreadable
        usable = epoch <= slowest or was_let_go or (before in history and before not in expected)
        if not usable:
            expected.append(epoch)
    assert lost(*((e, e - 1) for e in history), unreadable=tuple(unreadable), published=tuple(published)) == expected


# ------------------------------------------------------------------------------------------------- regions

names = st.sampled_from([OperatorId(name) for name in "abcdef"])


def test_a_region_is_what_failed_and_everything_downstream() -> None:
    consumers = {OperatorId("a"): [OperatorId("b"), OperatorId("c")], OperatorId("c"): [OperatorId("d")]}
    assert region_of([OperatorId("c")], consumers) == {"c", "d"}
    assert region_of([OperatorId("a")], consumers) == {"a", "b", "c", "d"}
    assert region_of([], consumers) == frozenset()


@given(failed=st.sets(names), edges=st.sets(st.tuples(names, names)))
def test_a_region_is_the_least_set_that_holds_what_failed_and_is_closed_downstream(
    failed: set[OperatorId], edges: set[tuple[OperatorId, OperatorId]]
) -> None:
    consumers = {name: [to for at, to in edges if at == name] for name in {at for at, _ in edges}}
    region = region_of(sorted(failed), consumers)
    assert failed <= region
    assert all(to in region for at, to in edges if at in region), "whoever reads from it goes back too"
    # Least: by growing from what failed, one step at a time, nothing else is reached.
    reached = set(failed)
    for _ in range(6):
        reached |= {to for at, to in edges if at in reached}
    assert region == reached
