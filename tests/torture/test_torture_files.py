"""The file sinks under kill -9 at every step and at random, with a reader beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

import cutline
from cutline.errors import RewoundError
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Parquet
from tests.support.sink_torture import View, each_number_of_kills, only_in_soak, steps_for, torture
from tests.support.torture_flow import Row

pytestmark = [pytest.mark.kill]


def make_parquet(config: dict[str, Any]) -> dict[str, Sink]:
    return {name: Parquet(Path(config["folder"]) / name) for name in ("events", "latest")}


def make_delta(config: dict[str, Any]) -> dict[str, Sink]:
    return {name: Delta(Path(config["folder"]) / name) for name in ("events", "latest")}


@each_number_of_kills
def test_parquet_survives_torture(tmp_path: Path, kills: int) -> None:
    def read() -> View | None:
        try:
            return {name: _parquet_rows(tmp_path / "tables" / name) for name in ("events", "latest")}
        except RewoundError:
            return None  # an epoch was taken back while it was read

    config = {"folder": str(tmp_path / "tables")}
    report = torture(
        f"{__name__}:make_parquet", config, read, folder=tmp_path / "flow", kills=kills, seed=1, points=steps_for(kills)
    )
    assert report.killed >= 10 + kills and report.rollbacks >= 2 and report.states > 10, report


@only_in_soak
def test_delta_survives_torture(tmp_path: Path, kills: int) -> None:
    def read() -> View:
        return {name: _delta_rows(tmp_path / "tables" / name) for name in ("events", "latest")}

    config = {"folder": str(tmp_path / "tables")}
    report = torture(f"{__name__}:make_delta", config, read, folder=tmp_path / "flow", kills=kills, seed=2)
    assert report.killed >= 10 + kills and report.rollbacks >= 2 and report.states > 10, report


def _parquet_rows(folder: Path) -> list[Row]:
    if not (folder / "_cutline" / "ledger.json").exists():
        return []
    return _rows(cutline.read(Parquet(folder)).to_arrow())


def _delta_rows(folder: Path) -> list[Row]:
    try:
        return _rows(DeltaTable(str(folder)).to_pyarrow_table())
    except TableNotFoundError:
        return []


def _rows(table: pa.Table) -> list[Row]:
    if not table.num_rows:
        return []
    return list(zip(*(table[name].to_pylist() for name in ("id", "key", "value")), strict=True))
