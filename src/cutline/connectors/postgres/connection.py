"""Connections to PostgreSQL: how they are made, what their failures mean, and that errors never show a password."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from cutline.base.retry import Retry
from cutline.errors import NotDone, OutcomeUnknown, Refused, SinkError

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]
    Cursor = psycopg.Cursor[tuple[Any, ...]]

#: Defaults for what the connection string leaves out: a dead host must be noticed.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "client_encoding": "utf8",
    "application_name": "cutline",
}
#: How long to wait for a row or table that another session has locked, before the coordinator retries.
_LOCK_TIMEOUT_MS = 30_000

#: Retries of a step that conflicts with another session or loses the connection, before it raises.
_TRANSACTIONS = Retry(limit=5)
#: What a server says that runs and does not accept the connection, now or later.
_REFUSED = re.compile(
    r"password authentication failed|no password supplied|no pg_hba\.conf entry|permission denied for database"
    r"|(?:role|database) \".*\" does not exist|is not permitted to log in"
)
#: Class of the errors that say "a conflict rolled the transaction back, retry".
_ROLLED_BACK = "40"

T = TypeVar("T")


def check_installed() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise SinkError(
            "the PostgreSQL sink needs psycopg", next_step="pip install 'cutline[postgres]', on the executors too"
        ) from error


def connection_parameters(dsn: str) -> dict[str, str]:
    """Parameters for libpq, which takes what the string leaves out from the environment (PGHOST, PGPASSWORD, …)."""
    check_installed()
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # Its message repeats a part of the string, which may be the password.
        given = None
    if given is None or _is_ambiguous(dsn, given):
        raise SinkError(
            "the connection string cannot be read",
            next_step='write "host=db.example dbname=shop user=cutline" or "postgresql://cutline@db.example/shop"; '
            "in an address, write @ : / % of a password as %40 %3A %2F %25",
        ) from None
    return _DEFAULTS | {name: str(value) for name, value in given.items() if value is not None}


def _is_ambiguous(dsn: str, given: Mapping[str, Any]) -> bool:
    """Whether libpq may have cut an address in the middle of a password: what it takes for the host is then shown."""
    scheme, _, rest = dsn.strip().partition("://")
    if scheme not in ("postgresql", "postgres"):
        return False
    place = rest.partition("?")[0]
    user, at, server = place.partition("@")
    is_cut = "@" in server or (bool(at) and "/" in user)
    ports = str(given.get("port") or "").split(",")
    return is_cut or any(port and not (port.isascii() and port.isdigit()) for port in ports)


class Address:
    """Where a database is, with credentials. Its ``repr`` never shows the credentials."""

    def __init__(self, dsn: str) -> None:
        self._parameters = connection_parameters(dsn)

    def __repr__(self) -> str:
        shown = [
            f"{name}={self._parameters[name]}"
            for name in ("service", "host", "port", "dbname")
            if name in self._parameters
        ]
        return " ".join(shown) or "the database that the environment names"

    def connect(self) -> Connection:
        """A new connection, or NotDone."""
        import psycopg

        connection: Connection | None = None
        try:
            connection = psycopg.connect(**self._parameters, autocommit=True)  # type: ignore[arg-type]
            connection.execute("SELECT set_config('lock_timeout', %s, false)", (str(_LOCK_TIMEOUT_MS),))
            # A role may be configured to lose acknowledged commits in a crash. Stricter settings stay.
            connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false)"
                " WHERE current_setting('synchronous_commit') = 'off'"
            )
            connection.autocommit = False
        except psycopg.Error as error:
            if connection is not None:
                connection.close()
            raise unreachable(
                error,
                self,
                next_step="check that the server runs and accepts this user; Cutline retries",
                database=self,
            ) from None
        return connection

    def describe(self, error: BaseException) -> str:
        """The error's text, in one line and without the password."""
        text = " ".join(str(error).split()) or type(error).__name__
        for name in ("password", "sslpassword"):
            secret = self._parameters.get(name) or (os.environ.get("PGPASSWORD") if name == "password" else None)
            if secret:
                text = text.replace(secret, "***")
        return text


def unreachable(error: BaseException, address: Address, *, next_step: str, **where: object) -> NotDone:
    """No connection can be made; of a refused one libpq tells the text only."""
    if _REFUSED.search(str(error)):
        next_step = "correct the address, the user or the password, or let the server accept them"
        return Refused(f"PostgreSQL refuses the connection: {address.describe(error)}", next_step=next_step, **where)
    return NotDone(f"PostgreSQL cannot be reached: {address.describe(error)}", next_step=next_step, **where)


class Session:
    """One connection, made when it is needed and again after it was lost. For one thread at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._held: list[Connection] = []
        # psycopg warns about a connection that is never closed, and a sink has no close.
        self._closing = weakref.finalize(self, _close, self._held)

    def run(self, what: str, step: Callable[[Connection], T], *, is_steady: bool = True, **where: object) -> T:
        """Run a step in a transaction and commit it; retry after a conflict or a lost connection.

        The step itself must find out what an earlier attempt did: a COMMIT whose answer was lost may have succeeded.
        An attempt that still runs on a lost connection holds its locks, so the next one waits for it.
        ``is_steady``: the step fails, and is retried, if another session changes what it has read. Otherwise each
        statement sees what exists when it begins.
        """
        import psycopg
        from psycopg import IsolationLevel

        failure: psycopg.Error | None = None
        #: Whether a COMMIT was sent and not answered.
        is_open = False
        for _ in _TRANSACTIONS.attempts():
            with self._lock:
                try:
                    connection = self._usable()
                except NotDone as error:
                    if is_open:
                        raise OutcomeUnknown(error.what, next_step=error.next_step, **where) from None
                    raise
                is_committing = False
                try:
                    connection.isolation_level = (
                        IsolationLevel.REPEATABLE_READ if is_steady else IsolationLevel.READ_COMMITTED
                    )
                    result = step(connection)
                    is_committing = True
                    connection.commit()
                except psycopg.OperationalError as error:
                    is_lost = connection.closed or connection.broken
                    is_open = is_open or (is_committing and is_lost)
                    self._give_up(connection)
                    failure = error
                    if not is_lost and not (error.sqlstate or "").startswith(_ROLLED_BACK):
                        break  # the server runs and refuses: another session's lock, a full disk
                except psycopg.Error as error:
                    self._give_up(connection)
                    raise SinkError(
                        f"the table could not {what}: {self.address.describe(error)}",
                        next_step="fix the table or the user's privileges; the step can be repeated as it is",
                        database=self.address,
                        **where,
                    ) from None
                except BaseException:
                    self._give_up(connection)
                    raise
                else:
                    return result
        kind = OutcomeUnknown if is_open else NotDone
        raise kind(
            f"the table could not {what}: {self.address.describe(failure) if failure else 'no answer'}",
            next_step="check that the server runs and which session locks the table; Cutline retries",
            database=self.address,
            **where,
        ) from None

    def _usable(self) -> Connection:
        if self._held and self._held[0].closed:
            _close(self._held)
        if not self._held:
            self._held.append(self.address.connect())
        return self._held[0]

    def _give_up(self, connection: Connection) -> None:
        import psycopg

        try:
            connection.rollback()
        except psycopg.Error:
            _close(self._held)

    def close(self) -> None:
        with self._lock:
            _close(self._held)


def _close(held: list[Connection]) -> None:
    while held:
        held.pop().close()
