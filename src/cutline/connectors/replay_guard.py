"""Whether a source can read again what it has read since a checkpoint, for the kinds of sources that we know.

A kind is an entry in ``SOURCE_KINDS``: by which offsets it is recognised, and a function that looks. A source of no
known kind is not guarded: only whoever runs it knows whether its input is still there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from cutline.connectors.generator import guard as generator_guard
from cutline.connectors.generator import rows as generator
from cutline.connectors.kafka import positions as kafka_positions
from cutline.connectors.nats import positions as nats_positions
from cutline.connectors.postgres import positions as postgres
from cutline.errors import DamagedRecordError
from cutline.model.layout import Layout
from cutline.ports import OperatorRecord, PlannedSource
from cutline.ports.inspection import FileProblem, SourceReport
from cutline.spark_dir.file_set import last_batches
from cutline.spark_dir.offsets import file_position, load_offsets, parse_offsets

_COMPACT = ".compact"
#: Spark compacts and purges a log while we read it: then it is listed anew.
_TRIES = 5


class Today(NamedTuple):
    """What is known of a source beside its offset at a checkpoint."""

    #: The newest offset in the live directory, if there is one.
    newest: bytes | None = None
    #: What the operator's function reads now; empty: unknown, nobody has planned it.
    planned: Sequence[PlannedSource] = ()


class SourceKind(NamedTuple):
    """One kind of source."""

    name: str
    #: By its offset at the checkpoint, as JSON; None: it had read nothing yet.
    is_mine: Callable[[bytes | None, Path], bool]
    #: (offset at the checkpoint, its folder in the live ``sources/``, what is known beside that) → what cannot be read
    #: again. Raises StoreError if a server must be asked and cannot.
    check: Callable[[bytes | None, Path, Today], SourceReport]
    #: (an offset and those of batches planned after it, what is known beside them) → the same, moved to the earliest
    #: that is there. None: there is nothing to move, the source simply goes on without what is gone.
    moved: Callable[[Sequence[bytes], Today], list[bytes]] | None = None
    #: (any later offset) → where reading began, of which Spark itself keeps nothing. Goes with ``moved``.
    beginning: Callable[[bytes], bytes] | None = None
    #: What Spark calls it, before it has any offset; empty: it cannot be known by that.
    format: str = ""


class _ListedFile(msgspec.Struct, frozen=True, rename="camel"):
    """A line in the log of a file source."""

    path: str
    batch_id: int


_LISTED_FILE = msgspec.json.Decoder(_ListedFile)


def recorded_positions(record: OperatorRecord, layout: Layout) -> dict[str, bytes | None]:
    """The offset of every source at the snapshot, as JSON. Raises DamagedRecordError."""
    name = f"offsets/{record.batch}"
    offsets = next((file for file in record.files() if file.path == name), None)
    if offsets is None:
        return {}
    try:
        content = offsets.content if offsets.content is not None else layout.blob(offsets.sha256).read_bytes()
    except OSError as error:
        raise DamagedRecordError(f"the recorded offsets cannot be read: {error}", path=name) from error
    return parse_offsets(content, name, record.batch).positions


def check_sources(
    positions: Mapping[str, bytes | None], live_dir: Path | None, planned: Sequence[PlannedSource] = ()
) -> SourceReport:
    """``positions``: the offset of every source at the checkpoint; those that only the live folder knows are later.

    A source that had read nothing yet at the checkpoint reads again from where it has begun since.
    ``planned``: what the operator reads now, if that is known.
    """
    if live_dir is None:
        return SourceReport(notes=["its sources are not guarded: nothing says where it runs now"])
    problems: list[FileProblem] = []
    notes: list[str] = []
    newest = newest_positions(live_dir)
    names = sorted({*positions, *newest, *_folders(live_dir / "sources")})
    for name in names:
        position, folder = positions.get(name), live_dir / "sources" / name
        if position is None:
            position = _beginning(newest.get(name), folder)
        kind = kind_of(position, folder)
        if kind is None:
            notes.append(f"source {name} is not guarded: whether its input is still there cannot be known from here")
            continue
        report = kind.check(position, folder, Today(newest.get(name), planned))
        problems += report.problems
        notes += [f"source {name} ({kind.name}) {note}" for note in report.notes]
    if not names:
        notes.append("its sources are not guarded: they have noted no offsets")
    return SourceReport(problems, notes)


def kind_of(position: bytes | None, folder: Path) -> SourceKind | None:
    return next((one for one in SOURCE_KINDS if one.is_mine(position, folder)), None)


def why_not_guarded(source: PlannedSource) -> str | None:
    """Of a source that has not read anything yet; None: it is guarded."""
    if source.folder:
        return None if _local_path(source.folder) is not None else "its files lie on another file system"
    if any(one.format == source.format for one in SOURCE_KINDS):
        return None
    return "whether its input is still there cannot be known: keep it for as long as a checkpoint may need it"


def _beginning(newest: bytes | None, folder: Path) -> bytes | None:
    kind = None if newest is None else kind_of(newest, folder)
    return None if kind is None or kind.beginning is None or newest is None else kind.beginning(newest)


def newest_positions(live_dir: Path) -> dict[str, bytes | None]:
    """How far every source was read, as far as that is known."""
    planned, _ = last_batches(live_dir)
    try:
        return load_offsets(str(live_dir), planned).positions
    except (DamagedRecordError, OSError):
        return {}


def _folders(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------- files


def _is_file_source(position: bytes | None, folder: Path) -> bool:
    if position is not None:
        return file_position(position) is not None
    try:
        return bool(_listed_after(folder, -1))
    except (OSError, ValueError, msgspec.MsgspecError):
        return False


def _check_files(position: bytes | None, folder: Path, _: Today) -> SourceReport:
    last = file_position(position)
    if not folder.is_dir():
        return SourceReport(notes=["is not guarded: its live log of files is not there"])
    try:
        listed = _listed_after(folder, -1 if last is None else last)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return SourceReport(notes=[f"is not guarded: its live log of files cannot be read: {error}"])
    problems, elsewhere = [], 0
    for uri in listed:
        path = _local_path(uri)
        if path is None:
            elsewhere += 1
        elif not path.exists():
            text = "this input file is gone, and a restore would read it again: its rows would silently be lost"
            problems.append(FileProblem(str(path), text))
    notes = [f"is not guarded: {elsewhere} files lie on another file system"] if elsewhere else []
    return SourceReport(problems, notes)


def _listed_after(folder: Path, last: int) -> list[str]:
    """The files of the batches after entry ``last`` of a log, each once."""
    for _ in range(_TRIES):
        names = [name for name in os.listdir(folder) if name.removesuffix(_COMPACT).isdigit()]
        later = [name for name in names if int(name.removesuffix(_COMPACT)) > last]
        try:
            lines = [line for name in later for line in (folder / name).read_bytes().split(b"\n")[1:] if line]
        except FileNotFoundError:
            continue
        files = [_LISTED_FILE.decode(line) for line in lines]
        # A compacted entry repeats everything from the beginning.
        return sorted({file.path for file in files if file.batch_id > last})
    raise OSError(f"the log changes faster than it can be read: {folder}")


def _local_path(uri: str) -> Path | None:
    """None: not on this file system."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


