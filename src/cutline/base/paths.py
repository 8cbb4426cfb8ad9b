"""Paths that records and listings name: they stay below their folder, also past symbolic links, and are plain files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cutline.base.names import UNTRUSTED, is_relative, shown
from cutline.errors import DamagedRecordError


def inside(root: Path, relative: str, **where: object) -> Path:
    """``root / relative``. Raises DamagedRecordError if that leaves ``root``, be it through a symbolic link."""
    if not is_relative(relative):
        raise DamagedRecordError(
            "a path leads out of its folder", next_step=UNTRUSTED, path=shown(relative), folder=root, **where
        )
    if (link := link_on(root, relative)) is not None:
        raise DamagedRecordError(
            "a path leads through a symbolic link", next_step=UNTRUSTED, path=shown(relative), link=link, **where
        )
    return root / relative


def link_on(root: Path, relative: str) -> str | None:
    """The first symbolic link on the way from ``root`` to the path, the path itself included; None if there is none."""
    at = os.fspath(root)
    for name in relative.split("/"):
        at = f"{at}/{name}"
        try:
            if stat.S_ISLNK(os.lstat(at).st_mode):
                return at
        except (FileNotFoundError, NotADirectoryError):
            break  # nothing below it exists either
    return None


class NotPlainError(OSError):
    """The path is a symbolic link, a pipe or a device: nothing that a program of ours wrote."""


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it. Raises NotPlainError or another OSError, without waiting, for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        # A link, or a socket.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise NotPlainError(errno.EINVAL, "it is not a plain file", os.fspath(path)) from None
        raise
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise NotPlainError(errno.EINVAL, "it is not a plain file", os.fspath(path))
        with os.fdopen(handle, "rb", buffering=0, closefd=False) as file:
            yield file
    finally:
        os.close(handle)


class TooLargeError(OSError):
    """The file is larger than the caller is ready to hold in memory."""


def read_plain(path: Path, limit_bytes: int | None = None) -> bytes:
    """The content of a regular file. Raises NotPlainError, TooLargeError or OSError."""
    with open_plain(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if limit_bytes is not None and size_bytes > limit_bytes:
            raise TooLargeError(errno.EFBIG, f"it has {size_bytes} bytes, the limit is {limit_bytes}", os.fspath(path))
        return file.read()
