"""Verifies that the files of a closure exist, are not empty, and match the checksums written beside them.

Three checks, each used where its data exists: Hadoop's ``.<name>.crc`` (a CRC32 per 512 bytes, beside every file that
Hadoop's local file system wrote), Spark's own ``<name>.crc`` (the size; format 2 only), and for RocksDB the sizes of
its tables that the snapshot records.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cutline.spark_dir.hadoop_crc import compare
from cutline.spark_dir.state_files import UNREADABLE_SNAPSHOT, snapshot_parts

#: Files up to this size are always compared with their checksums byte by byte.
SMALL_BYTES = 4 * 1024 * 1024


class _SparkChecksum(msgspec.Struct, frozen=True, rename="camel"):
    main_file_size: int


_SPARK_CHECKSUM = msgspec.json.Decoder(_SparkChecksum)


def verify_files(spark_checkpoint_dir: Path, files: Iterable[str], *, full: bool) -> list[str]:
    """What is wrong with these files (paths relative to the directory), one line each; empty if nothing is wrong.

    Without ``full``, only the size of a file larger than SMALL_BYTES is compared with its checksums.
    """
    root = os.fspath(spark_checkpoint_dir)
    names = list(files)
    problems: list[str] = []
    sizes: dict[str, int] = {}
    #: Sizes of tables according to their snapshots.
    promised: dict[str, int] = {}
    for name in names:
        try:
            status = os.stat(f"{root}/{name}")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{name} is not a file")
        elif status.st_size == 0 and _is_never_empty(name):
            problems.append(f"{name} is empty")
        else:
            sizes[name] = status.st_size
            problems += _check_content(root, name, status.st_size, full=full, promised=promised)
    for name, size in promised.items():
        if name in sizes and sizes[name] != size:
            problems.append(f"{name} has {sizes[name]} bytes, but {size} according to its snapshot")
    return problems


def _check_content(root: str, name: str, size: int, *, full: bool, promised: dict[str, int]) -> list[str]:
    path = f"{root}/{name}"
    problems: list[str] = []
    try:
        problems += [f"{name} {problem}" for problem in compare(path, size, content=full or size <= SMALL_BYTES)]
        recorded = _spark_size(path)
        if recorded is not None and recorded != size:
            problems.append(f"{name} has {size} bytes, but Spark wrote {recorded}")
        if name.endswith(".zip"):
            folder = name.rpartition("/")[0]
            promised.update({f"{folder}/{part}": length for part, length in snapshot_parts(path).items()})
            if full:
                problems += _check_entries(path, name)
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}")
    except UNREADABLE_SNAPSHOT:
        problems.append(f"{name} is not a RocksDB snapshot, or is damaged")
    return problems


def _check_entries(path: str, name: str) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    return [] if bad is None else [f"{name} has a damaged entry {bad}"]


def _spark_size(path: str) -> int | None:
    """The size in Spark's own checksum file; None if there is no such file or it cannot be read."""
    try:
        with open(f"{path}.crc", "rb", buffering=0) as file:
            return _SPARK_CHECKSUM.decode(file.read()).main_file_size
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _is_never_empty(name: str) -> bool:
    """Whether Spark always writes content into this file: a version line, a header, an end mark."""
    top, _, rest = name.partition("/")
    if top == "sources":
        # Spark's own sources keep numbered logs; other sources may keep anything.
        return rest.rpartition("/")[2].removesuffix(".compact").isdigit()
    return "/logs/" not in name
