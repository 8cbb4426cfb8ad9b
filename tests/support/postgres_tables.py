"""Two PostgreSQL tables that one flow writes, and a reader that sees both in one state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from cutline.connectors.postgres import cleanup as postgres_clearing
from cutline.connectors.postgres import publish as postgres_publish
from cutline.ports.sinks import Sink
from cutline.sinks import Postgres
from tests.support.sink_torture import View

#: One statement sees one state of the database: both tables must be of the same epoch in it.
BOTH = """
    SELECT 'events', id, key, value FROM events UNION ALL SELECT 'latest', id, key, value FROM latest
"""


def make_sinks(config: dict[str, Any]) -> dict[str, Sink]:
    return {
        "events": Postgres(config["dsn"], "events", keep_epochs=12),
        "latest": Postgres(config["dsn"], "latest", mode="upsert", key=["key"], keep_epochs=12),
    }


def make_emptied(config: dict[str, Any]) -> dict[str, Sink]:
    """As with many rows: staging tables are emptied after the epoch is published."""
    postgres_publish.FEW_ROWS, postgres_clearing.WORTH_TRUNCATING_BYTES = 0, 1
    return make_sinks(config)


@contextlib.contextmanager
def reader(dsn: str) -> Iterator[Callable[[], View | None]]:
    """Reads both tables through a connection of its own, which comes back if the server does."""
    held: list[psycopg.Connection] = []

    def read() -> View | None:
        try:
            if not held:
                held.append(psycopg.connect(dsn, autocommit=True, connect_timeout=5))
            view: dict[str, list[tuple[int, str, int]]] = {"events": [], "latest": []}
            for table, number, key, value in held[0].execute(BOTH):
                view[table].append((number, key, value))
        except psycopg.errors.UndefinedTable:
            return None
        except psycopg.OperationalError:
            held.pop().close() if held else None
            return None
        return view

    yield read
    for connection in held:
        connection.close()
