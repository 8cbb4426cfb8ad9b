"""The exact files that let a Spark streaming query start after a given batch, and whether they are sound.

A ``spark_checkpoint_dir`` holds the history of a query. Of it, a fresh directory needs only a few files to start at
batch N+1: the query's id, the offsets and commits of N and N-1 (Spark insists on both), the state of version N+1, and
what the sources had read. This is the adapter to Spark's layout; nothing above it knows a file name of Spark's.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cutline.model.ids import NO_BATCH, BatchId, Subtask
from cutline.ports import FileSet
from cutline.spark_dir.offsets import CommitLog, damaged, file_position, load_offsets
from cutline.spark_dir.state_files import StateClosure, walk_files
from cutline.spark_dir.verify import verify_files

__all__ = ["closure", "last_batches", "verify_files"]

_COMPACT = ".compact"
#: What an entry of a file source's log always says.
_FILE_ENTRY_KEYS = frozenset({"path", "timestamp", "batchId"})


def closure(spark_checkpoint_dir: Path, batch: BatchId) -> FileSet:
    """The exact files from which a fresh directory starts at ``batch`` + 1.

    Only files of that history: never a checksum, a temporary file, or what a later batch or a failed try left.
    A stateless query has the one subtask 0, without files. ``NO_BATCH``: where its sources began, if noted.
    Raises DamagedRecordError (path, batch) if the batch was not committed or a file it needs is not there.
    The tables (SSTs) that a RocksDB snapshot names are listed unseen; ``verify_files`` looks at them.
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
    """Where sources noted that they begin: one that begins at "latest" must not begin at a later "latest" again."""
    try:
        folders = sorted(os.listdir(f"{root}/sources"))
    except FileNotFoundError:
        return []
    noted = []
    for folder in folders:
        name = f"sources/{folder}/0"
        try:
            with open(f"{root}/{name}", "rb") as file:
                is_list_of_files = b'{"path"' in file.read()  # a file source's log: it is made anew
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not is_list_of_files:
            noted.append(name)
    return ["metadata", *noted] if noted and os.path.exists(f"{root}/metadata") else noted


def last_batches(spark_checkpoint_dir: Path) -> tuple[BatchId, BatchId]:
    """(last batch begun, last batch committed): the highest of ``offsets/`` and of ``commits/``; NO_BATCH if none."""
    return _highest(spark_checkpoint_dir / "offsets"), _highest(spark_checkpoint_dir / "commits")


def _highest(folder: Path) -> BatchId:
    try:
        return BatchId(max((int(name) for name in os.listdir(folder) if name.isdigit()), default=NO_BATCH))
    except FileNotFoundError:
        return NO_BATCH


def _query_files(root: str, batch: BatchId) -> list[str]:
    """The query's id and its logs. Spark refuses to start from batch N unless N-1 is there too."""
    batches = [batch] if batch == 0 else [batch - 1, batch]
    files = ["metadata", *(f"{log}/{number}" for log in ("offsets", "commits") for number in batches)]
    for name in files:
        if not os.path.exists(f"{root}/{name}"):
            raise damaged("a record of Spark is missing", f"{root}/{name}", batch)
    return files


# ------------------------------------------------------------------------------------------------- sources


def _source_files(root: str, folder: str, position: bytes | None, batch: BatchId) -> list[str]:
    """The log of one source. Only a file source's log can be cut at a position; any other is taken whole."""
    files = list(walk_files(root, folder))
    last = file_position(position)
    if position is None and _is_file_source(root, folder, files):
        last = -1
    if last is None:
        return [f"{path}/{name}" for path, name in files]
    return _file_log(root, folder, {name for _, name in files}, last, batch)


def _file_log(root: str, folder: str, names: set[str], last: int, batch: BatchId) -> list[str]:
    """The log up to entry ``last``: the newest compacted entry at or below it stands for everything before."""
    files: list[str] = []
    for number in range(last, -1, -1):
        if f"{number}{_COMPACT}" in names:
            return [*files, f"{folder}/{number}{_COMPACT}"]
        if str(number) not in names:
            raise damaged("a source's log entry is missing", f"{root}/{folder}/{number}", batch)
        files.append(f"{folder}/{number}")
    return files


def _is_file_source(root: str, folder: str, files: list[tuple[str, str]]) -> bool:
    """Whether this is the log of a file source. Asked only of a source that has no offset yet to tell by."""
    if not files:
        return True  # nothing to lose either way
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
