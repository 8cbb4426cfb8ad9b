"""Whether the files that Spark's file source has read still exist, according to the source's log."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from cutline.ports.inspection import FileProblem, SourceReport
from cutline.ports.source_guard import SourceKind, Today
from cutline.spark_dir.offsets import file_position

_COMPACT = ".compact"
#: Spark compacts and purges a log while it is read; then the log is listed again.
_LISTINGS = 5


class _ListedFile(msgspec.Struct, frozen=True, rename="camel"):
    """A line in the log of a file source."""

    path: str
    batch_id: int


_LISTED_FILE = msgspec.json.Decoder(_ListedFile)


def is_file_source(position: bytes | None, folder: Path) -> bool:
    if position is not None:
        return file_position(position) is not None
    try:
        return bool(_listed_after(folder, -1))
    except (OSError, ValueError, msgspec.MsgspecError):
        return False


def check(position: bytes | None, folder: Path, _: Today) -> SourceReport:
    last = file_position(position)
    if not folder.is_dir():
        return SourceReport(
            notes=["is not guarded here: Spark's list of the files that it has read does not exist, as in every copy"]
        )
    try:
        listed = _listed_after(folder, -1 if last is None else last)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return SourceReport(notes=[f"is not guarded: its live log of files cannot be read: {error}"])
    problems, elsewhere = [], 0
    for uri in listed:
        path = local_path(uri)
        if path is None:
            elsewhere += 1
        elif not path.exists():
            text = "this input file is gone, and a restore needs it again: its rows would be lost silently"
            problems.append(FileProblem(str(path), text))
    notes = [f"is not guarded: {elsewhere} files are on another file system"] if elsewhere else []
    return SourceReport(problems, notes)


def local_path(uri: str) -> Path | None:
    """None: not on this file system."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _listed_after(folder: Path, last: int) -> list[str]:
    """The files of the batches after entry ``last`` of a log, each once."""
    for _ in range(_LISTINGS):
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


FILES = SourceKind("files", is_file_source, check)
