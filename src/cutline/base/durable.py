"""Files that survive a power cut: temp name, fsync, atomic rename or link, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_TEMP_PREFIX = ".tmp-"
#: A parent that answers so cannot be synced, or not by us: it was there before the flow. A disk that fails says EIO.
_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EROFS}


def is_temporary(name: str) -> bool:
    """Whether a file of this name is the leftover of an interrupted write."""
    return name.startswith(_TEMP_PREFIX)


def temporary_beside(target: Path) -> Path:
    """A new name in the same folder for a file that will become ``target``."""
    return target.parent / f"{_TEMP_PREFIX}{target.name}-{secrets.token_hex(4)}"


def fsync_dir(folder: Path) -> None:
    """Make the folder's entries (creations, renames, deletions) durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Make the content of an existing file durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def settle_dir(path: Path, *, depth: int = 0) -> None:
    """``make_dir``, and make the names of folders durable that a process may have made and not synced before it died.

    These are the folder itself, its parents on the same file system as far as they can be synced, and folders in it
    down to a depth.
    """
    make_dir(path)
    device = path.stat().st_dev
    for parent in path.absolute().parents:
        try:
            if parent.stat().st_dev != device:
                break  # the name of a mount point
            fsync_dir(parent)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            break
    _settle_inside(path, depth)


def _settle_inside(folder: Path, depth: int) -> None:
    if depth:
        fsync_dir(folder)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                _settle_inside(folder / entry.name, depth - 1)


def sync_tree(folder: Path) -> None:
    """Make all that is in a folder durable. The folder's own name is durable since ``make_dir``."""
    for parent, _, names in os.walk(folder):
        for name in names:
            fsync_file(Path(parent) / name)
        fsync_dir(Path(parent))


def _write_temp(target: Path, data: bytes, *, sync: bool) -> Path:
    temp = temporary_beside(target)
    handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        if sync:
            os.fsync(handle)
    except BaseException:
        # On a full disk every retry would leave another part of a file, and use up the room that someone makes.
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    finally:
        os.close(handle)
    return temp


def create(path: Path, data: bytes, *, sync: bool = True) -> bool:
    """Create ``path`` with this content if nothing is there yet. True: it was created, durable on return.

    The content appears whole or not at all; of several racing creators exactly one gets True. With ``sync=False`` it
    survives the death of the process but not a power cut, until ``fsync_file`` and ``fsync_dir`` have been called.
    """
    temp = _write_temp(path, data, sync=sync)
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temp)
    if sync:
        fsync_dir(path.parent)
    return True


def replace(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Give ``path`` this content, atomically. With ``sync=False`` it may be lost in a power cut (never torn)."""
    temp = _write_temp(path, data, sync=sync)
    os.replace(temp, path)
    if sync:
        fsync_dir(path.parent)


def make_dir(path: Path) -> None:
    """Create a folder and its parents, durably. If it exists, do nothing."""
    if path.is_dir():
        return
    make_dir(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        fsync_dir(path.parent)


@contextlib.contextmanager
def exclusive(path: Path, *, waits: bool = True) -> Iterator[None]:
    """Hold a lock between processes while a small file is read, compared and replaced; a killed process releases it.

    ``waits``: if not, and another process holds it, BlockingIOError is raised.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
