"""Reads how Spark planned a batch, and makes Spark run the batch that way again.

A plan is what Spark writes before it runs a batch: ``offsets/N``, and for a file source the list of files that are new
in it. If Spark finds a plan, it runs the batch exactly as planned, with the same input and the same batch time. So an
operator that was restored from an older snapshot can repeat the batches since then and reach exactly the same state.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cutline.base import durable
from cutline.base.names import shown
from cutline.base.paths import inside
from cutline.errors import DamagedRecordError
from cutline.model.ids import NO_BATCH, BatchId
from cutline.spark_dir.offsets import damaged, file_position, load_offsets, parse_offsets
from cutline.spark_dir.state_files import walk_files

_COMPACT = ".compact"
#: Of the numbers in file names; Spark's have 64 bits.
_MOST_DIGITS = 19


def plan_of(spark_checkpoint_dir: Path, batch: BatchId) -> dict[str, bytes]:
    """Content by path; of a compacted list of files, only the files that are new in this batch."""
    root = os.fspath(spark_checkpoint_dir)
    name = f"offsets/{batch}"
    positions = load_offsets(root, batch).positions
    plan = {name: (spark_checkpoint_dir / name).read_bytes()}
    before = _positions_before(root, batch)
    for folder, position in positions.items():
        last = file_position(position)
        if last is not None:
            for number in range(_next(before.get(folder)), last + 1):
                path = _existing(spark_checkpoint_dir, folder, number, batch)
                plan[f"sources/{folder}/{path.name}"] = _own_lines(path, number)
        elif batch == 0:
            # The source's recorded start position, which is written only once.
            for path_in, file in walk_files(root, f"sources/{folder}"):
                plan[f"{path_in}/{file}"] = (spark_checkpoint_dir / path_in / file).read_bytes()
    return plan


def put_plan(spark_checkpoint_dir: Path, batch: BatchId, plan: Mapping[str, bytes]) -> None:
    """Make Spark, when it starts, run ``batch`` as planned. The batches before it are committed."""
    root = os.fspath(spark_checkpoint_dir)
    _forget_plans(spark_checkpoint_dir, batch)
    paths = {name: _path_in(spark_checkpoint_dir, name, batch) for name in plan}
    if f"offsets/{batch}" not in plan:
        raise damaged("the stored plan of a batch has no offsets", f"{root}/offsets/{batch}", batch)
    positions = parse_offsets(plan[f"offsets/{batch}"], f"{root}/offsets/{batch}", batch).positions
    before = _positions_before(root, batch)
    for folder, position in positions.items():
        if file_position(position) is not None:
            _cut_file_log(spark_checkpoint_dir / "sources" / folder, _next(before.get(folder)))
    if not (spark_checkpoint_dir / "metadata").exists():
        _write(spark_checkpoint_dir / "metadata", msgspec.json.encode({"id": str(uuid.uuid4())}))
    for name, content in sorted(plan.items(), key=lambda item: _place(item[0])):
        path = paths[name]
        number = path.name.removesuffix(_COMPACT)
        is_compact = path.name.endswith(_COMPACT) and _is_number(number)
        _write(path, _compacted(path.parent, int(number), content) if is_compact else content)


def _path_in(spark_checkpoint_dir: Path, name: str, batch: BatchId) -> Path:
    """Where a file of a plan is written: the batch's offsets, or a file of a source."""
    if name != f"offsets/{batch}" and not name.startswith("sources/"):
        raise damaged("the stored plan of a batch names a file that is no part of a plan", shown(name), batch)
    return inside(spark_checkpoint_dir, name, batch=batch)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS


def commit_plan(spark_checkpoint_dir: Path, batch: BatchId) -> None:
    """Mark a planned batch as done without running it: only for a query without state."""
    before = spark_checkpoint_dir / "commits" / str(batch - 1)
    content = before.read_bytes() if before.exists() else b'v1\n{"nextBatchWatermarkMs":0}'
    _write(spark_checkpoint_dir / "commits" / str(batch), content)


