"""Sinks whose rows replace others, and SQLite, under kill -9 at every step and at random, with a reader beside them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from cutline.ports.sinks import Sink
from cutline.sinks import Delta, SQLite
from tests.support.sink_torture import View, each_number_of_kills, only_in_soak, steps_for, torture
from tests.support.torture_flow import Row

pytestmark = [pytest.mark.kill]


def make_delta(config: dict[str, Any]) -> dict[str, Sink]:
    folder = Path(config["folder"])
    return {
        "events": Delta(folder / "events"),
        "latest": Delta(folder / "latest", mode="upsert", key=["key"]),
    }


def make_sqlite(config: dict[str, Any]) -> dict[str, Sink]:
    path = Path(config["folder"]) / "data.sqlite"
    return {"events": SQLite(path, "events"), "latest": SQLite(path, "latest", mode="upsert", key=["key"])}


@each_number_of_kills
def test_delta_upserts_survive_torture(tmp_path: Path, kills: int) -> None:
    def read() -> View:
        return {name: _delta_rows(tmp_path / "tables" / name) for name in ("events", "latest")}

    config = {"folder": str(tmp_path / "tables")}
    report = torture(
        f"{__name__}:make_delta",
        config,
        read,
        folder=tmp_path / "flow",
        kills=kills,
        seed=3,
        only_newest=True,
        points=steps_for(kills),
    )
    assert report.killed >= 10 + kills and report.rollbacks >= 2 and report.states > 10, report


@only_in_soak
def test_sqlite_survives_torture(tmp_path: Path, kills: int) -> None:
    def read() -> View:
        return {name: _sqlite_rows(tmp_path / "tables" / "data.sqlite", name) for name in ("events", "latest")}

    config = {"folder": str(tmp_path / "tables")}
    report = torture(
        f"{__name__}:make_sqlite", config, read, folder=tmp_path / "flow", kills=kills, seed=4, only_newest=True
    )
    assert report.killed >= 20 + kills and report.rollbacks >= 3 and report.states > 20, report


@each_number_of_kills
def test_tables_of_one_sqlite_database_always_show_the_same_epoch(tmp_path: Path, kills: int) -> None:
    def read() -> View:
        path = tmp_path / "tables" / "data.sqlite"
        if not path.exists():
            return {"events": [], "latest": []}
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("BEGIN")
            return {name: _rows_in(db, name) for name in ("events", "latest")}

    config = {"folder": str(tmp_path / "tables")}
    make, folder = f"{__name__}:make_sqlite", tmp_path / "flow"
    report = torture(make, config, read, folder=folder, kills=kills, seed=6, only_newest=True, same_epoch=True)
    assert report.killed >= 20 + kills and report.rollbacks >= 3 and report.states > 20, report


@each_number_of_kills
def test_sqlite_survives_torture_when_it_publishes_at_once(tmp_path: Path, kills: int) -> None:
    """Beside that, upserts show that batches are never published in another order than they have happened in."""

    def read() -> View:
        return {name: _sqlite_rows(tmp_path / "tables" / "data.sqlite", name) for name in ("events", "latest")}

    config = {"folder": str(tmp_path / "tables")}
    make = f"{__name__}:make_sqlite"
    folder = tmp_path / "flow"
    report = torture(make, config, read, folder=folder, kills=kills, seed=5, only_newest=True, publish="at_once")
    assert report.killed >= 20 + kills and report.rollbacks >= 3 and report.states > 20, report


@each_number_of_kills
def test_sqlite_survives_torture_in_per_operator_mode(tmp_path: Path, kills: int) -> None:
    def read() -> View:
        return {name: _sqlite_rows(tmp_path / "tables" / "data.sqlite", name) for name in ("events", "latest")}

    config = {"folder": str(tmp_path / "tables")}
    report = torture(
        f"{__name__}:make_sqlite",
        config,
        read,
        folder=tmp_path / "flow",
        kills=kills,
        seed=7,
        only_newest=True,
        can_rewind=False,
        mode="per-operator",
    )
    assert report.killed >= 15 + kills and report.states > 20, report


def _delta_rows(folder: Path) -> list[Row]:
    try:
        table = DeltaTable(str(folder)).to_pyarrow_table()
    except TableNotFoundError:
        return []
    return list(zip(*(table[name].to_pylist() for name in ("id", "key", "value")), strict=True))


def _sqlite_rows(path: Path, table: str) -> list[Row]:
    if not path.exists():
        return []
    # It waits only for whoever comes first after a kill, and reads what that one has left in the log.
    with closing(sqlite3.connect(path)) as db:
        return _rows_in(db, table)


def _rows_in(db: sqlite3.Connection, table: str) -> list[Row]:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
        return []
    return db.execute(f"SELECT id, key, value FROM {table}").fetchall()
