"""An operator's inputs: their entries as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import assert_never

from cutline.channels.tailing import FollowedLog
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.ids import OperatorId
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.messages.agent import BarrierAppeared, DataAppeared

Appeared = DataAppeared | BarrierAppeared


class Inputs:
    """Follows the inputs' logs."""

    def __init__(self, inputs: Mapping[OperatorId, FollowedLog]) -> None:
        self._inputs = inputs
        self._listeners: list[tuple[FollowedLog, Callable[[Entry], None]]] = []

    def follow(self, on_entry: Callable[[Appeared], None]) -> Iterator[Appeared]:
        """The entries that are there; ``on_entry`` hears of every later one, in order, with none in between."""
        for name, channel in self._inputs.items():

            def listen(entry: Entry, name: OperatorId = name) -> None:
                on_entry(_appeared(name, entry))

            self._listeners.append((channel, listen))
            for entry in channel.on_append(listen):
                yield _appeared(name, entry)

    def unfollow(self) -> None:
        for channel, listener in self._listeners:
            channel.remove_listener(listener)

    def follow_fork(self, channel: OperatorId, lineage: Lineage) -> None:
        """The producer was restored: its log continues in another generation."""
        self._inputs[channel].follow_fork(lineage)

    def lineage(self, channel: OperatorId) -> Lineage:
        return self._inputs[channel].lineage


def _appeared(channel: OperatorId, entry: Entry) -> Appeared:
    match entry:
        case DataEntry():
            return DataAppeared(channel=channel, seq=entry.seq, has_rows=entry.rows > 0)
        case BarrierEntry():
            return BarrierAppeared(channel=channel, seq=entry.seq, epoch=entry.epoch, terms=entry.terms)
        case _:
            assert_never(entry)
