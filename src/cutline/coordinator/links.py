"""The coordinator's mailboxes: one for each operator of its flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cutline.model.ids import Generation, OperatorId
from cutline.protocol.messages.wire import ToCoordinator, ToOperator
from cutline.transport.in_process import Address, Wire, operator_address, operator_at
from cutline.transport.mailbox import AnyEnvelope, LinkSettings, Mailbox


class Links:
    """Any thread may send; one thread receives and resends."""

    def __init__(
        self, operators: Iterable[OperatorId], generation: Generation, *, wire: Wire, settings: LinkSettings
    ) -> None:
        self._wire = wire
        self._settings = settings
        self._mailboxes = {name: self._mailbox(name, generation) for name in operators}

    def _mailbox(self, name: OperatorId, session: Generation) -> Mailbox[ToOperator, ToCoordinator]:
        address = operator_address(name)
        return Mailbox(session, lambda envelope: self._wire(address, envelope), self._settings)

    @property
    def operators(self) -> tuple[OperatorId, ...]:
        return tuple(self._mailboxes)

    def begin_anew(self, operators: Iterable[OperatorId], generation: Generation) -> None:
        """Open new links to restored operators: earlier messages to them are void."""
        for name in operators:
            self._mailboxes[name] = self._mailbox(name, generation)

    def send(self, operator: OperatorId, message: ToOperator) -> None:
        self._mailboxes[operator].send(message)

    def receive(self, sender: Address, envelope: AnyEnvelope) -> tuple[ToCoordinator, ...]:
        return self._mailboxes[operator_at(sender)].receive(envelope)

    def send_again(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.send_again()

    def next_deadline_ms(self) -> int | None:
        deadlines = (mailbox.next_deadline_ms() for mailbox in self._mailboxes.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def counts(self) -> Counter[str]:
        """Delivery problems that this side has seen; see ``Endpoint.counts``."""
        return sum((mailbox.counts() for mailbox in self._mailboxes.values()), Counter())