def begin_anew(spark_checkpoint_dir: Path) -> None:
    """Empty the directory: the query begins with its first batch."""
    shutil.rmtree(spark_checkpoint_dir, ignore_errors=True)
    durable.make_dir(spark_checkpoint_dir)


# ------------------------------------------------------------------------------------------------- offsets


def _positions_before(root: str, batch: BatchId) -> Mapping[str, bytes | None]:
    return load_offsets(root, BatchId(batch - 1)).positions if batch - 1 > NO_BATCH else {}


def _forget_plans(spark_checkpoint_dir: Path, first: BatchId) -> None:
    """Removes the plans that Spark itself has made from this batch on."""
    with contextlib.suppress(FileNotFoundError):
        for path in (spark_checkpoint_dir / "offsets").iterdir():
            if _is_number(path.name) and int(path.name) >= first:
                _remove(path)


def _write(path: Path, content: bytes) -> None:
    durable.make_dir(path.parent)
    _remove_checksum(path)
    durable.replace(path, content)


def _remove(path: Path) -> None:
    _remove_checksum(path)
    path.unlink(missing_ok=True)


def _remove_checksum(path: Path) -> None:
    """Call before replacing the file: a checksum that contradicts its file stops Hadoop, a missing one does not."""
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------- lists of files


def _next(position: bytes | None) -> int:
    """The first entry of a file source's log that was not read up to this position."""
    last = file_position(position)
    return 0 if last is None else last + 1


def _place(name: str) -> tuple[str, int]:
    """Sort key: lists of files in their order, because a compacted one contains those before it; then the offsets."""
    folder, _, last = name.rpartition("/")
    number = last.removesuffix(_COMPACT)
    return ("~" if folder == "offsets" else folder, int(number) if _is_number(number) else 0)


def _existing(spark_checkpoint_dir: Path, folder: str, number: int, batch: BatchId) -> Path:
    for name in (str(number), f"{number}{_COMPACT}"):
        path = spark_checkpoint_dir / "sources" / folder / name
        if path.exists():
            return path
    raise damaged("a source's log entry is missing", f"{spark_checkpoint_dir}/sources/{folder}/{number}", batch)


def _own_lines(path: Path, number: int) -> bytes:
    """The lines that are new in this entry; a compacted one repeats all lines before."""
    version, *lines = path.read_bytes().split(b"\n")
    own = [line for line in lines if line and _number_of(line, path) == number]
    return b"\n".join([version, *own])


def _number_of(line: bytes, path: Path) -> int:
    try:
        return int(msgspec.json.decode(line)["batchId"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise DamagedRecordError("a source's log entry cannot be read", path=path) from error


def _compacted(folder: Path, number: int, content: bytes) -> bytes:
    """All lines up to this entry: those of the newest compacted entry, and those since."""
    version, *own = content.split(b"\n")
    return b"\n".join([version, *_lines_before(folder, number), *own])


def _lines_before(folder: Path, number: int) -> list[bytes]:
    lines: list[bytes] = []
    for earlier in range(number - 1, -1, -1):
        compact, plain = folder / f"{earlier}{_COMPACT}", folder / str(earlier)
        path = compact if compact.exists() else plain
        if not path.exists():
            raise DamagedRecordError("a source's log entry is missing", path=path)
        lines[:0] = _non_empty(path.read_bytes().split(b"\n")[1:])
        if path == compact:
            break
    return lines


def _non_empty(lines: Iterable[bytes]) -> list[bytes]:
    return [line for line in lines if line]


def _cut_file_log(folder: Path, first: int) -> None:
    """Removes the files that Spark has found since: the plan assigns them to batches."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            number = path.name.removesuffix(_COMPACT)
            if _is_number(number) and int(number) >= first:
                _remove(path)
