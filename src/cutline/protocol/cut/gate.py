"""The gate: how far a consumer may read one input channel now.

Its one rule makes every cut consistent: *never admit past the first barrier that this operator has not cut for.*

Positions do not count barriers or empty entries: a position is the place after the last entry with rows. Crossing a
barrier therefore changes no offset, and Spark runs no empty batch for it.
"""

from __future__ import annotations

from cutline.errors import InvariantViolation
from cutline.model.ids import START, Epoch, Position


class InputGate:
    """What one operator knows about one input channel."""

    def __init__(self, read_up_to: Position = START) -> None:
        #: After the last entry with rows that has appeared; never below what was read before this gate existed.
        self.end: Position = read_up_to
        self._read_before = read_up_to
        #: Next sequence number expected; logs are gap-free, so anything below was seen before. None: nothing seen yet,
        #: and the log may begin anywhere, since it may have been truncated.
        self._next_seq: Position | None = None
        #: Open barriers this operator has not cut for: epoch → position where a batch must end to reach the barrier.
        self._uncut: dict[Epoch, Position] = {}

    def data_appeared(self, seq: Position, *, has_rows: bool) -> None:
        """A data entry is in the log. One seen before changes nothing."""
        if self._is_new(seq) and has_rows:
            self.end = max(self.end, Position(seq + 1))

    def barrier_appeared(self, seq: Position, epoch: Epoch, *, is_uncut: bool) -> bool:
        """A barrier is in the log; ``is_uncut``: it is open and this operator has yet to cut for it.

        False: an earlier process of the operator had given the epoch up and read on. The operator can never cut for it.
        """
        if self._is_new(seq) and is_uncut:
            if seq < self._read_before:
                return False
            self._uncut[epoch] = self.end
        return True

    def _is_new(self, seq: Position) -> bool:
        expected = seq if self._next_seq is None else self._next_seq
        if seq > expected:
            # The missing entry may be a barrier; continuing without it would silently break the cut.
            raise InvariantViolation(f"entry {seq} appeared where {expected} was expected")
        if seq < expected:
            return False
        self._next_seq = Position(seq + 1)
        return True

    def has_caught_up(self) -> bool:
        """Whether everything that was read before this gate existed has appeared again.

        Until then the missing entries may include a barrier that was read past, so no cut is safe.
        """
        return self._read_before == START or (self._next_seq is not None and self._next_seq >= self._read_before)

    def release(self, epoch: Epoch) -> None:
        """The operator has cut for the epoch, or the epoch is closed."""
        self._uncut.pop(epoch, None)

    def barrier_position(self, epoch: Epoch) -> Position | None:
        """Where a batch must end to reach this uncut barrier; None if the barrier has not appeared."""
        return self._uncut.get(epoch)

    def admit(self) -> Position:
        """How far the operator may read."""
        # Barriers of one writer appear in the order of their epochs and positions, so the smallest is the first.
        return min(self._uncut.values(), default=self.end)
