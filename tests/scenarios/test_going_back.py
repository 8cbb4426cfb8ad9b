"""Sinks can be rewound to every checkpoint that the flow keeps, however sparse it has become."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from cutline.connectors.sqlite import sink as sqlite_sink
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Parquet, SQLite
from tests.support.going_back import assert_tables_go_back
from tests.support.iceberg_others import expire_all
from tests.support.sink_targets import iceberg, iceberg_table
from tests.support.torture_flow import (
    EVENTS,
    Row,
    TortureFlow,
    all_rows,
    layout_of,
    newest_rows,
    rows_at_epochs,
    with_totals,
)


def rows_of(table: object) -> list[Row]:
    found = table.select(["id", "key", "value"]).to_pylist()  # type: ignore[attr-defined]
    return sorted((row["id"], row["key"], row["value"]) for row in found)


def test_files_and_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sinks() -> Mapping[str, Sink]:
        return {
            "events": Parquet(tmp_path / "events"),
            "latest": Delta(tmp_path / "latest", mode="upsert", key=["key"]),
        }

    def read() -> tuple[list[Row], list[Row]]:
        events = ds.dataset(tmp_path / "events", format="parquet", partitioning="hive").to_table()
        return rows_of(events), rows_of(DeltaTable(tmp_path / "latest").to_pyarrow_table())

    assert_tables_go_back(tmp_path / "flow", sinks, read, monkeypatch)


def test_iceberg_although_snapshots_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each start someone expires all snapshots: those that a restore needs are tagged."""
    # The clock goes on while the test works, and a commit syncs many files: they need not survive a power cut here.
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def sinks() -> Mapping[str, Sink]:
        for name in ("events", "latest"):
            if (tmp_path / "catalog.sqlite").exists():
                expire_all(tmp_path, f"t.{name}")
        return {
            "events": iceberg(tmp_path, "t.events"),
            "latest": iceberg(tmp_path, "t.latest", mode="upsert", key=["key"]),
        }

    def read() -> tuple[list[Row], list[Row]]:
        events, latest = (iceberg_table(tmp_path, f"t.{name}").scan().to_arrow() for name in ("events", "latest"))
        return rows_of(events), rows_of(latest)

    assert_tables_go_back(tmp_path / "flow", sinks, read, monkeypatch)
    # What no checkpoint needs any more has expired, and what is tagged is as much as the flow keeps.
    kept = len(iceberg_table(tmp_path, "t.events").snapshots())
    assert kept < 70, kept


def sqlite_sinks(database: Path) -> dict[str, Sink]:
    return {
        "events": SQLite(database, "events"),
        "latest": SQLite(database, "latest", mode="upsert", key=["key"]),
    }


def sqlite_rows(database: Path) -> tuple[list[Row], list[Row]]:
    with closing(sqlite3.connect(database)) as db:
        tables = (db.execute(f"SELECT id, key, value FROM {name} ORDER BY id") for name in ("events", "latest"))
        events, latest = ([tuple(row) for row in table] for table in tables)
    return events, latest


def test_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_sink, "REWIND_EPOCHS", 8)
    database = tmp_path / "data.sqlite"
    assert_tables_go_back(tmp_path / "flow", lambda: sqlite_sinks(database), lambda: sqlite_rows(database), monkeypatch)


def test_a_host_that_takes_over_lets_sinks_keep_what_the_remote_tier_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_sink, "REWIND_EPOCHS", 2)
    folder, database = tmp_path / "flow", tmp_path / "data.sqlite"
    settings: dict[str, Any] = {"retain": "1h", "retain_checkpoints": 1, "replicate_interval": 0}
    settings["remote"] = str(tmp_path / "remote")

    def live(batches: int, **more: Any) -> None:
        flow = TortureFlow(folder, sqlite_sinks(database), only_newest=False, **settings, **more)
        for _ in range(batches):
            flow.step(EVENTS)
            flow.drain()
            assert flow.run.wait_remote(flow.epochs()[-1], timeout=20)
            replicator = flow.run._parts.background.replicator
            assert replicator is not None
            replicator.collect()
        flow.stop()

    live(5)
    cuts = rows_at_epochs(folder)
    wanted = sorted(cuts)[2]
    shutil.rmtree(layout_of(folder).root)
    live(4)
    shutil.rmtree(layout_of(folder).root)
    live(0, restore_to=wanted)
    events, latest = cuts[wanted]
    assert events is not None and latest is not None
    assert sqlite_rows(database) == (sorted(all_rows(events)), newest_rows(with_totals(latest)))
