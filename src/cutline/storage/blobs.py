"""Content-addressed files: each content is stored once, named by its hash, and never changed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from cutline.base import durable
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import SnapshotFile
from cutline.model.layout import Layout
from cutline.protocol.history.retention import unreachable

_BLOCK_BYTES = 1 << 20
#: Identity of a file's content as far as the file system can tell: device, inode, size, time of last change.
_Identity = tuple[int, int, int, int]


def sha256_of(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class BlobStore:
    """The blobs of one flow."""

    def __init__(self, layout: Layout, *, is_reader: bool = False) -> None:
        """``is_reader``: only reads another process's blobs; creates and removes nothing."""
        self._layout = layout
        #: Hashes of files read before, so that a file shared by many epochs is read once; and the files of each hash.
        self._known: dict[_Identity, str] = {}
        self._files: dict[str, set[_Identity]] = {}
        #: Reference counts of content that pending epochs use; epochs share content. It is never collected.
        self._references: dict[str, int] = {}
        #: References dropped while a collection runs; None: no collection runs.
        self._drop_later: list[str] | None = None
        #: Content that may have become unreachable since the last collection; None: all that is stored may have.
        self._suspects: set[str] | None = None
        #: Stored by this process and known to survive a power cut.
        self._synced: set[str] = set()
        #: Content whose sync has failed: the disk may have dropped it, from the blob and from the file it links to.
        self._doubtful: set[str] = set()
        self._lock = threading.Lock()
        if not is_reader:
            self._prepare_folders()

    def _prepare_folders(self) -> None:
        durable.make_dir(self._layout.blobs)
        for number in range(256):
            folder = self._layout.blob(f"{number:02x}").parent
            folder.mkdir(exist_ok=True)
            for leftover in folder.glob(".tmp-*"):
                leftover.unlink(missing_ok=True)
        durable.fsync_dir(self._layout.blobs)

    def store(self, held: Path, path: str) -> tuple[SnapshotFile, int]:
        """Store the content of ``held`` and reference it until ``drop_references``; also returns the new bytes."""
        stat = held.stat()
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        with self._lock:
            digest = self._known.get(identity)
        if digest is None:
            digest = sha256_of(held)
        # Referenced before it is linked: from here on no collection deletes it, so the slow part needs no lock.
        with self._lock:
            self._known[identity] = digest
            self._files.setdefault(digest, set()).add(identity)
        self.add_references([digest])
        new = self._link(held, digest)
        return SnapshotFile(path=path, sha256=digest, size_bytes=stat.st_size), stat.st_size if new else 0

    def _link(self, held: Path, digest: str) -> bool:
        target = self._layout.blob(digest)
        if digest in self._doubtful:
            return self._write_again(held, target, digest)
        with contextlib.suppress(FileNotFoundError):
            # The same content in another file can repair a blob that the disk has damaged.
            if target.samefile(held) or (target.stat().st_size == held.stat().st_size and sha256_of(target) == digest):
                self._sync(target, digest)
                return False
            target.unlink()
        try:
            os.link(held, target)
        except FileExistsError:  # another operator has just stored the same content
            self._sync(target, digest)
            return False
        except OSError:  # another file system, or one without hard links
            temp = target.with_name(f".tmp-{digest}-{secrets.token_hex(4)}")
            shutil.copyfile(held, temp)
            os.replace(temp, target)
        self._sync(target, digest)
        return True

    def _sync(self, target: Path, digest: str) -> None:
        """Spark does not sync its files, but those of a checkpoint must survive a power cut."""
        with self._lock:
            if digest in self._synced:
                return
        try:
            durable.fsync_file(target)
            durable.fsync_dir(target.parent)
        except OSError:
            with self._lock:
                self._doubtful.add(digest)
            raise
        with self._lock:
            self._synced.add(digest)

    def _write_again(self, held: Path, target: Path, digest: str) -> bool:
        """Another sync of the same file could succeed without its content. The blob there stays until this is whole."""
        is_new, content = not target.exists(), held.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise OSError(errno.EIO, "content was lost when the disk could not sync it", str(held))
        durable.replace(target, content)
        with self._lock:
            self._synced.add(digest)
            self._doubtful.discard(digest)
        return is_new

    def add_references(self, digests: Iterable[str]) -> None:
        """Keep this content until ``drop_references``."""
        with self._lock:
            for digest in digests:
                self._references[digest] = self._references.get(digest, 0) + 1

    def drop_references(self, digests: Iterable[str]) -> None:
        """A manifest now names this content, or its epoch was aborted. A running collection keeps it until its end."""
        with self._lock:
            if self._drop_later is not None:
                self._drop_later.extend(digests)
                return
            for digest in digests:
                left = self._references.get(digest, 0) - 1
                if left > 0:
                    self._references[digest] = left
                else:
                    self._references.pop(digest, None)
                    self._suspect([digest])

    def _suspect(self, digests: Iterable[str]) -> None:
        if self._suspects is not None:
            self._suspects.update(digests)

    def damage(self, file: SnapshotFile, *, deep: bool = True) -> str | None:
        """What is wrong with a stored file; None if it is unchanged. Not ``deep``: checks only the size of a blob."""
        if file.content is not None:
            is_whole = hashlib.sha256(file.content).hexdigest() == file.sha256
            return None if is_whole else f"{file.path}: its content in the record does not match its hash"
        blob = self._layout.blob(file.sha256)
        try:
            size = blob.stat().st_size
        except FileNotFoundError:
            return f"{file.path}: blob {file.sha256[:12]} is missing"
        if size != file.size_bytes:
            return f"{file.path}: blob {file.sha256[:12]} has {size} bytes instead of {file.size_bytes}"
        if deep and sha256_of(blob) != file.sha256:
            return f"{file.path}: blob {file.sha256[:12]} does not match its hash"
        return None

    def place(self, file: SnapshotFile, target: Path) -> None:
        """Put a stored file where Spark will read it. Links are safe: Spark replaces files, never writes into one.

        Never writes into an existing file either: that may be a link to a blob.
        """
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.content is not None:
                with open(target, "xb") as made:
                    made.write(file.content)
                return
            self._put(self._layout.blob(file.sha256), target)
        except (FileExistsError, NotADirectoryError) as error:
            raise DamagedRecordError("two files of a snapshot have the same path", path=target) from error

    def _put(self, blob: Path, target: Path) -> None:
        try:
            os.link(blob, target)
        except FileNotFoundError as error:
            raise DamagedRecordError("a blob is missing", path=blob) from error
        except (FileExistsError, NotADirectoryError):
            raise
        except OSError:
            with open(blob, "rb") as source, open(target, "xb") as made:
                shutil.copyfileobj(source, made, _BLOCK_BYTES)

    def collect(
        self,
        reached: Callable[[], tuple[Container[str], Iterable[str]]],
        check_fence: Callable[[], None] = lambda: None,
        may_go: Callable[[Path], bool] = lambda _: True,
        *,
        is_whole: bool = False,
    ) -> int:
        """Delete content that no manifest reaches and no pending epoch references; returns how many files were deleted.

        ``reached``: what the manifests reach now, and what they have ceased to reach. Only this and content that has
        lost its references is looked at: the store may hold the content of hundreds of epochs. The first collection of
        a process, and one that ``is_whole``, looks at all that is stored.
        Content referenced at any time during the collection survives it: the manifest that names it may be stored just
        after ``reached`` has listed the manifests. ``may_go`` is called last, and may still keep a file.
        """
        with self._lock:
            self._drop_later = []
        try:
            content, lost = reached()
            with self._lock:
                self._suspect(lost)
                suspects = self._suspects
            looked_at = self._stored() if is_whole or suspects is None else set(suspects)
            count = self._collect(looked_at, content, check_fence, may_go)
            if not is_whole:
                with self._lock:
                    # Until here all of them are suspects: a collection that fails is repeated. One that is whole may
                    # have kept what ``may_go`` spared.
                    self._suspects = set()
            return count
        finally:
            with self._lock:
                digests, self._drop_later = self._drop_later, None
            self.drop_references(digests)

    def _stored(self) -> set[str]:
        # Temporary files are being written; the next start removes those of a dead process.
        return {path.name for path in self._layout.blobs.glob("*/*") if not durable.is_temporary(path.name)}

    def _collect(
        self,
        stored: set[str],
        reached: Container[str],
        check_fence: Callable[[], None],
        may_go: Callable[[Path], bool],
    ) -> int:
        with self._lock:
            doomed = unreachable(stored, [[digest for digest in stored if digest in reached]], self._references)
        gone = set()
        for digest in sorted(doomed):
            check_fence()
            with self._lock:
                # One at a time: an operator may have stored the same content meanwhile.
                if digest not in self._references and may_go(self._layout.blob(digest)):
                    self._synced.discard(digest)
                    self._layout.blob(digest).unlink(missing_ok=True)
                    gone.add(digest)
        with self._lock:
            # Inode numbers are reused once a file is gone: the hash of a deleted file must not be remembered. That of a
            # doubtful one must: by it one sees whether Spark's file still has its content.
            for digest in gone - self._doubtful:
                for identity in self._files.pop(digest, ()):
                    self._known.pop(identity, None)
        return len(gone)
