"""A real server on loopback as a child process, which tests may kill, freeze and restart. It ends with its parent."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutline.errors import InvariantViolation, NotDone
from cutline.testing.servers.lifetime import start_child

_PAUSE_SECONDS = 0.03
_FREEZE_SECONDS = 10.0


class ServerProcess:
    """One server with its own folder. After ``kill`` or ``stop``, ``start`` restarts it on the same data."""

    #: Its name in errors.
    kind = "server"
    #: Limit for a start.
    start_seconds = 60.0
    #: The signal for a graceful shutdown.
    stop_signal = signal.SIGTERM

    def __init__(self, prefix: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=prefix))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return when it is ready. Does nothing if it runs already."""
        if self._process is None:
            self.launch()
            self.wait_until_ready()

    def launch(self) -> None:
        """Start it and return at once: servers of one cluster become ready together."""
        command = self._prepare()
        with (self._folder / "log").open("ab") as log:
            # Its own session, so that a signal to the test's group does not reach it.
            self._process = start_child(
                command,
                cwd=self._folder,
                env=os.environ | dict(self._environment()),
                stdout=log,
                stderr=log,
                user=self._user(),
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def freeze(self) -> None:
        """Stop it from answering; its connections stay open. Returns when it has stopped."""
        self._signal(signal.SIGSTOP)
        # On a busy machine a thread may run on for a while, and answer.
        deadline = time.monotonic() + _FREEZE_SECONDS
        while not self._has_stopped():
            if time.monotonic() > deadline:
                raise NotDone(f"the {self.kind} does not stop")
            time.sleep(_PAUSE_SECONDS)

    def _has_stopped(self) -> bool:
        return self._process is None or all(map(_is_stopped, (self._process.pid, *_children(self._process.pid))))

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it like a lost machine: no connection is closed properly."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """Shut it down gracefully; its data stays."""
        if self._process is not None:
            self._process.send_signal(self.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self.kill()

    def remove(self) -> None:
        """End it and remove all that it wrote."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ what each server defines

    def _prepare(self) -> Sequence[str]:
        """Write the files that it needs; returns the command that starts it."""
        raise NotImplementedError

    def _environment(self) -> Mapping[str, str]:
        return {}

    def _user(self) -> int | None:
        return None

    def _is_ready(self) -> bool:
        raise NotImplementedError

    # ------------------------------------------------------------------

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to the server and its child processes, including those in other sessions."""
        if self._process is None:
            raise InvariantViolation("the server does not run")
        parent = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            children = _children(parent)
            os.killpg(parent, number)
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not self._is_ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise NotDone(f"the {self.kind} does not become ready:\n{self._log_end()}")
            time.sleep(_PAUSE_SECONDS)

    def _log_end(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3_000:]


def _is_stopped(pid: int) -> bool:
    """Whether every thread of the process is stopped, or gone."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name, in parentheses, may contain anything.
            if thread.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def free_ports(count: int, first: int, *, partner: int = 0) -> list[int]:
    """Free ports among the 10,000 from ``first`` on, each with the one ``partner`` above it.

    Choose ``first`` outside the range that the kernel assigns itself: the ports must still be free after a restart.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(first, first + 10_000)
        if port not in found and _is_free(port) and _is_free(port + partner):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
