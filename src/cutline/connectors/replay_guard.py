"""Whether a source can read again what it has read since a checkpoint, for the known kinds of sources.

A kind is an entry in ``SOURCE_KINDS``: how its offsets are recognised, and a function that checks the input. A source
of no known kind is not guarded: only its operators know whether its input still exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cutline.connectors.files.guard import FILES, local_path
from cutline.connectors.generator import guard as generator_guard
from cutline.connectors.generator import rows as generator
from cutline.connectors.kafka import positions as kafka_positions
from cutline.connectors.nats import positions as nats_positions
from cutline.connectors.postgres import positions as postgres_positions
from cutline.model.plan import PlannedSource
from cutline.ports.inspection import SourceReport
from cutline.ports.source_guard import SourceKind, Today


class _AsksServer(Protocol):
    """A module that understands the offsets of one kind of server."""

    KIND: str

    def is_mine(self, position: bytes | None) -> bool: ...

    def check(self, position: bytes | None, latest: bytes | None) -> SourceReport: ...

    def moved(self, positions: Sequence[bytes], latest: bytes | None) -> list[bytes]: ...

    def beginning(self, position: bytes) -> bytes: ...


def _asking(server: _AsksServer, name: str) -> SourceKind:
    """A kind whose offsets say which server to ask."""
    return SourceKind(
        name,
        lambda position, _: server.is_mine(position),
        lambda position, _, today: server.check(position, today.newest),
        lambda positions, today: server.moved(positions, today.newest),
        server.beginning,
        server.KIND,
    )


def _check_generator(position: bytes | None, _: Path, today: Today) -> SourceReport:
    return generator_guard.check(position, today.newest, _generators(today))


def _move_generator(positions: Sequence[bytes], today: Today) -> list[bytes]:
    return generator_guard.moved(positions, _generators(today))


def _generators(today: Today) -> list[bytes]:
    return [one.settings for one in today.planned if one.format == generator.KIND and one.settings is not None]


#: The first kind that recognises a source guards it.
SOURCE_KINDS: tuple[SourceKind, ...] = (
    FILES,
    _asking(kafka_positions, "Kafka"),
    _asking(nats_positions, "NATS"),
    _asking(postgres_positions, "PostgreSQL"),
    SourceKind(
        "generator",
        lambda position, _: generator.parse_position(position) is not None,
        _check_generator,
        _move_generator,
        generator.beginning,
        generator.KIND,
    ),
)


class ReplayGuard:
    """See ``cutline.ports.source_guard.SourceGuard``."""

    def __init__(self, kinds: Sequence[SourceKind] = SOURCE_KINDS) -> None:
        self._kinds = kinds

    def kind_of(self, position: bytes | None, folder: Path) -> SourceKind | None:
        return next((one for one in self._kinds if one.is_mine(position, folder)), None)

    def why_not_guarded(self, source: PlannedSource) -> str | None:
        if source.folder:
            return None if local_path(source.folder) is not None else "its files are on another file system"
        if any(one.format == source.format for one in self._kinds):
            return None
        return "Cutline cannot check its input: keep the input for as long as a checkpoint may need it"
