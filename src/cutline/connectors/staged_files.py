"""Staged files: what every sink checks before it changes anything, and how the files are deleted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.base.names import UNTRUSTED, is_relative, shown
from cutline.base.paths import inside
from cutline.errors import SinkError

if TYPE_CHECKING:
    from cutline.model.ids import BatchId
    from cutline.model.staging import Piece, StagedBatch

#: Where a batch stages its files, below the sink's folder for them.
STAGED_FOLDER = "g{generation}-b{batch}"
_STAGED_NAME = re.compile(r"g(\d+)-b(\d+)")


def local_path(path: str | os.PathLike[str], *, sink: str) -> Path:
    """The sink's folder, absolute, because executors have working directories of their own."""
    text = os.fspath(path).removeprefix("file://")
    if "://" in text:
        raise SinkError(
            f"{sink} writes to a mounted file system only, for now",
            next_step="give a path that the driver and all executors share",
            path=text,
        )
    return Path(text).absolute()


def pieces_of(staged: Iterable[StagedBatch]) -> list[Piece]:
    """All pieces, in the order of the batches; each names a file below the sink's folder."""
    pieces = [piece for batch in staged for piece in batch.pieces]
    for piece in pieces:
        path, numbers = piece.get("path"), (piece.get("rows"), piece.get("size_bytes"))
        if not isinstance(path, str) or not is_relative(path):
            raise SinkError("a staged piece lies outside the sink's folder", next_step=UNTRUSTED, path=shown(path))
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise SinkError("a staged piece has no sizes", next_step=UNTRUSTED, path=shown(path))
    return pieces


def digest_of(pieces: Iterable[Piece]) -> str:
    """Identifies what an epoch publishes: distinguishes a repeat from another epoch with the same number."""
    return hashlib.sha256("\n".join(sorted(piece["path"] for piece in pieces)).encode()).hexdigest()


def check_still_there(root: Path, pieces: Iterable[Piece], *, hint: str) -> None:
    """Refuse to publish a file that was deleted or truncated since it was staged."""
    for piece in pieces:
        path = inside(root, piece["path"])
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise SinkError("a staged file is gone", next_step=hint, path=path) from error
        if size_bytes != piece["size_bytes"]:
            raise SinkError(
                f"a staged file has {size_bytes} bytes instead of {piece['size_bytes']}", next_step=hint, path=path
            )


def delete_staged(root: Path, pieces: Iterable[Piece]) -> None:
    """Delete exactly the named files, and the folders that become empty. Idempotent."""
    for piece in pieces:
        path = root / piece["path"]
        path.unlink(missing_ok=True)
        for folder in path.relative_to(root).parents:
            if not folder.parts:
                break
            with contextlib.suppress(OSError):
                (root / folder).rmdir()


def collect_staged(folder: Path, staged: Sequence[StagedBatch], through_batch: BatchId) -> None:
    """Delete staged files up to an epoch's last batch: they are published now, or belong to failed attempts.

    A newer generation may be staging batches with the same numbers; those are not touched.
    """
    if not staged:
        return
    generation = max(batch.generation for batch in staged)
    for name in os.listdir(folder) if folder.is_dir() else ():
        match = _STAGED_NAME.fullmatch(name)
        if match and int(match[1]) <= generation and int(match[2]) <= through_batch:
            shutil.rmtree(folder / name, ignore_errors=True)
