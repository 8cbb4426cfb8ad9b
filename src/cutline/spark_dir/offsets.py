"""Spark's own small records inside a ``spark_checkpoint_dir``: the content of ``commits/N`` and ``offsets/N``.

Each is a text file: a line ``v<number>``, then JSON lines. Unknown fields are ignored, as in Spark itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cutline.base.names import are_relative, is_name
from cutline.errors import DamagedRecordError
from cutline.model.ids import BatchId

#: In an offsets file: a source that has read nothing yet.
_NO_OFFSET = b"-"


class Commit(msgspec.Struct, frozen=True, rename="camel"):
    """The content of ``commits/N``."""

    next_batch_watermark_ms: int = 0
    #: State format 2 only: per stateful operator, per partition, the unique id of each of its stores.
    state_unique_ids: dict[str, list[list[str]]] | None = None


class Offsets(msgspec.Struct, frozen=True):
    """The content of ``offsets/N``."""

    #: The settings that Spark fixed for this query.
    conf: dict[str, str]
    #: Per folder in ``sources/``: the source's position as JSON; None if it has read nothing yet.
    positions: dict[str, bytes | None]


class _OffsetsHead(msgspec.Struct, frozen=True):
    conf: dict[str, Any] = {}


class _FilePosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The offset of a file source: how far its log of files was read. No other source's offset has this form."""

    logOffset: int  # noqa: N815 (Spark's name)


_FILE_POSITION = msgspec.json.Decoder(_FilePosition)
_COMMIT = msgspec.json.Decoder(Commit)
_OFFSETS_HEAD = msgspec.json.Decoder(_OffsetsHead)


def damaged(what: str, path: str, batch: BatchId) -> DamagedRecordError:
    """The error of these readers: what is wrong, with which file, for which batch."""
    return DamagedRecordError(what, path=path, batch=batch, next_step="use another batch, or restore a checkpoint")


class CommitLog:
    """Reads ``commits/``, each file at most once. One instance serves one closure."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._read: dict[int, Commit | None] = {}

    def find(self, batch: int) -> Commit | None:
        """The commit of this batch; None if there is no such file (not written, or purged by Spark)."""
        if batch not in self._read:
            self._read[batch] = self._load(batch)
        return self._read[batch]

    def load(self, batch: BatchId) -> Commit:
        """The commit of this batch; it must be there."""
        commit = self.find(batch)
        if commit is None:
            raise damaged("Spark has no commit of this batch", f"{self._root}/commits/{batch}", batch)
        return commit

    def _load(self, batch: int) -> Commit | None:
        path = f"{self._root}/commits/{batch}"
        try:
            with open(path, "rb", buffering=0) as file:
                _, _, body = file.read().partition(b"\n")
            commit = _COMMIT.decode(body)
            _check_ids(commit.state_unique_ids or {})
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise damaged("a commit of Spark cannot be read", path, BatchId(batch)) from error
        return commit


def _check_ids(unique_ids: Mapping[str, list[list[str]]]) -> None:
    """Operators and ids are parts of file names. Raises ValueError."""
    names = [*unique_ids, *(one for partitions in unique_ids.values() for ids in partitions for one in ids)]
    if not are_relative(names) or "/" in "".join(names):
        raise ValueError("an id is no part of a file name")


def load_offsets(root: str, batch: BatchId) -> Offsets:
    """The content of ``offsets/<batch>``."""
    path = f"{root}/offsets/{batch}"
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise damaged("Spark has no offsets of this batch", path, batch) from error
    return parse_offsets(content, path, batch)


def parse_offsets(content: bytes, path: str, batch: BatchId) -> Offsets:
    """``path`` and ``batch`` are used in errors."""
    try:
        version, head, *lines = content.split(b"\n")
        conf = {key: str(value) for key, value in _OFFSETS_HEAD.decode(head).conf.items()}
        positions: dict[str, bytes | None] = {}
        for index, line in enumerate(line for line in lines if line):
            # Version 1 lists the sources in their order; version 2 names the folder: ``0:{"logOffset":3}``.
            name, position = (str(index).encode(), line) if version == b"v1" else line.split(b":", 1)
            if not is_name(folder := name.decode()):
                raise ValueError("the name of a source is no name of a folder")
            positions[folder] = None if position == _NO_OFFSET else position
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise damaged("the offsets of a batch cannot be read", path, batch) from error
    return Offsets(conf=conf, positions=positions)


def format_offsets(version: bytes, head: bytes, positions: Mapping[str, bytes | None]) -> bytes:
    """The inverse of ``parse_offsets``: the first two lines unchanged, then one line per source."""
    lines = [_NO_OFFSET if position is None else position for position in positions.values()]
    if version != b"v1":
        lines = [b"%b:%b" % (name.encode(), line) for name, line in zip(positions, lines, strict=True)]
    return b"\n".join([version, head, *lines])


def file_position(position: bytes | None) -> int | None:
    """How far a file source has read its log of files; None for any other source, or before the first read."""
    try:
        return None if position is None else _FILE_POSITION.decode(position).logOffset
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
