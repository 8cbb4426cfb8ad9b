"""The link between coordinator and operators, over wires that do what wires do."""

from __future__ import annotations

import random
from collections.abc import Callable

from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.protocol.messages.wire import AckRequested, ProgressMade, ToCoordinator, ToOperator
from cutline.transport.mailbox import AnyEnvelope, LinkSettings, Mailbox

OPERATOR = OperatorId("totals")


class Link:
    """Both sides, and what is on its way between them."""

    def __init__(self, *, retry_ms: int = 0, retry_limit: int = 60) -> None:
        self.to_operator: list[AnyEnvelope] = []
        self.to_coordinator: list[AnyEnvelope] = []
        self.coordinator: Mailbox[ToOperator, ToCoordinator] = Mailbox(
            Generation(3), self.to_operator.append, LinkSettings(retry_ms=retry_ms, retry_limit=retry_limit)
        )
        self.operator: Mailbox[ToCoordinator, ToOperator] = Mailbox(
            Generation(3), self.to_coordinator.append, LinkSettings(retry_ms=retry_ms, retry_limit=retry_limit)
        )
        self.heard_by_operator: list[ToOperator] = []
        self.heard_by_coordinator: list[ToCoordinator] = []

    def carry(self, change: Callable[[list[AnyEnvelope]], list[AnyEnvelope]] = list) -> None:
        """Bring what is on its way to where it belongs, as the wire leaves it."""
        to_operator, to_coordinator = change(self.to_operator[:]), change(self.to_coordinator[:])
        self.to_operator.clear()
        self.to_coordinator.clear()
        for envelope in to_operator:
            self.heard_by_operator += self.operator.receive(envelope)
        for envelope in to_coordinator:
            self.heard_by_coordinator += self.coordinator.receive(envelope)


def ask(epoch: int) -> AckRequested:
    return AckRequested(epoch=Epoch(epoch))


def progress(batches: int) -> ProgressMade:
    return ProgressMade(operator=OPERATOR, is_source=False, batches=batches)


def test_messages_arrive_once_and_in_order() -> None:
    link = Link()
    for number in range(1, 4):
        link.coordinator.send(ask(number))
        link.operator.send(progress(number))
    link.carry()
    link.carry()
    assert link.heard_by_operator == [ask(1), ask(2), ask(3)]
    assert link.heard_by_coordinator == [progress(1), progress(2), progress(3)]
    assert link.coordinator.next_deadline_ms() is link.operator.next_deadline_ms() is None
    assert not link.coordinator.counts() + link.operator.counts()


def test_what_overtakes_is_put_back_into_order_and_counted() -> None:
    link = Link()
    for number in range(1, 4):
        link.coordinator.send(ask(number))
    link.carry(lambda envelopes: envelopes[::-1])
    assert link.heard_by_operator == [ask(1), ask(2), ask(3)]
    assert link.operator.counts()["early"] == 2


def test_what_comes_twice_is_heard_once_and_counted() -> None:
    link = Link()
    link.coordinator.send(ask(1))
    link.carry(lambda envelopes: envelopes * 3)
    assert link.heard_by_operator == [ask(1)]
    assert link.operator.counts()["duplicate"] == 2


def test_what_is_lost_is_sent_again() -> None:
    link = Link()
    link.coordinator.send(ask(1))
    link.carry(lambda _: [])
    link.coordinator.send_again()
    link.carry()
    assert link.heard_by_operator == [ask(1)]
    assert link.coordinator.counts()["retried"] == 1


def test_what_is_never_answered_is_given_up() -> None:
    link = Link(retry_limit=2)
    link.coordinator.send(ask(1))
    for _ in range(3):
        link.coordinator.send_again()
    assert link.coordinator.counts()["given_up"] == 1
    assert link.coordinator.next_deadline_ms() is None


def test_a_envelope_of_an_earlier_life_is_stale() -> None:
    link = Link()
    link.operator.send(progress(1))
    link.carry()
    zombie: Mailbox[ToCoordinator, ToOperator] = Mailbox(
        Generation(2), link.to_coordinator.append, LinkSettings(retry_ms=0, retry_limit=1)
    )
    zombie.send(progress(99))
    link.carry()
    assert link.heard_by_coordinator == [progress(1)]
    assert link.coordinator.counts()["stale"] == 1


def test_over_any_wire_everything_arrives_once_and_in_order() -> None:
    for seed in range(30):
        chance = random.Random(seed)

        def spoil(envelopes: list[AnyEnvelope], chance: random.Random = chance) -> list[AnyEnvelope]:
            kept = [envelope for envelope in envelopes for _ in range(chance.choice([0, 1, 1, 2]))]
            chance.shuffle(kept)
            return kept

        link = Link()
        for number in range(20):
            link.coordinator.send(ask(number))
            link.operator.send(progress(number))
            link.carry(spoil)
        for _ in range(20):
            link.coordinator.send_again()
            link.operator.send_again()
            link.carry(spoil)
        link.carry()
        assert link.heard_by_operator == [ask(number) for number in range(20)]
        assert link.heard_by_coordinator == [progress(number) for number in range(20)]
