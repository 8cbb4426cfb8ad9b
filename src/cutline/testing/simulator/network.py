"""The wire between coordinator and operators: it loses, repeats, delays, re-orders and splits."""

from __future__ import annotations

from typing import Any, Protocol

from cutline.protocol.link import Envelope
from cutline.testing.simulator.world import Living, World


class Receiver(Living, Protocol):
    """A process with an address."""

    def receive(self, sender: str, envelope: Envelope[Any]) -> None: ...


#: Who lives where. A flow that is thought dead and goes on keeps its own: its parts still know one another.
Book = dict[str, Receiver]


class Network:
    """Delivers to the process that has the address when the message arrives."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Addresses that are cut off from the rest.
        self.cut_off: set[str] = set()

    def send(self, book: Book, sender: str, to: str, envelope: Envelope[Any]) -> None:
        world = self._world
        if sender in self.cut_off or to in self.cut_off:
            world.faults["partition"] += 1
            return
        if world.strikes("message_lost"):
            return
        copies = 2 if world.strikes("message_duplicated") else 1
        for _ in range(copies):
            delay = world.between(1, 4)
            if world.strikes("message_delayed"):
                delay += world.between(100, 3_000)
            elif world.strikes("message_reordered"):
                delay += world.between(5, 40)
            world.after(delay, lambda: _deliver(book, sender, to, envelope))


def _deliver(book: Book, sender: str, to: str, envelope: Envelope[Any]) -> None:
    receiver = book.get(to)
    if receiver is not None and receiver.is_alive:
        receiver.receive(sender, envelope)
