"""One process per flow and storage: a lock that a kill -9 releases, and that waits for the dead process's JVM."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from cutline.base.logs import get_logger
from cutline.errors import FlowLockedError

log = get_logger(__name__)

#: When the driver's Python process dies, its JVM notices and exits; until then the JVM could still write Spark's files.
_JVM_EXIT_SECONDS = 60.0


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
        self._wait_for_jvm(os.pread(handle, 200, 0).decode(errors="replace").split())
        self._note(str(os.getpid()))

    def note_jvm(self, pid: int) -> None:
        """Record the JVM of this process, so that a successor can wait for its end."""
        self._note(f"{os.getpid()} {pid} {_start_time(pid)}")

    def release(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._note("")
            os.close(self._handle)
            self._handle = None

    def _note(self, text: str) -> None:
        if self._handle is not None and self._is_noted:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)

    def _wait_for_jvm(self, noted: list[str]) -> None:
        if len(noted) != 3 or not noted[1].isdigit():
            return
        pid, started = int(noted[1]), noted[2]
        deadline = time.monotonic() + _JVM_EXIT_SECONDS
        waited = False
        while started and _start_time(pid) == started:
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
    try:
        noted = path.read_text().split()
    except OSError:
        return None
    return int(noted[0]) if noted and noted[0].isdigit() and _start_time(int(noted[0])) else None


def _start_time(pid: int) -> str:
    """Distinguishes a process from a later one with the same pid; empty when there is none (or no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
