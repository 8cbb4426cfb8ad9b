"""The Iceberg sink under kill -9 at every step and at random, with a reader beside it, on both kinds of databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyiceberg.io.pyarrow  # noqa: F401 (so that the lives need not import it, each anew)
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError

from cutline.ports.sinks import Sink
from cutline.sinks import Iceberg
from cutline.testing.servers.postgres import PostgresServer
from tests.support.sink_torture import Report, View, each_number_of_kills, only_in_soak, steps_for, torture
from tests.support.torture_flow import EVENTS, LATEST, Row

pytestmark = [pytest.mark.kill]


def make_appended(config: dict[str, Any]) -> dict[str, Sink]:
    return {name: Iceberg(config["catalog"], f"t.{name}", warehouse=config["folder"]) for name in (EVENTS, LATEST)}


def make_upserted(config: dict[str, Any]) -> dict[str, Sink]:
    catalog, folder = config["catalog"], config["folder"]
    return {
        EVENTS: Iceberg(catalog, f"t.{EVENTS}", warehouse=folder),
        LATEST: Iceberg(catalog, f"t.{LATEST}", mode="upsert", key=["key"], warehouse=folder),
    }


@contextmanager
def reader(catalog: str) -> Iterator[Callable[[], View]]:
    """Reads as any program with pyiceberg does."""
    with SqlCatalog("default", uri=catalog.replace("postgresql://", "postgresql+psycopg://")) as opened:
        yield lambda: {name: _rows(opened, f"t.{name}") for name in (EVENTS, LATEST)}


def _rows(catalog: Catalog, name: str) -> list[Row]:
    try:
        table = catalog.load_table(name).scan().to_arrow()
    except NoSuchTableError:
        return []
    return list(zip(*(table[name].to_pylist() for name in ("id", "key", "value")), strict=True))


@only_in_soak
def test_iceberg_survives_torture(tmp_path: Path, kills: int) -> None:
    catalog = f"sqlite:///{tmp_path}/catalog.sqlite"
    config = {"catalog": catalog, "folder": str(tmp_path / "tables")}
    with reader(catalog) as read:
        report = torture(f"{__name__}:make_appended", config, read, folder=tmp_path / "flow", kills=kills, seed=11)
    assert report.killed >= 10 + kills and report.rollbacks >= 2 and report.states > 10, report


def _torture_upserts(catalog: str, folder: Path, kills: int, *, seed: int) -> Report:
    with reader(catalog) as read:
        return torture(
            f"{__name__}:make_upserted",
            {"catalog": catalog, "folder": str(folder / "tables")},
            read,
            folder=folder / "flow",
            kills=kills,
            seed=seed,
            only_newest=True,
            points=steps_for(kills),
        )


@each_number_of_kills
def test_iceberg_upserts_survive_torture(tmp_path: Path, kills: int) -> None:
    catalog = f"sqlite:///{tmp_path}/catalog.sqlite"
    report = _torture_upserts(catalog, tmp_path, kills, seed=12)
    assert report.killed >= 10 + kills and report.rollbacks >= 2 and report.states > 10, report


@each_number_of_kills
def test_iceberg_with_a_catalog_in_postgres_survives_torture(
    tmp_path: Path, postgres_server: PostgresServer, kills: int
) -> None:
    catalog = postgres_server.fresh_database()
    report = _torture_upserts(catalog, tmp_path, kills, seed=13)
    assert report.killed >= 10 + kills and report.rollbacks >= 2 and report.states > 10, report
