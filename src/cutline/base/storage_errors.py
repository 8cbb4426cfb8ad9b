"""What a file system or SQLite refuses, in words: full, read-only, not permitted, a file in the place of a folder."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from cutline.errors import StorageError

#: A write or sync that failed so is repeated from the content in memory. The failed file is never synced again: a file
#: system that finds room only when it syncs may have dropped the content, and the next sync would succeed without it.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}

_FULL = "the file system is full", "make room, then run it again; nothing that was complete is lost"
_READ_ONLY = "the file system is read-only", "make it writable, or choose another folder"
_FORBIDDEN = "this user may not use the file or folder", "change its permissions, or choose another folder"
_NO_FOLDER = "a file is where a folder is needed", "choose another folder, or move the file away"
#: By errno: what happened, what to do.
_BY_NUMBER = {
    **dict.fromkeys(NO_ROOM, _FULL),
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
    errno.EISDIR: ("a folder is where a file is needed", "name a file"),
    errno.ENAMETOOLONG: ("a name is too long for the file system", "use a shorter name"),
    errno.ELOOP: ("a symbolic link leads to itself", "remove the link"),
    errno.ENOENT: ("a file or folder does not exist", "check the path"),
    errno.EMFILE: ("this process has too many open files", "raise its limit (ulimit -n)"),
    errno.ENFILE: ("the system has too many open files", "raise its limit"),
    errno.EIO: ("the disk reports an error", "check the disk (the kernel's log), then run it again"),
    errno.ESTALE: ("the network file system was mounted anew", "run it again"),
}
#: By SQLite's result code, extended or primary; only the rooms that speak SQL import SQLite.
_BY_SQLITE_CODE = {
    5: ("another process holds the database", "wait for it, or end it, then run it again"),
    8: _READ_ONLY,
    10: _BY_NUMBER[errno.EIO],
    13: _FULL,
    4874: _FULL,  # the index of its write-ahead log cannot grow
    14: ("the database cannot be opened", "check that it is a file, and that this user may use it and its folder"),
}


def storage_error(error: BaseException, **where: object) -> StorageError | None:
    """The error in words; None if it does not come from a file system or SQLite."""
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError) and error.errno:
        unnamed = error.strerror or str(error), "check the file system, then run it again"
        what, next_step = _BY_NUMBER.get(error.errno, unnamed)
        path = error.filename if isinstance(error.filename, str | bytes) else None
        return StorageError(what, next_step=next_step, **{**where, "path": path or where.get("path")})
    if _is_sqlite(error):
        unnamed = f"SQLite: {error}", "check the file system, then run it again"
        code = getattr(error, "sqlite_errorcode", 0)  # errors of the Python module itself have none
        what, next_step = _BY_SQLITE_CODE.get(code) or _BY_SQLITE_CODE.get(code & 0xFF, unnamed)
        return StorageError(what, next_step=next_step, **where)
    return None


@contextlib.contextmanager
def in_words(**where: object) -> Iterator[None]:
    """Raise StorageError in place of what a file system or SQLite refuses; every other error passes unchanged."""
    try:
        yield
    except Exception as error:
        found = storage_error(error, **where)
        if found is None:
            raise
        raise found from error


def _is_sqlite(error: BaseException) -> bool:
    """By name, for the same reason."""
    return any((kind.__module__, kind.__name__) == ("sqlite3", "OperationalError") for kind in type(error).__mro__)
