"""Connections to PostgreSQL: how one is made, what its failures mean, and that no password ever leaves it."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cutline.errors import NotDone, OutcomeUnknown, SinkError

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]
    Cursor = psycopg.Cursor[tuple[Any, ...]]

#: Asked for unless the connection string says otherwise: a host that is gone must be noticed.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "client_encoding": "utf8",
    "application_name": "cutline",
}
#: How long to wait for a row or table that somebody else holds, before the coordinator tries again.
_LOCK_TIMEOUT_MS = 30_000

#: How often a step is tried when others stand in its way or the connection is lost, before the coordinator hears of it.
MOST_TRIES = 5
#: Class of the errors that say "somebody was in the way, try again".
_ROLLED_BACK = "40"

T = TypeVar("T")

_lives: dict[int, str] = {}


def life() -> str:
    """Names this process, so that what one process has prepared is never mixed with what another has."""
    return _lives.setdefault(os.getpid(), secrets.token_hex(8))


def check_installed() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise SinkError(
            "the PostgreSQL sink needs psycopg", next_step="pip install 'cutline[postgres]', on the executors too"
        ) from error


def connection_parameters(dsn: str) -> dict[str, str]:
    """What libpq is told; what the string leaves out comes from the environment (PGHOST, PGPASSWORD, PGSERVICE …)."""
    check_installed()
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # Its message repeats a part of the string, which may be the password.
        raise SinkError(
            "the connection string cannot be read",
            next_step='write it like "host=db.example dbname=shop user=cutline" or "postgresql://cutline@db.example/shop"',
        ) from None
    return _DEFAULTS | {name: str(value) for name, value in given.items() if value is not None}


class Address:
    """Where a database is, and how to get in. Its text never shows how to get in."""

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
            # A role may be set to forget on a crash what it was told was stored. Stricter settings stay.
            connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false)"
                " WHERE current_setting('synchronous_commit') = 'off'"
            )
            connection.autocommit = False
        except psycopg.Error as error:
            if connection is not None:
                connection.close()
            raise NotDone(
                f"PostgreSQL cannot be reached: {self.told(error)}",
                next_step="see whether the server runs and lets this user in; it is tried again",
                database=self,
            ) from None
        return connection

    def told(self, error: BaseException) -> str:
        """What an error says, in one line and without the password."""
        text = " ".join(str(error).split()) or type(error).__name__
        for name in ("password", "sslpassword"):
            secret = self._parameters.get(name) or (os.environ.get("PGPASSWORD") if name == "password" else None)
            if secret:
                text = text.replace(secret, "***")
        return text


class Session:
    """One connection that is made when it is needed, and again after it was lost. For one thread at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._held: list[Connection] = []
        # A connection that nobody closes complains; the sink that owns this one is never told that it is over.
        self._closing = weakref.finalize(self, _close, self._held)

    def run(self, what: str, step: Callable[[Connection], T], *, is_steady: bool = True, **where: object) -> T:
        """Run a step in a transaction and commit it; again if somebody was in the way or the connection was lost.

        The step must find out by itself what an earlier try has done: a COMMIT whose answer was lost may have counted.
        A try that is still under way on a lost connection holds its locks, so the next one waits for it.
        ``is_steady``: who changes meanwhile what the step has read makes it fail, and it is tried again. Otherwise each
        statement sees what is there when it begins.
        """
        import psycopg
        from psycopg import IsolationLevel

        failure: psycopg.Error | None = None
        #: Whether a COMMIT was sent that nobody has answered.
        is_open = False
        for _ in range(MOST_TRIES):
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
                        break  # the server lives and says no: a lock that somebody holds, a full disk
                except psycopg.Error as error:
                    self._give_up(connection)
                    raise SinkError(
                        f"the table could not {what}: {self.address.told(error)}",
                        next_step="mend the table or the rights of the user; the step can be repeated as it is",
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
            f"the table could not {what}: {self.address.told(failure) if failure else 'no answer'}",
            next_step="see whether the server runs and who locks the table; it is tried again",
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
