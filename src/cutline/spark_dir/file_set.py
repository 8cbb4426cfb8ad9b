"""The exact files from which a Spark streaming query can start after a given batch.

A ``spark_checkpoint_dir`` holds the history of a query. A fresh directory needs only a few of its files to start at
batch N+1: the query's id, the offsets and commits of N and N-1 (Spark requires both), the state of version N+1, and
the sources' logs. This is the adapter to Spark's layout; no layer above it knows Spark's file names.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cutline.model.ids import NO_BATCH, BatchId, Subtask
from cutline.ports.query_dir import FileSet
from cutline.spark_dir.offsets import CommitLog, damaged, file_position, load_offsets
from cutline.spark_dir.recorded_sources import NAME as RECORDED_SOURCES
from cutline.spark_dir.state_files import StateClosure, walk_files
from cutline.spark_dir.verify import verify_files

__all__ = ["closure", "last_batches", "verify_files"]

_COMPACT = ".compact"
#: The keys that every entry of a file source's log has.
_FILE_ENTRY_KEYS = frozenset({"path", "timestamp", "batchId"})


def closure(spark_checkpoint_dir: Path, batch: BatchId) -> FileSet:
    """The exact files from which a fresh directory starts at ``batch`` + 1.

    Only files of that history: no checksums, no temporary files, no leftovers of later batches or failed attempts.
    A stateless query has the one subtask 0, without files. ``NO_BATCH``: where its sources began, if recorded.
    Raises DamagedRecordError (path, batch) if the batch was not committed or a file it needs is missing.
    The tables (SSTs) that a RocksDB snapshot names are listed unchecked; ``verify_files`` checks them.
    """
    root = os.fspath(spark_checkpoint_dir)
    if batch == NO_BATCH:
        return FileSet(batch=batch, subtasks={}, shared=_beginnings(root))
    commits = CommitLog(root)
    commit = commits.load(batch)
    offsets = load_offsets(root, batch)
    shared = _query_files(root, batch)
    for folder, position in offsets.positions.items():
        shared += _source_files(root, f"sources/{folder}", position, batch)
    state = StateClosure(root, batch, commits, offsets)
    state.collect()
    return FileSet(
        batch=batch,
        subtasks={Subtask(number): files for number, files in sorted(state.subtasks.items())} or {Subtask(0): []},
        shared=shared + state.shared,
        watermark_ms=commit.next_batch_watermark_ms,
    )


def _beginnings(root: str) -> list[str]:
    """The recorded start positions of sources: a source that began at "latest" must not begin at a later "latest"."""
    try:
        folders = sorted(os.listdir(f"{root}/sources"))
    except FileNotFoundError:
        return []
    noted = []
    for folder in folders:
        name = f"sources/{folder}/0"
        try:
            with open(f"{root}/{name}", "rb") as file:
                is_list_of_files = b'{"path"' in file.read()  # a file source's log: Spark creates it anew
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not is_list_of_files:
            noted.append(name)
    files = [*noted, *_recorded(root)] if noted else []
    return ["metadata", *files] if files and os.path.exists(f"{root}/metadata") else files


def _recorded(root: str) -> list[str]:
    return [RECORDED_SOURCES] if os.path.exists(f"{root}/{RECORDED_SOURCES}") else []


def last_batches(spark_checkpoint_dir: Path) -> tuple[BatchId, BatchId]:
    """(last batch begun, last batch committed): the highest in ``offsets/`` and in ``commits/``; NO_BATCH if none."""
    return _highest(spark_checkpoint_dir / "offsets"), _highest(spark_checkpoint_dir / "commits")


def _highest(folder: Path) -> BatchId:
    try:
        return BatchId(max((int(name) for name in os.listdir(folder) if name.isdigit()), default=NO_BATCH))
    except FileNotFoundError:
        return NO_BATCH


def _query_files(root: str, batch: BatchId) -> list[str]:
    """The query's id and its logs. Spark refuses to start from batch N unless N-1 exists too."""
    batches = [batch] if batch == 0 else [batch - 1, batch]
    files = ["metadata", *(f"{log}/{number}" for log in ("offsets", "commits") for number in batches)]
    for name in files:
        if not os.path.exists(f"{root}/{name}"):
            raise damaged("a record of Spark is missing", f"{root}/{name}", batch)
    return [*files, *_recorded(root)]


# ------------------------------------------------------------------------------------------------- sources


def _source_files(root: str, folder: str, position: bytes | None, batch: BatchId) -> list[str]:
    """The log of one source. Only a file source's log can be cut at a position; any other is copied whole."""
    files = list(walk_files(root, folder))
    last = file_position(position)
    if position is None and _is_file_source(root, folder, files):
        last = -1
    if last is None:
        return [f"{path}/{name}" for path, name in files]
    return _file_log(root, folder, {name for _, name in files}, last, batch)


def _file_log(root: str, folder: str, names: set[str], last: int, batch: BatchId) -> list[str]:
    """The log up to entry ``last``: the newest compacted entry at or below it replaces all entries before."""
    files: list[str] = []
    for number in range(last, -1, -1):
        if f"{number}{_COMPACT}" in names:
            return [*files, f"{folder}/{number}{_COMPACT}"]
        if str(number) not in names:
            raise damaged("a source's log entry is missing", f"{root}/{folder}/{number}", batch)
        files.append(f"{folder}/{number}")
    return files


def _is_file_source(root: str, folder: str, files: list[tuple[str, str]]) -> bool:
    """Whether this is the log of a file source. Called only for a source without an offset."""
    if not files:
        return True  # an empty log: both treatments are safe
    names = [name for path, name in files if path == folder and name.removesuffix(_COMPACT).isdigit()]
    if len(names) < len(files):
        return False
    with open(f"{root}/{folder}/{names[0]}", "rb") as file:
        lines = file.read().split(b"\n", 2)
    try:
        entry = msgspec.json.decode(lines[1]) if len(lines) > 1 else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return isinstance(entry, dict) and entry.keys() >= _FILE_ENTRY_KEYS
