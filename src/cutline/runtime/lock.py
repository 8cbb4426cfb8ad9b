"""One process per flow and storage: a lock that a kill -9 releases, and that waits for the dead process's JVM."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from cutline.base.logs import get_logger
from cutline.errors import FlowLockedError

log = get_logger(__name__)

#: When the driver's Python process dies, its JVM notices and exits; until then the JVM could still write Spark's files.
_JVM_EXIT_SECONDS = 60.0
#: A note holds a path.
_MOST_BYTES = 8192


class FlowLock:
    """Held while the flow runs."""

    def __init__(self, path: Path, flow: str) -> None:
        self._path = path
        self._flow = flow
        self._handle: int | None = None
        self._is_noted = True

    def acquire(self, *, is_noted: bool = True) -> None:
        """Take the lock; raises FlowLockedError when another process runs the flow.

        ``is_noted=False``: only excludes other processes; the flow does not run and is not reported as running.
        """
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            holder = running_pid(self._path)
            raise FlowLockedError(
                f"another process runs this flow (pid {holder})" if holder else "another process has locked this flow",
                next_step="stop it first, or wait if it only collects (cutline gc)",
                flow=self._flow,
            ) from error
        self._handle = handle
        self._is_noted = is_noted
        text = os.pread(handle, _MOST_BYTES, 0).decode(errors="replace")
        note = _Note.parse(text)
        is_copy = note is not None and note.file not in ("", _identity(os.fstat(handle)))
        if note is not None and is_copy:
            self._check_copy(note)
        # The JVM of a process that lives, or that ran in another folder, writes nothing here.
        if note is None or not is_copy or (note.is_of(self._path.parent) and not note.is_alive()):
            self._wait_for_jvm(text.partition("\n")[0].split())
        try:
            self._note(str(os.getpid()))
        except OSError:  # a full disk: the caller may make room and start again
            self.release_without_note()
            raise

    def note_jvm(self, pid: int) -> None:
        """Record the JVM of this process, so that a successor can wait for its end."""
        self._note(f"{os.getpid()} {pid} {started_at(pid)}")

    def _check_copy(self, note: _Note) -> None:
        """The note was copied with the folder. While the original runs, a start of its copy would only take the sinks
        from it.
        """
        if not note.runs_elsewhere(self._path.name):
            return
        self.release_without_note()
        raise FlowLockedError(
            f"this folder is a copy of a storage that is in use: pid {note.pid} on {note.host} runs flow {self._flow} "
            f"in {note.folder}",
            next_step=f"leave that process alone if it is the right one, or stop it before you start the copy; for a "
            f"second flow beside it: cutline savepoint create {self._flow} NAME, then cutline clone",
            flow=self._flow,
            path=self._path.parent,
        )

    def release(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._note("")
            os.close(self._handle)
            self._handle = None

    def _note(self, text: str) -> None:
        if self._handle is not None and self._is_noted:
            whole = f"{text}\n{_this_process(self._handle, self._path)}" if text else ""
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, whole.encode(errors="surrogateescape"), 0)

    def _wait_for_jvm(self, noted: list[str]) -> None:
        if len(noted) != 3 or not noted[1].isdigit():
            return
        pid, started = int(noted[1]), noted[2]
        deadline = time.monotonic() + _JVM_EXIT_SECONDS
        waited = False
        if started and started_at(pid) == started:
            with contextlib.suppress(OSError):  # seen as starting meanwhile; a successor waits for the same JVM
                self._note(f"{os.getpid()} {pid} {started}")
        while started and started_at(pid) == started:
            if not waited:
                log.warning("waiting_for_old_jvm", flow=self._flow, pid=pid)
                waited = True
            if time.monotonic() > deadline:
                self.release_without_note()
                raise FlowLockedError(
                    f"the JVM of a dead process still runs (pid {pid})",
                    next_step="end that process, then start again",
                    flow=self._flow,
                )
            time.sleep(0.05)

    def release_without_note(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def running_pid(path: Path) -> int | None:
    """The process that runs the flow, as recorded in the lock file; None if none does.

    The lock itself is not tried: that would make a start at the same moment fail.
    """
    note = _read_note(path)
    return note.pid if note is not None and note.is_here and note.is_alive() else None


def is_copied(path: Path) -> bool:
    """Whether the lock file was copied, with its folder, from a flow that ran or runs elsewhere."""
    note = _read_note(path)
    return note is not None and not note.is_here


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What the process that runs the flow has written into its lock file."""

    pid: int
    #: When the process began; empty: a former version wrote the note.
    started: str
    #: The lock file itself, which a copy of it is not.
    file: str
    host: str
    folder: str
    is_here: bool = True

    @classmethod
    def parse(cls, text: str) -> _Note | None:
        process, _, more = text.partition("\n")
        pid = process.split()[0] if process.split() else ""
        if not (pid.isascii() and pid.isdigit()):
            return None
        started, file, host, folder = [*more.split(" ", 3), "", "", "", ""][:4]
        return cls(pid=int(pid[:10]), started=started, file=file, host=host, folder=folder)

    def is_alive(self) -> bool:
        """By number and beginning, not by host: containers on one host have several names and may share processes."""
        now = started_at(self.pid)
        return bool(now) and self.started in ("", now)

    def is_of(self, folder: Path) -> bool:
        return bool(self.folder) and os.path.realpath(self.folder) == os.path.realpath(folder)

    def runs_elsewhere(self, name: str) -> bool:
        """Of a copied note: whether the process still runs the flow in the folder it names; ``name``: of the lock file.

        A process outlives its flows, so the note in the original must still name it. Another process may see folders
        that this one does not: its word counts then.
        """
        if not self.is_alive():
            return False
        try:
            with (Path(self.folder) / name).open("rb") as original:
                there = _Note.parse(original.read(_MOST_BYTES).decode(errors="replace"))
                is_original = _identity(os.fstat(original.fileno())) == self.file
        except OSError:
            return self.pid != os.getpid()
        return is_original and there is not None and there.pid == self.pid


def _this_process(handle: int, path: Path) -> str:
    begun, file = started_at(os.getpid()), _identity(os.fstat(handle))
    return f"{begun or '-'} {file} {socket.gethostname() or '-'} {path.parent}"


def _read_note(path: Path) -> _Note | None:
    try:
        with path.open("rb") as file:
            note = _Note.parse(file.read(_MOST_BYTES).decode(errors="replace"))
            if note is None:
                return None
            return replace(note, is_here=note.file in ("", _identity(os.fstat(file.fileno()))))
    except OSError:
        return None


def _identity(status: os.stat_result) -> str:
    """A copy of a file has another number; a folder that is moved keeps those of its files."""
    return f"{status.st_dev}:{status.st_ino}"


def started_at(pid: int) -> str:
    """Distinguishes a process from a later one with the same pid; empty when there is none (or no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
