"""The numbered entry files of a channel's log."""

from __future__ import annotations

from pathlib import Path

from cutline.base import records
from cutline.model.entries import Entry
from cutline.model.ids import Generation, Position

KIND = "entry"
#: How every entry ends, and what only a batch contains.
_END, _BATCH = b"}}", b'"type":"data"'


def entry_name(seq: Position) -> str:
    return f"{seq:012d}.json"


def entry_path(channel_dir: Path, generation: Generation, seq: Position) -> Path:
    return generation_dir(channel_dir, generation) / entry_name(seq)


def generation_dir(channel_dir: Path, generation: Generation) -> Path:
    return channel_dir / f"g{generation:06d}"


def data_dir(channel_dir: Path) -> Path:
    return channel_dir / "data"


def encode(entry: Entry) -> bytes:
    return records.encode(KIND, entry)


def decode(data: bytes, path: object) -> Entry:
    """``path`` is for the error."""
    return records.decode(KIND, data, Entry, path=path)  # type: ignore[arg-type]  # as below


def load(path: Path) -> Entry:
    return records.load(KIND, path, Entry)  # type: ignore[arg-type]  # msgspec takes unions, its stubs do not say so


def check_place(entry: Entry, path: object) -> Entry:
    """The entry itself. Raises DamagedRecordError if it stands at the place of another, and would be read as that."""
    place = f"g{entry.generation:06d}/{entry_name(entry.seq)}"
    records.check_identity(KIND, place, "/".join(str(path).split("/")[-2:]), path=path)
    return entry


def may_be_torn_barrier(path: Path) -> bool:
    """Whether an unreadable file may be a barrier that a power cut has torn: it lacks its end, or holds zeros.

    A batch never looks like that: its content is synced before it has its name. An entry with another content in place
    of its own is damaged, not torn.
    """
    data = path.read_bytes()
    return (not data.endswith(_END) or b"\0" in data) and _BATCH not in data
