"""The PostgreSQL sink on a real server: the suite, in each of its ways to write."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest

from cutline.sinks import Postgres
from cutline.testing.postgres_server import PostgresServer
from cutline.testing.sink_conformance import Row, SinkConformance

#: How the process that is killed in the middle of a commit finds the server.
SERVER = "CUTLINE_TEST_POSTGRES"


class PostgresConformance(SinkConformance):
    """One database for the class; every folder that the suite asks for is a schema in it."""

    rewind_crash_points = ("sink-rewind-half",)
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _database(self, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SERVER, postgres_server.fresh_database())

    def make_sink(self, tmp_path: Path) -> Postgres:
        name = f"p{tmp_path.name}"
        with psycopg.connect(os.environ[SERVER]) as connection:
            connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{name}"'.encode())
        return Postgres(os.environ[SERVER], f"{name}.out", books=f"{name}-books", **self.options)

    def read_rows(self, tmp_path: Path) -> list[Row]:
        with psycopg.connect(os.environ[SERVER]) as connection:
            cursor = connection.execute(f'SELECT * FROM "p{tmp_path.name}".out'.encode())
            assert cursor.description is not None
            names = [column.name for column in cursor.description]
            return [decoded(dict(zip(names, row, strict=True))) for row in cursor]


def decoded(row: Row) -> Row:
    """Nested values are JSON in the table."""
    row.pop("cutline_epoch", None)
    if row.get("point"):
        row["point"]["at"] = datetime.fromisoformat(row["point"]["at"])
    if row.get("counts"):
        row["counts"] = list(row["counts"].items())
    return row


class TestAppend(PostgresConformance):
    options: ClassVar = {}


class TestUpsert(PostgresConformance):
    options: ClassVar = {"mode": "upsert", "key": ["id"]}


class TestAppendForGood(PostgresConformance):
    options: ClassVar = {"rewindable": False}
    can_be_shared = True
