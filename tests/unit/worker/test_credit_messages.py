"""Credit between a producer and its consumer, over a wire that delivers at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.channels.log import ChannelLog
from cutline.model.ids import Generation, OperatorId, Position
from cutline.protocol.cut.credits import ConsumptionReports, ConsumptionRequests
from cutline.protocol.link import Envelope
from cutline.protocol.messages.wire import Consumed
from cutline.transport.in_process import Address, Content, InProcessRouter, operator_address
from cutline.worker.backpressure import Credits
from cutline.worker.credit_messages import CreditMessages
from tests.support.channels import append_batch, open_log

ORDERS, TOTALS = OperatorId("orders"), OperatorId("totals")
#: So long that a message which is repeated would be seen.
RETRY_MS = 3_600_000


class Flow:
    """orders → totals, as far as credit goes."""

    def __init__(self, folder: Path) -> None:
        self.router = InProcessRouter()
        self.room_made = 0
        self.orders = open_log(folder / "orders", operator=ORDERS)
        self.totals = open_log(folder / "totals", operator=TOTALS)
        self.start_producer()
        self.start_consumer(1, 0)

    def start_producer(self) -> None:
        self.credits = Credits(self.orders, [TOTALS], entries=2, size_bytes=1_000)
        self.producer = self._messages(self.credits, ORDERS, ConsumptionReports(ORDERS, Generation(1), {}, retry_ms=1))

    def start_consumer(self, generation: int, position: int) -> None:
        reports = ConsumptionReports(TOTALS, Generation(generation), {ORDERS: Position(position)}, retry_ms=RETRY_MS)
        no_room_needed = Credits(self.totals, [], entries=2, size_bytes=1_000)
        self.consumer = self._messages(no_room_needed, TOTALS, reports)

    def _messages(self, credits: Credits, operator: OperatorId, reports: ConsumptionReports) -> CreditMessages:
        address = operator_address(operator)
        consumers = [TOTALS] if operator == ORDERS else []
        messages = CreditMessages(
            credits,
            reports=reports,
            requests=ConsumptionRequests(operator, consumers, retry_ms=RETRY_MS),
            wire=self.router.wire_of(address),
            on_credit=self._on_credit,
        )

        def receive(_: Address, content: Content) -> None:
            assert not isinstance(content, Envelope)
            messages.receive(content)

        self.router.register(address, receive)
        return messages

    def _on_credit(self) -> None:
        self.room_made += 1


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow(tmp_path)


def fill(log: ChannelLog, batches: int) -> None:
    for _ in range(batches):
        append_batch(log)


def test_what_is_read_makes_room_at_once_and_need_not_be_repeated(flow: Flow) -> None:
    fill(flow.orders, 2)
    assert not flow.credits.has_room()
    flow.consumer.read({ORDERS: Position(1)})
    assert flow.credits.has_room() and flow.room_made == 1
    assert flow.consumer.next_deadline_ms() is None, "the producer has noted it"


def test_a_producer_that_starts_asks_how_far_its_consumer_is(flow: Flow) -> None:
    fill(flow.orders, 2)
    flow.consumer.read({ORDERS: Position(2)})
    flow.start_producer()
    assert not flow.credits.is_drained(), "it knows nothing yet"
    flow.producer.send_again()
    assert flow.credits.is_drained()
    assert flow.producer.next_deadline_ms() is None


def test_a_consumer_that_was_restored_takes_its_credit_back(flow: Flow) -> None:
    fill(flow.orders, 2)
    flow.consumer.read({ORDERS: Position(2)})
    former = flow.consumer
    flow.start_consumer(2, 0)
    flow.consumer.read({ORDERS: Position(0)})
    assert flow.credits.backlog() == {TOTALS: 2}
    former.read({ORDERS: Position(2)})
    assert flow.credits.backlog() == {TOTALS: 2}, "its former self still runs, and no longer counts"


def test_a_late_report_of_a_former_consumer_does_not_end_the_asking(flow: Flow) -> None:
    """The producer has heard of generation 7; one of generation 6 says nothing about where the consumer is now."""

    def report(generation: int, position: int) -> Consumed:
        return Consumed(channel=ORDERS, consumer=TOTALS, generation=Generation(generation), position=Position(position))

    fill(flow.orders, 2)
    flow.credits.reported(report(7, 0))
    flow.producer.receive(report(6, 1))
    assert not flow.credits.has_room()
    assert flow.producer.next_deadline_ms() is not None, "it asks on"
    flow.producer.receive(report(7, 1))
    assert flow.producer.next_deadline_ms() is None
