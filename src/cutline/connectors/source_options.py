"""What the sources in Python share: their options, and their positions as stored in Spark's offsets.

Executors import it for every task, so it depends on little else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cutline.errors import LostInputError

if TYPE_CHECKING:
    from cutline.ports.inspection import FileProblem


class SourcePosition(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a source."""

    #: The kind of the source; each kind has its own default.
    source: str

    def as_json(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


P = TypeVar("P", bound=SourcePosition)


def parse(position: bytes | None, type_: type[P], kind: str) -> P | None:
    """None: the offset of another source, or of none."""
    try:
        found = None if position is None else msgspec.json.decode(position, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if found is not None and found.source == kind else None


def convert(offset: Mapping[str, Any], type_: type[P]) -> P:
    """The position in an offset that Spark hands over."""
    return msgspec.convert(offset, type_)


def furthest_of(
    positions: Iterable[dict[str, Any]],
    kind: str,
    *,
    is_own: Callable[[dict[str, Any]], bool],
    distance: Callable[[dict[str, Any]], int],
) -> dict[str, Any] | None:
    """A reader's own position among those of a query; None: the query has read no source of this kind.

    If none is its own, one of its kind: the reader then says what was changed.
    """
    of_kind = [position for position in positions if position.get("source") == kind]
    own = [position for position in of_kind if is_own(position)]
    return max(own, key=distance) if own else next(iter(of_kind), None)


# ------------------------------------------------------------------------------------------------- options


def needed(options: Mapping[str, str], name: str, *, source: str) -> str:
    """An option that has no default. Raises ValueError."""
    value = options.get(name, "")
    if not value:
        raise ValueError(f'the source {source} needs the option "{name}"')
    return str(value)


def whole_number(options: Mapping[str, str], name: str, default: int, *, least: int = 0) -> int:
    """Raises a ValueError that names the option."""
    text = str(options.get(name, default))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ValueError(f"{name} is {text!r}: use a whole number from {least} on")
    return int(text)


def most_per_batch(options: Mapping[str, str]) -> int:
    return whole_number(options, "max_per_batch", 100_000, least=1)


def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Raises a ValueError that names the option."""
    text = str(options.get(name, default)).lower()
    if text not in ("true", "false"):
        raise ValueError(f"{name} is {text!r}: use true or false")
    return text == "true"


def start_of(
    options: Mapping[str, str], *, place: str = "", is_place: Callable[[str], bool] = lambda text: False
) -> str:
    """Where reading begins: ``earliest``, ``latest`` or, if the source has ``place``s, one of those."""
    start = str(options.get("start", "earliest"))
    if start not in ("earliest", "latest") and not is_place(start):
        choices = f"earliest, latest or {place}" if place else "earliest or latest"
        raise ValueError(f"start is {start!r}: use {choices}")
    return start


# ------------------------------------------------------------------------------------------------- ranges


def ranges_of(first: int, end: int, parts: int) -> list[tuple[int, int]]:
    """[first, end) in at most ``parts`` ranges of about the same length, none of them empty."""
    count = max(min(parts, end - first), 1)
    edges = [first + (end - first) * index // count for index in range(count + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def refuse_lost(problems: Iterable[FileProblem]) -> None:
    """Raises LostInputError: a reader never skips lost input silently."""
    for problem in problems:
        raise LostInputError(
            f"{problem.path} cannot be read: {problem.problem}",
            next_step='restore a checkpoint after it, or start with missing_input = "continue" to skip it',
        )
