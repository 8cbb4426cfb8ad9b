"""The wire of a flow that runs in one process."""

from __future__ import annotations

from typing import Any

import pytest

from cutline.errors import InvariantViolation
from cutline.model.ids import Epoch, Generation, OperatorId, Position
from cutline.protocol.link import Endpoint
from cutline.protocol.messages.wire import AckRequested, Consumed
from cutline.transport.in_process import COORDINATOR, Address, Content, InProcessRouter, operator_address, operator_at
from cutline.transport.mailbox import AnyEnvelope

TOTALS = OperatorId("totals")
CREDIT = Consumed(channel=OperatorId("orders"), consumer=TOTALS, generation=Generation(3), position=Position(7))


def an_envelope() -> AnyEnvelope:
    endpoint: Endpoint[Any] = Endpoint(Generation(1), retry_ms=100, retry_limit=3)
    (envelope,) = endpoint.send(AckRequested(epoch=Epoch(4)), now_ms=0)
    return envelope


class Receiver:
    def __init__(self) -> None:
        self.heard: list[tuple[Address, Content]] = []

    def __call__(self, sender: Address, content: Content) -> None:
        self.heard.append((sender, content))


def test_a_wire_that_is_handed_out_early_leads_to_the_end_that_registers_later() -> None:
    router, coordinator, operator = InProcessRouter(), Receiver(), Receiver()
    up, down = router.wire_of(operator_address(TOTALS)), router.wire_of(COORDINATOR)
    router.register(COORDINATOR, coordinator)
    router.register(operator_address(TOTALS), operator)
    envelope = an_envelope()
    up(COORDINATOR, envelope)
    down(operator_address(TOTALS), envelope)
    assert coordinator.heard == [(operator_address(TOTALS), envelope)]
    assert operator.heard == [(COORDINATOR, envelope)]


def test_an_address_names_its_operator() -> None:
    assert operator_at(operator_address(TOTALS)) == TOTALS
    assert operator_address(OperatorId("coordinator")) != COORDINATOR


def test_an_operator_that_is_rebuilt_takes_the_place_of_the_old_one() -> None:
    router, old, new = InProcessRouter(), Receiver(), Receiver()
    router.register(operator_address(TOTALS), old)
    router.register(operator_address(TOTALS), new)
    router.deliver(COORDINATOR, operator_address(TOTALS), an_envelope())
    assert (len(old.heard), len(new.heard)) == (0, 1)


def test_sending_before_the_other_end_is_registered_is_an_error_of_the_wiring() -> None:
    with pytest.raises(InvariantViolation, match="operator/totals"):
        InProcessRouter().deliver(COORDINATOR, operator_address(TOTALS), an_envelope())


@pytest.mark.parametrize("content", [an_envelope(), CREDIT], ids=["envelope", "credit"])
def test_an_encoding_wire_delivers_equal_content_that_is_another_object(content: Content) -> None:
    router, receiver = InProcessRouter(is_encoding=True), Receiver()
    router.register(COORDINATOR, receiver)
    router.deliver(operator_address(TOTALS), COORDINATOR, content)
    ((_, heard),) = receiver.heard
    assert heard == content and heard is not content


def test_a_wire_that_does_not_encode_passes_the_object_itself() -> None:
    router, receiver = InProcessRouter(), Receiver()
    router.register(COORDINATOR, receiver)
    router.deliver(operator_address(TOTALS), COORDINATOR, CREDIT)
    assert receiver.heard[0][1] is CREDIT
