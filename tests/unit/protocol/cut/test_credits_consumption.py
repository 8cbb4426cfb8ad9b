"""Credit as messages: lost, repeated, late and of older generations, they do no harm."""

from __future__ import annotations

import itertools
import random

import pytest

from cutline.model.ids import Generation, OperatorId, Position
from cutline.protocol.cut.credits import ConsumptionReports, ConsumptionRequests, CreditAccount
from cutline.protocol.messages.wire import Consumed, ConsumptionNoted, ConsumptionRequested

ORDERS, TOTALS, OTHER = OperatorId("orders"), OperatorId("totals"), OperatorId("other")
RETRY_MS = 100


def account(*consumers: OperatorId) -> CreditAccount:
    """Of orders, which has written five entries of one row."""
    account = CreditAccount(consumers, entries=100, size_bytes=1_000)
    for seq, rows, size_bytes in entries():
        account.appended(seq, rows, size_bytes)
    return account


def entries() -> list[tuple[Position, int, int]]:
    return [(Position(seq), 1, 10) for seq in range(5)]


def read(position: int, generation: int = 1, consumer: OperatorId = TOTALS) -> Consumed:
    return Consumed(channel=ORDERS, consumer=consumer, generation=Generation(generation), position=Position(position))


def noted(report: Consumed) -> ConsumptionNoted:
    return ConsumptionNoted(
        channel=report.channel, consumer=report.consumer, generation=report.generation, position=report.position
    )


def backlog(account: CreditAccount, *reports: Consumed) -> int:
    for report in reports:
        account.reported(report, entries)
    return account.backlog_rows()[TOTALS]


# ------------------------------------------------------------------------------------------------- the account


def test_positions_are_cumulative() -> None:
    assert backlog(account(TOTALS), read(4)) == 1


def test_a_report_that_is_late_or_repeated_changes_nothing() -> None:
    assert backlog(account(TOTALS), read(4), read(2), read(4)) == 1


def test_a_newer_generation_was_restored_and_reads_again() -> None:
    assert backlog(account(TOTALS), read(4), read(1, generation=2)) == 4


def test_a_newer_generation_that_goes_on_where_it_was_takes_nothing_back() -> None:
    assert backlog(account(TOTALS), read(4), read(4, generation=2), read(5, generation=2)) == 0


def test_an_older_generation_no_longer_counts() -> None:
    assert backlog(account(TOTALS), read(1, generation=2), read(5, generation=1)) == 4


def test_a_restore_of_one_consumer_does_not_touch_another() -> None:
    credit = account(TOTALS, OTHER)
    backlog(credit, read(5), read(3, consumer=OTHER), read(2, generation=2))
    assert credit.backlog_rows() == {TOTALS: 3, OTHER: 2}


def test_a_stranger_changes_nothing() -> None:
    assert backlog(account(TOTALS), read(5, consumer=OTHER)) == 5


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_only_the_newest_generations_furthest_position_counts(seed: int) -> None:
    chance = random.Random(seed)
    reports = [read(chance.randrange(6), generation=chance.randrange(1, 4)) for _ in range(12)]
    newest = max(report.generation for report in reports)
    furthest = max(report.position for report in reports if report.generation == newest)
    chance.shuffle(reports)
    assert backlog(account(TOTALS), *reports, *chance.choices(reports, k=5)) == 5 - furthest


# ------------------------------------------------------------------------------------------------- the consumer


@pytest.fixture
def reports() -> ConsumptionReports:
    return ConsumptionReports(TOTALS, Generation(1), {ORDERS: Position(0)}, retry_ms=RETRY_MS)


def test_what_is_read_is_reported_once_when_it_is_noted(reports: ConsumptionReports) -> None:
    (report,) = reports.read({ORDERS: Position(3)}, now_ms=0)
    assert report == read(3)
    reports.noted(noted(report))
    assert reports.next_deadline_ms() is None
    assert reports.time_passed(now_ms=10**9) == []


def test_a_report_that_is_not_noted_is_repeated_with_growing_pauses(reports: ConsumptionReports) -> None:
    reports.read({ORDERS: Position(3)}, now_ms=0)
    due = []
    for _ in range(5):
        deadline = reports.next_deadline_ms()
        assert deadline is not None
        assert reports.time_passed(now_ms=deadline - 1) == []
        assert reports.time_passed(now_ms=deadline) == [read(3)]
        due.append(deadline)
    pauses = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert pauses == sorted(pauses) and pauses[-1] > pauses[0]


