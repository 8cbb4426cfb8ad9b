"""The wire of a flow that runs in one process: addresses, and the receivers registered for them.

A sender names an address, never an object: a receiver may be built after its senders, and replaced while they send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NewType

from cutline.errors import InvariantViolation
from cutline.model.ids import OperatorId
from cutline.protocol.messages.wire import Credit
from cutline.transport import codec
from cutline.transport.mailbox import AnyEnvelope

Address = NewType("Address", str)
#: Content of the wire: numbered messages between coordinator and operator, and credit between operators.
Content = AnyEnvelope | Credit
#: Receives the sender's address and the content. It must not block.
Receiver = Callable[[Address, Content], None]
#: Sends to an address on behalf of one sender.
Wire = Callable[[Address, Content], None]

COORDINATOR = Address("coordinator")
_OPERATOR = "operator/"


def operator_address(operator: OperatorId) -> Address:
    return Address(f"{_OPERATOR}{operator}")


def operator_at(address: Address) -> OperatorId:
    """The operator with this address."""
    return OperatorId(address.removeprefix(_OPERATOR))


class InProcessRouter:
    """Delivers synchronously, on the sender's thread."""

    def __init__(self, *, is_encoding: bool = False) -> None:
        """``is_encoding``: encode and decode everything, as a wire between processes does."""
        self._is_encoding = is_encoding
        self._receivers: dict[Address, Receiver] = {}
        self._lock = threading.Lock()

    def register(self, address: Address, receiver: Receiver) -> None:
        """From now on ``receiver`` receives what is sent to the address; it replaces any earlier receiver."""
        with self._lock:
            self._receivers[address] = receiver

    def deliver(self, sender: Address, receiver: Address, content: Content) -> None:
        receive = self._receivers.get(receiver)
        if receive is None:
            raise InvariantViolation(f"{sender} sends a message before {receiver} is registered")
        receive(sender, codec.decode(codec.encode(content)) if self._is_encoding else content)

    def wire_of(self, sender: Address) -> Wire:
        return lambda receiver, content: self.deliver(sender, receiver, content)
