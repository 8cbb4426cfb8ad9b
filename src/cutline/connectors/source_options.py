"""How far a source has been read, as it stands in Spark's offsets: each kind of source knows its own.

Imported by executors for every task: it needs nothing of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec


class SourcePosition(msgspec.Struct, frozen=True, kw_only=True):
    """A place in what a source gives."""

    #: Of which kind the source is; each kind has it as a default.
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
    """Of an offset as Spark hands it over."""
    return msgspec.convert(offset, type_)
