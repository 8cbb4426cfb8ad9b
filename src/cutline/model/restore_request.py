"""A person's request to restore the flow to an earlier checkpoint or savepoint."""

from __future__ import annotations

import msgspec

from cutline.model.ids import Epoch

#: Of an epoch's number; more do not fit into 62 bits.
_MOST_DIGITS = 18


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Given to a start, or stored for the next one; it is removed only after a start has carried it out."""

    #: An epoch, the name of a savepoint, or "before-last-deploy".
    to: str
    #: Renamed operators: old → new.
    rename: dict[str, str] = {}
    #: Leave behind operators that the flow no longer has, with their state.
    allow_dropped: bool = False


def epoch_in(to: str) -> Epoch | None:
    """The epoch that a target is; None: it is the name of a savepoint."""
    is_number = to.isascii() and to.isdigit() and len(to) <= _MOST_DIGITS
    return Epoch(int(to)) if is_number else None
