"""Where the barriers of open epochs are in an operator's inputs, and what lies between its positions and them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from cutline.channels.tailing import FollowedLog
from cutline.model.cut import InFlight
from cutline.model.ids import Epoch, OperatorId, Position

_LOOK_SECONDS = 0.05


class InputBarriers:
    """Remembers each barrier from its appearance until its epoch is closed."""

    def __init__(self, inputs: Mapping[OperatorId, FollowedLog]) -> None:
        self._inputs = inputs
        self._barriers: dict[Epoch, dict[OperatorId, Position]] = {}
        self._changed = threading.Condition()

    def appeared(self, channel: OperatorId, epoch: Epoch, seq: Position) -> None:
        with self._changed:
            self._barriers.setdefault(epoch, {})[channel] = seq
            self._changed.notify_all()

    def closed(self, epoch: Epoch) -> None:
        with self._changed:
            self._barriers.pop(epoch, None)
            self._changed.notify_all()

    def wait_in_flight(
        self, epoch: Epoch, positions: Mapping[OperatorId, Position], is_wanted: Callable[[], bool]
    ) -> dict[OperatorId, InFlight] | None:
        """Per input: what lies between a position and the epoch's barrier; None when it is no longer wanted.

        An unaligned cut may come before the barriers of some inputs. The epoch cannot complete without them, so waiting
        for them here delays nothing.
        """
        awaited = [channel for channel in positions if channel in self._inputs]
        with self._changed:
            while not (barriers := self._barriers.get(epoch, {})).keys() >= set(awaited):
                if not is_wanted():
                    return None
                self._changed.wait(_LOOK_SECONDS)
            found = {channel: barriers[channel] for channel in awaited}
        return {channel: self._inputs[channel].in_flight(positions[channel], at) for channel, at in found.items()}