def test_it_is_never_given_up(reports: ConsumptionReports) -> None:
    reports.read({ORDERS: Position(3)}, now_ms=0)
    for now_ms in range(0, 10**7, 10**4):
        reports.time_passed(now_ms=now_ms)
    deadline = reports.next_deadline_ms()
    assert deadline is not None and deadline - 10**7 <= 32 * RETRY_MS


def test_only_the_newest_position_is_repeated(reports: ConsumptionReports) -> None:
    reports.read({ORDERS: Position(3)}, now_ms=0)
    reports.read({ORDERS: Position(4)}, now_ms=10)
    reports.noted(noted(read(3)))
    assert reports.time_passed(now_ms=10**6) == [read(4)], "the answer to the earlier report says nothing of this one"


def test_an_answer_to_a_former_self_is_none(reports: ConsumptionReports) -> None:
    reports.read({ORDERS: Position(3)}, now_ms=0)
    reports.noted(noted(read(3, generation=7)))
    assert reports.next_deadline_ms() is not None


def test_a_producer_that_asks_gets_the_present_position(reports: ConsumptionReports) -> None:
    request = ConsumptionRequested(channel=ORDERS, consumer=TOTALS)
    assert reports.requested(request) == [read(0)]
    reports.read({ORDERS: Position(3)}, now_ms=0)
    assert reports.requested(request) == [read(3)]
    assert reports.requested(ConsumptionRequested(channel=OTHER, consumer=TOTALS)) == []


# ------------------------------------------------------------------------------------------------- the producer


def test_a_producer_asks_until_every_consumer_has_reported() -> None:
    requests = ConsumptionRequests(ORDERS, [TOTALS, OTHER], retry_ms=RETRY_MS)
    assert [one.consumer for one in requests.time_passed(now_ms=0)] == [TOTALS, OTHER]
    assert requests.time_passed(now_ms=RETRY_MS - 1) == []
    requests.reported(TOTALS)
    assert [one.consumer for one in requests.time_passed(now_ms=RETRY_MS)] == [OTHER]
    requests.reported(OTHER)
    requests.reported(OTHER)
    assert requests.next_deadline_ms() is None
    assert requests.time_passed(now_ms=10**9) == []


def test_a_producer_without_consumers_asks_nothing() -> None:
    assert ConsumptionRequests(ORDERS, [], retry_ms=RETRY_MS).next_deadline_ms() is None


@pytest.mark.parametrize("seed", range(20))
def test_over_a_wire_that_loses_most_messages_the_producer_knows_in_the_end(seed: int) -> None:
    """Also when it starts anew on the way, and the consumer is restored on the way."""
    chance, now_ms, generation = random.Random(seed), 0, 1
    credit = account(TOTALS)
    reports = ConsumptionReports(TOTALS, Generation(1), {ORDERS: Position(0)}, retry_ms=RETRY_MS)
    requests = ConsumptionRequests(ORDERS, [TOTALS], retry_ms=RETRY_MS)
    position = 0

    def deliver(sent: list[Consumed]) -> None:
        for report in sent:
            if chance.random() < 0.7:
                continue
            credit.reported(report, entries)
            requests.reported(TOTALS)
            if chance.random() < 0.3:
                reports.noted(noted(report))

    def tick() -> None:
        deliver(reports.time_passed(now_ms=now_ms))
        for request in requests.time_passed(now_ms=now_ms):
            if chance.random() < 0.3:
                deliver(reports.requested(request))

    for _ in range(60):
        now_ms += RETRY_MS
        match chance.choice(["read", "read", "wait", "wait", "producer", "consumer"]):
            case "read":
                position = min(position + 1, 5)
                deliver(reports.read({ORDERS: Position(position)}, now_ms=now_ms))
            case "producer":
                credit, requests = account(TOTALS), ConsumptionRequests(ORDERS, [TOTALS], retry_ms=RETRY_MS)
            case "consumer":
                generation, position = generation + 1, chance.randrange(position + 1)
                reports = ConsumptionReports(
                    TOTALS, Generation(generation), {ORDERS: Position(position)}, retry_ms=RETRY_MS
                )
                deliver(reports.read({ORDERS: Position(position)}, now_ms=now_ms))
            case _:
                pass
        tick()
    while reports.next_deadline_ms() is not None or requests.next_deadline_ms() is not None:
        now_ms += 32 * RETRY_MS
        tick()
    assert credit.backlog_rows() == {TOTALS: 5 - position}
