"""An operator's inputs: their entries as events, and where the barriers of open epochs are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import assert_never

from cutline.channels.tailing import FollowedLog
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.messages.agent import BarrierAppeared, DataAppeared
from cutline.worker.operator_spec import OperatorStart

_LOOK_SECONDS = 0.05


Appeared = DataAppeared | BarrierAppeared


class Inputs:
    """Follows the inputs' logs. Remembers each barrier from its appearance until its epoch is closed."""

    def __init__(self, inputs: Mapping[OperatorId, FollowedLog], start: OperatorStart) -> None:
        self._inputs = inputs
        self._start = start
        self._listeners: list[tuple[FollowedLog, Callable[[Entry], None]]] = []
        self._barriers: dict[Epoch, dict[OperatorId, Position]] = {}
        self._changed = threading.Condition()

    def follow(self, on_entry: Callable[[Appeared], None]) -> Iterator[Appeared]:
        """The entries that are there; ``on_entry`` hears of every later one, in order, with none in between."""
        for name, channel in self._inputs.items():

            def listen(entry: Entry, name: OperatorId = name) -> None:
                on_entry(self._appeared(name, entry))

            self._listeners.append((channel, listen))
            for entry in channel.on_append(listen):
                yield self._appeared(name, entry)

    def unfollow(self) -> None:
        for channel, listener in self._listeners:
            channel.remove_listener(listener)

    def follow_fork(self, channel: OperatorId, lineage: Lineage) -> None:
        """The producer was restored: its log continues in another generation."""
        self._inputs[channel].follow_fork(lineage)

    def lineage(self, channel: OperatorId) -> Lineage:
        return self._inputs[channel].lineage

    def _appeared(self, channel: OperatorId, entry: Entry) -> Appeared:
        match entry:
            case DataEntry():
                return DataAppeared(channel=channel, seq=entry.seq, has_rows=entry.rows > 0)
            case BarrierEntry():
                self._note(channel, entry)
                return BarrierAppeared(channel=channel, seq=entry.seq, epoch=entry.epoch, terms=entry.terms)
            case _:
                assert_never(entry)

    def _note(self, channel: OperatorId, barrier: BarrierEntry) -> None:
        """Remember the barrier if this operator may still cut for its epoch."""
        is_open = barrier.epoch in self._start.open_epochs or barrier.epoch > self._start.last_epoch
        if barrier.alone is not None or not is_open:
            return
        with self._changed:
            self._barriers.setdefault(barrier.epoch, {})[channel] = barrier.seq
            self._changed.notify_all()

    def closed(self, epoch: Epoch) -> None:
        with self._changed:
            self._barriers.pop(epoch, None)
            self._changed.notify_all()

    def wait_barriers(
        self, epoch: Epoch, channels: Collection[OperatorId], is_wanted: Callable[[], bool]
    ) -> dict[OperatorId, Position] | None:
        """Where the epoch's barrier is in each of these inputs; None when it is no longer wanted.

        An unaligned cut may come before the barriers of some inputs. The epoch cannot complete without them, so waiting
        for them here delays nothing.
        """
        with self._changed:
            while not (barriers := self._barriers.get(epoch, {})).keys() >= set(channels):
                if not is_wanted():
                    return None
                self._changed.wait(_LOOK_SECONDS)
            return {channel: barriers[channel] for channel in channels}
