"""A folder as an object store: a file per object, durable when the call returns. Symbolic links are no objects.

Not obstore's LocalStore: it renames a file into place without syncing it first, so a power cut could leave an empty
object, and every later create of it would report that the object exists.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cutline.base.backoff import Backoff
from cutline.base.durable import fsync_dir, is_temporary, make_dir
from cutline.base.paths import link_on, open_plain, read_plain
from cutline.base.retry import Retry
from cutline.errors import MissingObject, NotDone, OutcomeUnknown, Refused
from cutline.objects.names import checked, checked_folder
from cutline.objects.staging import pieces_of, put_in_place, staged
from cutline.ports.objects import ObjectInfo

#: A write is retried when a delete has just removed the folder it was about to use.
_WRITES = Retry(limit=20, backoff=Backoff(first_s=0.001, limit_s=0.05, jitter=0.5))
#: A file system that fails otherwise may be back later: a network disk, for example.
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}


class FolderStore:
    """Objects as files below one folder."""

    def __init__(self, folder: Path, *, creates: bool = True) -> None:
        """``creates``: a missing folder is created now; otherwise a write creates it, and a read leaves no trace."""
        self._root = Path(os.path.abspath(folder))
        if not creates:
            return
        try:
            make_dir(self._root)
        except OSError as error:
            raise _kind(error)(
                "the folder cannot be created", next_step="choose another folder", path=self._root, why=error.strerror
            ) from error

    def __repr__(self) -> str:
        return f"FolderStore({self.url})"

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def read(self, path: str, limit_bytes: int | None = None) -> bytes:
        with self._reading(path):
            return read_plain(self._file(path), limit_bytes)

    def create(self, path: str, data: bytes) -> bool:
        return self._write(path, lambda: [data], _link)

    def replace(self, path: str, data: bytes) -> None:
        self._write(path, lambda: [data], _rename)

    def upload(self, path: str, source: Path) -> None:
        if not source.is_file():
            raise NotDone("there is no file to upload", store=self.url, path=path, source=source)
        self._write(path, lambda: pieces_of(source), _rename)

    def download(self, path: str, target: Path) -> None:
        with self._reading(path):
            source = self._file(path)
            # Opened first, to distinguish a missing object from a missing target folder.
            with open_plain(source):
                pass
        try:
            put_in_place(target, pieces_of(source))
        except OSError as error:
            raise _kind(error)(
                "the file cannot be written", store=self.url, target=target, why=error.strerror
            ) from error

    def find(self, path: str) -> ObjectInfo | None:
        file = self._file(path)
        try:
            status = file.lstat()
            return _info(path, status) if stat.S_ISREG(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _kind(error)("the object cannot be read", store=self.url, path=path, why=error.strerror) from error

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = self._root / checked_folder(prefix)
        for file in self._files(folder):
            if not is_temporary(file.name):
                with contextlib.suppress(FileNotFoundError):
                    yield _info(os.path.relpath(file.path, self._root), file.stat(follow_symlinks=False))

    def delete(self, paths: Iterable[str]) -> None:
        removed = 0
        for path in paths:
            file = self._file(path)
            try:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    file.unlink()
                    removed += 1
                    self._remove_empty(file.parent)
            except OSError as error:
                if file.is_dir():
                    continue  # a folder is not an object: there is nothing to delete
                kind = OutcomeUnknown if removed else _kind(error)
                raise kind("the object cannot be removed", store=self.url, path=path, why=error.strerror) from error

    def leftovers(self, older_than_ms: int) -> list[ObjectInfo]:
        oldest = time.time() - older_than_ms / 1_000
        found = []
        for file in self._files(self._root):
            with contextlib.suppress(FileNotFoundError):
                if is_temporary(file.name) and (status := file.stat(follow_symlinks=False)).st_mtime <= oldest:
                    found.append(_info(os.path.relpath(file.path, self._root), status))
        return found

    def collect_leftovers(self, older_than_ms: int) -> int:
        """Delete temporary files of writers that died."""
        dropped = 0
        for info in self.leftovers(older_than_ms):
            with contextlib.suppress(FileNotFoundError):
                (self._root / info.path).unlink()
                dropped += 1
        return dropped

    def _file(self, path: str) -> Path:
        """The file of an object. Objects are plain files in plain folders: a link would lead out of the store."""
        try:
            is_linked = link_on(self._root, checked(path)) is not None
        except OSError as error:
            raise _kind(error)("the path cannot be followed", store=self.url, path=path, why=error.strerror) from error
        if is_linked:
            raise Refused("the path of an object leads through a symbolic link", store=self.url, path=path)
        return self._root / path

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as missing:
            raise MissingObject("there is no such object", store=self.url, path=path) from missing
        except OSError as error:
            raise _kind(error)("the object cannot be read", store=self.url, path=path, why=error.strerror) from error

    def _files(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        """Every plain file below a folder; files that are deleted meanwhile may be missing."""
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _kind(error)(
                "the folder cannot be listed", store=self.url, path=folder, why=error.strerror
            ) from error
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield entry

    def _write(self, path: str, content: Callable[[], Iterable[bytes]], settle: Callable[[Path, Path], bool]) -> bool:
        file = self._file(path)
        try:
            changed = self._settle(file, content, settle)
        except OSError as error:
            raise _kind(error)("the object cannot be written", store=self.url, path=path, why=error.strerror) from error
        try:
            self._sync_up_from(file.parent)
        except OSError as error:
            raise OutcomeUnknown(
                "the object is written, but perhaps not durable", store=self.url, path=path, why=error.strerror
            ) from error
        return changed

    def _settle(self, file: Path, content: Callable[[], Iterable[bytes]], settle: Callable[[Path, Path], bool]) -> bool:
        def attempt() -> bool:
            make_dir(file.parent)
            with staged(file, content()) as temp:
                return settle(temp, file)

        return _WRITES.call(attempt, on=FileNotFoundError)

    def _sync_up_from(self, folder: Path) -> None:
        # Up to the root: another writer may have just created these folders without having synced them yet. A create
        # that finds an existing object syncs for the same reason: the caller may rely on that object.
        while True:
            with contextlib.suppress(FileNotFoundError):  # a delete has removed the empty folder since
                fsync_dir(folder)
            if folder == self._root:
                return
            folder = folder.parent

    def _remove_empty(self, folder: Path) -> None:
        """Remove empty folders, so that objects can use their names."""
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                return  # in use, or already removed
            folder = folder.parent


def _kind(error: OSError) -> type[NotDone]:
    return Refused if error.errno in _REFUSALS else NotDone


def _link(temp: Path, target: Path) -> bool:
    try:
        os.link(temp, target)
    except FileExistsError:
        if target.is_dir():
            raise
        # On a network disk the reply to a successful link can be lost, and the repeated link then fails on its own
        # target. Two names of our temporary file mean that one of them is the target.
        return temp.stat().st_nlink == 2
    return True


def _rename(temp: Path, target: Path) -> bool:
    os.replace(temp, target)
    return True


def _info(path: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)
