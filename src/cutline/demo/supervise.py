"""The demo's parent process: starts the worker, kills it, starts it again, and watches."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cutline.demo.settings import FLOW_NAME, DemoSettings
from cutline.errors import FlowFailedError
from cutline.model.layout import Layout
from cutline.model.status import FlowStatus

_LOOK_SECONDS = 0.1
#: A worker that has not finished after this long is stuck.
_DEADLINE_SECONDS = 900.0
#: A kill comes this long after the worker's first progress.
_KILL_WINDOW_SECONDS = (0.1, 5.0)

Watcher = Callable[[FlowStatus | None, str], None]


class DemoRun:
    """One run with a number of kills; the moments come from the seed."""

    def __init__(self, settings: DemoSettings, kills: int, watch: Watcher, *, loses_host: bool = False) -> None:
        """``loses_host``: each kill also deletes the worker's storage folder; the remote tier and sinks remain."""
        self._loses_host = loses_host
        self._settings = settings
        self._kills_left = kills
        self._watch = watch
        self._random = random.Random(settings.seed)
        self._layout = Layout(settings.storage, FLOW_NAME)
        self._log = Path(settings.folder) / "worker.log"
        self.kills = 0
        self.recoveries: list[dict[str, Any]] = []

    def run(self) -> None:
        """Run until the worker has published everything."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        killed_at: float | None = None
        while True:
            worker = self._start_worker()
            try:
                killed_at = self._follow(worker, killed_at, deadline)
            finally:
                _kill_group(worker)
            if killed_at is None:
                return

    def _start_worker(self) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cutline.demo.worker", msgspec.json.encode(self._settings).decode()],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _follow(self, worker: subprocess.Popen[bytes], killed_at: float | None, deadline: float) -> float | None:
        """Watch one worker until it ends; returns the time of its kill, or None when it has finished its work."""
        kill_at: float | None = None
        while worker.poll() is None:
            status = self._status(worker.pid)
            self._watch(status, f"kills so far: {self.kills}")
            if status is not None and sum(item.batches for item in status.operators.values()) > 0:
                if killed_at is not None:
                    seconds = round(time.monotonic() - killed_at, 2)
                    self.recoveries.append({"path": status.recovery.path, "seconds": seconds})
                    killed_at = None
                if kill_at is None and self._kills_left > 0 and self._may_die(status):
                    kill_at = time.monotonic() + self._random.uniform(*_KILL_WINDOW_SECONDS)
            if kill_at is not None and time.monotonic() >= kill_at:
                _kill_group(worker)
                if self._loses_host:
                    shutil.rmtree(self._settings.storage)
                self.kills += 1
                self._kills_left -= 1
                return time.monotonic()
            if time.monotonic() > deadline:
                raise FlowFailedError("the demo did not finish", next_step=f"see {self._log}", flow=FLOW_NAME)
            time.sleep(_LOOK_SECONDS)
        if worker.returncode != 0:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise FlowFailedError(
                f"the worker failed with code {worker.returncode}:\n{tail}",
                next_step=f"see {self._log}",
                flow=FLOW_NAME,
            )
        return None

    def _may_die(self, status: FlowStatus) -> bool:
        """A host that is lost before anything was uploaded cannot be recovered."""
        return not self._loses_host or (status.remote is not None and status.remote.epoch > 0)

    def _status(self, pid: int) -> FlowStatus | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            status = msgspec.json.decode(self._layout.status.read_bytes(), type=FlowStatus)
            if status.pid == pid:
                return status
        return None


def _kill_group(worker: subprocess.Popen[bytes]) -> None:
    """SIGKILL the worker, its JVM and all of its Python workers at once, as in a power failure."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
