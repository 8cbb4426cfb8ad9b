"""Files that are written piece by piece under a temporary name and renamed when they are whole and synced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cutline.base.durable import fsync_dir, temporary_beside

_PIECE_BYTES = 1 << 20


@contextlib.contextmanager
def staged(target: Path, pieces: Iterable[bytes]) -> Iterator[Path]:
    """A synced temporary file beside ``target`` with this content; deleted at the end unless it was renamed."""
    temp = temporary_beside(target)
    try:
        with open(temp, "xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        yield temp
    finally:
        temp.unlink(missing_ok=True)


def put_in_place(target: Path, pieces: Iterable[bytes]) -> None:
    """Give ``target`` this content, whole and synced."""
    with staged(target, pieces) as temp:
        os.replace(temp, target)
    fsync_dir(target.parent)


def pieces_of(source: Path) -> Iterator[bytes]:
    """A file's content."""
    with open(source, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
