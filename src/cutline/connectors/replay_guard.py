"""Whether a source can read again what it has read since a checkpoint, for the known kinds of sources.

A kind is an entry in ``SOURCE_KINDS``: how its offsets are recognised, and a function that checks the input. A source
of no known kind is not guarded: only its operators know whether its input still exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cutline.base.logs import get_logger
from cutline.base.redaction import address_without_secrets
from cutline.connectors.files.guard import FILES, local_path
from cutline.connectors.generator import guard as generator_guard
from cutline.connectors.generator import rows as generator
from cutline.connectors.kafka import positions as kafka_positions
from cutline.connectors.kafka.spark_connector import SPARK_KAFKA
from cutline.connectors.nats import positions as nats_positions
from cutline.connectors.postgres import positions as postgres_positions
from cutline.errors import CutlineError, Refused
from cutline.model.plan import PlannedSource, RecordedSource
from cutline.ports.inspection import SourceProgress, SourceReport
from cutline.ports.source_guard import SourceKind, Today

log = get_logger(__name__)


class _AsksServer(Protocol):
    """A module that understands the offsets of one kind of server."""

    KIND: str

    def is_mine(self, position: bytes | None) -> bool: ...

    def check(self, position: bytes | None, latest: bytes | None) -> SourceReport: ...

    def moved(self, positions: Sequence[bytes], latest: bytes | None) -> list[bytes]: ...

    def beginning(self, position: bytes) -> bytes: ...

    def progress(self, position: bytes, stored: Sequence[bytes]) -> SourceProgress | None: ...


def _asking(server: _AsksServer, name: str, field: str) -> SourceKind:
    """A kind of which a server must be asked; ``field``: where its offsets hold the address."""

    def check(position: bytes | None, _: Path, today: Today) -> SourceReport:
        at, newest = _at_known_server([position, today.newest], today, server.KIND, field)
        return server.check(at, newest)

    def moved(positions: Sequence[bytes], today: Today) -> list[bytes]:
        *at, newest = _at_known_server([*positions, today.newest], today, server.KIND, field)
        return server.moved([one for one in at if one is not None], newest)

    def beginning(position: bytes, _: Path) -> bytes:
        return server.beginning(position)

    def progress(newest: bytes, stored: Sequence[bytes], today: Today) -> SourceProgress | None:
        known, *others = _at_known_server([newest, *stored], today, server.KIND, field)
        return None if known is None else server.progress(known, [one for one in others if one is not None])

    return SourceKind(
        name,
        lambda position, _: server.is_mine(position),
        check,
        moved,
        beginning,
        server.KIND,
        progress=progress,
    )


def _at_known_server(positions: Sequence[bytes | None], today: Today, kind: str, field: str) -> list[bytes | None]:
    """The positions with addresses that the flow's code names: one in an imported savepoint may lead anywhere.

    A server that has moved is asked where the code says it is now. If the code names several, none can be chosen for an
    address that is not among them. Without the code, which is known of a flow that starts, they stay as they are.
    """
    planned = {_spelled(one.address): one.address for one in today.planned if one.format == kind and one.address}
    return [one if one is None or not planned else _moved_to(one, planned, field) for one in positions]


def _moved_to(position: bytes, planned: Mapping[str, str], field: str) -> bytes:
    try:
        offset = msgspec.json.decode(position)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return position  # of no kind that is known here
    stored = offset.get(field) if isinstance(offset, dict) else None
    if not isinstance(stored, str) or _spelled(stored) in planned:
        return position
    if len(planned) > 1:
        raise Refused(
            f"the checkpoint names the server {address_without_secrets(stored)}, which the operator does not read from",
            next_step="if the server has moved, name it in the operator's options as the checkpoint does; "
            "otherwise do not use this checkpoint",
        )
    return msgspec.json.encode(offset | {field: next(iter(planned.values()))})


def _spelled(address: str) -> str:
    """Several addresses may be written with spaces between them."""
    return ",".join(one.strip() for one in address.split(","))


def _check_generator(position: bytes | None, _: Path, today: Today) -> SourceReport:
    return generator_guard.check(position, today.newest, _generators(today))


def _move_generator(positions: Sequence[bytes], today: Today) -> list[bytes]:
    return generator_guard.moved(positions, _generators(today))


def _generators(today: Today) -> list[bytes]:
    return [one.settings for one in today.planned if one.format == generator.KIND and one.settings is not None]


#: The first kind that recognises a source guards it.
SOURCE_KINDS: tuple[SourceKind, ...] = (
    FILES,
    _asking(kafka_positions, "Kafka", "servers"),
    _asking(nats_positions, "NATS", "url"),
    _asking(postgres_positions, "PostgreSQL", "url"),
    SourceKind(
        "generator",
        lambda position, _: generator.parse_position(position) is not None,
        _check_generator,
        _move_generator,
        lambda position, _: generator.beginning(position),
        generator.KIND,
    ),
    SPARK_KAFKA,
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
        kind = self._of_format(source.format)
        if kind is not None:
            return (kind.why_not(source) or None) if kind.why_not is not None else None
        return "Cutline cannot check its input: keep the input for as long as a checkpoint may need it"

    def warning(self, source: PlannedSource) -> str:
        kind = self._of_format(source.format)
        return kind.warning(source) if kind is not None and kind.warning is not None else ""

    def recorded(self, planned: Sequence[PlannedSource], former: Sequence[RecordedSource]) -> list[RecordedSource]:
        found = []
        for source in planned:
            kind = self._of_format(source.format)
            if kind is None or kind.recorded is None or self.why_not_guarded(source) is not None:
                continue
            settings = (source.settings or b"").decode()
            bare = RecordedSource(format=source.format, address=source.address, settings=settings)
            known = [one for one in former if msgspec.structs.replace(one, ids={}) == bare and one.ids]
            found += known[:1] or [_asked(kind.recorded, source, bare)]
        return found

    def _of_format(self, format_: str) -> SourceKind | None:
        return next((one for one in self._kinds if one.format == format_), None)


def _asked(
    ask: Callable[[PlannedSource], RecordedSource], source: PlannedSource, bare: RecordedSource
) -> RecordedSource:
    try:
        return ask(source)
    except CutlineError as error:
        # The query waits for its server; a restore will have less to compare, and says so by its notes.
        log.warning("source_not_recorded", source=source.format, reason=str(error))
        return bare
