"""The PostgreSQL sink under kill -9 at every step and at random, with a reader beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.connectors.postgres import cleanup as postgres_clearing
from cutline.connectors.postgres import publish as postgres_publish
from cutline.ports import Sink
from cutline.sinks import Postgres
from cutline.testing.servers.postgres import PostgresServer
from tests.support.sink_torture import View, each_number_of_kills, torture

pytestmark = [pytest.mark.kill]

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
    postgres_publish.FEW_ROWS, postgres_clearing.WORTH_EMPTYING_BYTES = 0, 1
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


@pytest.mark.parametrize("sinks", [pytest.param("make_sinks", marks=pytest.mark.soak), "make_emptied"])
@each_number_of_kills
def test_two_tables_survive_torture_and_never_disagree(
    tmp_path: Path, postgres_server: PostgresServer, kills: int, sinks: str
) -> None:
    dsn = postgres_server.fresh_database()
    with reader(dsn) as read:
        report = torture(
            f"{__name__}:{sinks}",
            {"dsn": dsn},
            read,
            folder=tmp_path / "flow",
            kills=kills,
            seed=3,
            only_newest=True,
            same_epoch=True,
        )
    assert report.killed >= 20 + kills and report.rollbacks >= 3 and report.states > 20, report
