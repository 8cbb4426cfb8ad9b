"""Tables in PostgreSQL can be rewound to every checkpoint that the flow keeps, however sparse it has become."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest

from cutline.connectors.postgres import sink as postgres_sink
from cutline.ports.sinks import Sink
from cutline.sinks import Postgres
from cutline.testing.servers.postgres import PostgresServer
from tests.support.going_back import assert_tables_go_back
from tests.support.torture_flow import Row


def test_tables_go_back(tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_sink, "KEEP_EPOCHS", 8)
    dsn = postgres_server.fresh_database()

    def sinks() -> Mapping[str, Sink]:
        return {
            "events": Postgres(dsn, "events"),
            "latest": Postgres(dsn, "latest", mode="upsert", key=["key"]),
        }

    def read() -> tuple[list[Row], list[Row]]:
        with psycopg.connect(dsn) as connection:
            events, latest = (
                connection.execute(f"SELECT id, key, value FROM {name} ORDER BY id").fetchall()
                for name in ("events", "latest")
            )
        return events, latest

    assert_tables_go_back(tmp_path / "flow", sinks, read, monkeypatch)
    with psycopg.connect(dsn) as connection:
        (kept,) = connection.execute("SELECT count(*) FROM cutline_books.epochs").fetchone() or (0,)
        (pieces,) = connection.execute("SELECT count(*) FROM cutline_books.pieces").fetchone() or (0,)
    assert kept < 2 * 30 and pieces < 200, "what no checkpoint needs is forgotten"