# ------------------------------------------------------------------------------------------------- servers


class _AsksServer(Protocol):
    """A module that knows the offsets of one kind of server."""

    KIND: str

    def is_mine(self, position: bytes | None) -> bool: ...

    def check(self, position: bytes | None, latest: bytes | None) -> SourceReport: ...

    def moved(self, positions: Sequence[bytes], latest: bytes | None) -> list[bytes]: ...

    def beginning(self, position: bytes) -> bytes: ...


def _asking(server: _AsksServer, name: str) -> SourceKind:
    """A kind whose offsets say whom to ask."""
    return SourceKind(
        name,
        lambda position, _: server.is_mine(position),
        lambda position, _, today: server.check(position, today.newest),
        lambda positions, today: server.moved(positions, today.newest),
        server.beginning,
        server.KIND,
    )


# ------------------------------------------------------------------------------------------------- generators


def _check_generator(position: bytes | None, _: Path, today: Today) -> SourceReport:
    return generator_guard.check(position, today.newest, _generators(today))


def _move_generator(positions: Sequence[bytes], today: Today) -> list[bytes]:
    return generator_guard.moved(positions, _generators(today))


def _generators(today: Today) -> list[bytes]:
    return [one.settings for one in today.planned if one.format == generator.KIND and one.settings is not None]


#: The first kind that recognises a source looks after it.
SOURCE_KINDS: list[SourceKind] = [
    SourceKind("files", _is_file_source, _check_files),
    _asking(kafka_positions, "Kafka"),
    _asking(nats_positions, "NATS"),
    _asking(postgres, "PostgreSQL"),
    SourceKind(
        "generator",
        lambda position, _: generator.parse_position(position) is not None,
        _check_generator,
        _move_generator,
        generator.beginning,
        generator.KIND,
    ),
]
