"""Which log entries are released: never what a retained checkpoint or a running operator needs, and none of it late."""

from __future__ import annotations

import pytest

from cutline.model.ids import Epoch, Generation, OperatorId, Position
from cutline.protocol.checkpoint.releases import EntryReleases, joint_release
from cutline.protocol.history.retention import EpochNeeds
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.protocol.messages.wire import CaughtUp, EntriesReleased, OperatorStarted

ORDERS, TOTALS, OTHER = OperatorId("orders"), OperatorId("totals"), OperatorId("other")
#: orders → totals; other stands alone.
TOUCHED_BY = {ORDERS: {ORDERS, TOTALS}, TOTALS: {TOTALS}, OTHER: {OTHER}}


def needs(**channels: int) -> EpochNeeds:
    return EpochNeeds(
        operators=(ORDERS, TOTALS, OTHER), channels={OperatorId(k): Position(v) for k, v in channels.items()}
    )


def started(operator: OperatorId, generation: int = 1, **behind: int) -> OperatorStarted:
    return OperatorStarted(
        operator=operator,
        generation=Generation(generation),
        needs={OperatorId(name): Position(at) for name, at in behind.items()},
    )


def released(operator: OperatorId, below: int, generation: int = 1) -> EntriesReleased:
    return EntriesReleased(operator=operator, generation=Generation(generation), below=Position(below))


@pytest.fixture
def releases() -> EntryReleases:
    """All operators run; checkpoints were collected."""
    releases = EntryReleases(TOUCHED_BY)
    for operator in (ORDERS, TOTALS, OTHER):
        releases.started(started(operator))
    releases.collected([needs(orders=5, totals=7, other=9), needs(orders=8, totals=9, other=12)])
    return releases


def test_what_no_retained_checkpoint_needs_is_released(releases: EntryReleases) -> None:
    assert releases.decide() == {ORDERS: 5, TOTALS: 7, OTHER: 9}


def test_nothing_is_told_twice_unless_there_is_more(releases: EntryReleases) -> None:
    releases.decide()
    assert releases.decide() == {}
    releases.collected([needs(orders=8, totals=7, other=9)])
    assert releases.decide() == {ORDERS: 8}


def test_without_a_collection_nothing_is_released() -> None:
    releases = EntryReleases(TOUCHED_BY)
    for operator in (ORDERS, TOTALS, OTHER):
        releases.started(started(operator))
    assert releases.decide() == {}


def test_an_operator_that_has_not_started_holds_what_it_writes_and_reads() -> None:
    releases = EntryReleases(TOUCHED_BY)
    releases.collected([needs(orders=5, totals=7, other=9)])
    releases.started(started(ORDERS))
    releases.started(started(OTHER))
    assert releases.decide() == {OTHER: 9}
    releases.started(started(TOTALS))
    assert releases.decide() == {ORDERS: 5, TOTALS: 7}


def test_an_operator_behind_its_log_holds_what_it_needs_until_it_has_caught_up(releases: EntryReleases) -> None:
    releases.started(started(TOTALS, orders=2, totals=3))
    assert releases.decide() == {ORDERS: 2, TOTALS: 3, OTHER: 9}
    releases.caught_up(CaughtUp(operator=TOTALS, generation=Generation(1)))
    assert releases.decide() == {ORDERS: 5, TOTALS: 7}


def test_a_late_word_of_an_older_generation_releases_nothing(releases: EntryReleases) -> None:
    releases.started(started(TOTALS, 2, orders=2, totals=3))
    releases.caught_up(CaughtUp(operator=TOTALS, generation=Generation(1)))
    releases.started(started(TOTALS, 1))
    assert releases.decide() == {ORDERS: 2, TOTALS: 3, OTHER: 9}


def test_an_operator_that_is_about_to_be_restored_holds_everything_again(releases: EntryReleases) -> None:
    releases.lost([TOTALS])
    assert releases.decide() == {OTHER: 9}


def test_an_older_self_that_says_late_that_it_has_started_does_not_count_as_restored(releases: EntryReleases) -> None:
    releases.lost([TOTALS])
    releases.restored([TOTALS], Generation(2))
    releases.started(started(TOTALS, 1))
    assert releases.decide() == {OTHER: 9}
    releases.started(started(TOTALS, 2))
    assert releases.decide() == {ORDERS: 5, TOTALS: 7}


def test_a_restore_waits_for_deletions_that_were_decided_before(releases: EntryReleases) -> None:
    releases.decide()
    releases.lost([TOTALS])
    assert not releases.is_settled()
    releases.released(released(TOTALS, 7))
    assert not releases.is_settled(), "orders is still deleting what totals reads"
    releases.released(released(ORDERS, 5))
    assert releases.is_settled(), "whatever happens in other's log does not concern totals"


def test_a_confirmation_of_less_than_was_told_last_settles_nothing(releases: EntryReleases) -> None:
    releases.decide()
    releases.collected([needs(orders=8, totals=9, other=12)])
    releases.decide()
    releases.lost([TOTALS])
    releases.released(released(TOTALS, 9))
    releases.released(released(ORDERS, 5))
    assert not releases.is_settled()
    releases.released(released(ORDERS, 8))
    assert releases.is_settled()


def test_a_confirmation_of_another_generation_settles_nothing(releases: EntryReleases) -> None:
    releases.decide()
    releases.lost([ORDERS, TOTALS])
    releases.released(released(ORDERS, 5, generation=9))
    releases.released(released(TOTALS, 7))
    assert not releases.is_settled()


def test_what_a_writer_was_told_ends_with_it(releases: EntryReleases) -> None:
    """The message or its confirmation is lost, and the writer starts anew: it is told again."""
    releases.decide()
    releases.lost([ORDERS, TOTALS])
    for operator in (ORDERS, TOTALS):
        releases.started(started(operator, 2))
    assert releases.is_settled()
    assert releases.decide() == {ORDERS: 5, TOTALS: 7}


def test_several_releases_are_one_that_drops_all_and_keeps_what_the_newest_keeps() -> None:
    first = ReleaseEpochs(drop=(Epoch(1),), retained=(Epoch(2), Epoch(3)), open_from=Epoch(4))
    second = ReleaseEpochs(drop=(Epoch(2),), retained=(Epoch(3), Epoch(4)), open_from=Epoch(6))
    both = ReleaseEpochs(drop=(Epoch(1), Epoch(2)), retained=(Epoch(3), Epoch(4)), open_from=Epoch(6))
    assert joint_release([first, second]) == both
    assert joint_release([first]) == first
