"""Whether a flow runs, starts or is stopped: decided here, for every command.

A start notes in a small file which step it is at. The note counts only while the very process that wrote it lives, so a
killed start, or another process with its number, is never taken for a start under way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.model.layout import Layout
from cutline.model.status import FlowStatus, StartStatus
from cutline.ports.progress import Progress, Step
from cutline.runtime.lock import is_copied, running_pid, started_at

COPY, ENDED, NEW, STARTING, STOPPED = "copy", "ended", "new", "starting", "stopped"
#: The states of a flow that has ended as it should, or said why not.
_OVER = (STOPPED, "failed", NEW)


class FlowState(msgspec.Struct, frozen=True, kw_only=True):
    """What a flow does now."""

    #: running, paused, waiting or unhealthy; starting; stopped or failed; ended: its process is gone without a word;
    #: copy: the folder is a copy of a flow's; new: it was never started.
    state: str
    #: The process that runs or starts it.
    pid: int | None = None
    starting: StartStatus | None = None

    @property
    def is_up(self) -> bool:
        """Whether a process runs it and answers."""
        return self.pid is not None and self.starting is None


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    start: StartStatus
    #: When the process began, which tells it from a later one with the same number.
    begun: str
    folder: str


class StartNote:
    """The note of one start: written at each step, removed at its end. A progress that tells another one, too."""

    def __init__(self, layout: Layout, progress: Progress, *, restores: str = "") -> None:
        self._path = layout.starting
        self._folder = os.path.realpath(layout.root)
        self._progress = progress
        self._start = StartStatus(pid=os.getpid(), step="", since_ms=now_ms(), restores=restores)
        self._write()

    def begin(self, step: Step, detail: str = "") -> None:
        self._start = msgspec.structs.replace(self._start, step=str(step))
        self._write()
        self._progress.begin(step, detail)

    def tell(self, detail: str, of_bytes: int = 0) -> None:
        self._progress.tell(detail, of_bytes)

    def add_bytes(self, size_bytes: int) -> None:
        self._progress.add_bytes(size_bytes)

    def restores(self, to: str) -> None:
        """What is restored is known."""
        self._start = msgspec.structs.replace(self._start, restores=to)
        self._write()

    def remove(self) -> None:
        """Not that of another process, which has the flow now."""
        note = _noted(self._path)
        if note is not None and note.start.pid == os.getpid():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _write(self) -> None:
        note = _Note(start=self._start, begun=started_at(os.getpid()), folder=self._folder)
        with contextlib.suppress(OSError):  # telling must not disturb the start: the disk may be full
            durable.replace(self._path, msgspec.json.encode(note), sync=False)


@contextlib.contextmanager
def noted_start(layout: Layout, progress: Progress, *, restores: str = "") -> Iterator[StartNote]:
    """While this lasts, the flow is starting. Enter it with the flow's lock, or when the flow was just stopped."""
    note = StartNote(layout, progress, restores=restores)
    try:
        yield note
    finally:
        note.remove()


def state_of(layout: Layout, status: FlowStatus | None) -> FlowState:
    """``status``: as the flow wrote it last; None: there is none, or it cannot be read."""
    pid, start = running_pid(layout.lock), _start_under_way(layout)
    if is_copied(layout.lock):
        return FlowState(state=COPY)
    if pid is not None:
        if start is not None and start.pid == pid:
            return FlowState(state=STARTING, pid=pid, starting=start)
        if status is not None and status.pid == pid:
            return FlowState(state=status.state, pid=pid)
        return FlowState(state=STARTING, pid=pid, starting=StartStatus(pid=pid, step="", since_ms=0))
    if start is not None:
        return FlowState(state=STARTING, pid=start.pid, starting=start)
    if status is None:
        return FlowState(state=STOPPED if layout.metadata.exists() else NEW)
    if status.state in _OVER:
        return FlowState(state=status.state)
    if not layout.lock.exists() and started_at(status.pid):  # removed while the flow runs
        return FlowState(state=status.state, pid=status.pid)
    return FlowState(state=ENDED)


def _start_under_way(layout: Layout) -> StartStatus | None:
    note = _noted(layout.starting)
    if note is None or not note.begun or started_at(note.start.pid) != note.begun:
        return None
    is_here = note.folder == os.path.realpath(layout.root) or running_pid(layout.lock) == note.start.pid
    return note.start if is_here else None


def _noted(path: os.PathLike[str]) -> _Note | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=_Note)
    except (OSError, msgspec.MsgspecError):
        return None
