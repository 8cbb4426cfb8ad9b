"""Four tables in four systems, and a reader that must always see them at one epoch, whatever is killed and rewound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.dataset  # noqa: F401 (so that the lives need not import them, each anew)
import pyiceberg.io.pyarrow  # noqa: F401
import pytest

import cutline
from cutline.errors import SinkError
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Iceberg, Postgres, SQLite
from cutline.testing.servers.postgres import PostgresServer
from tests.support.sink_torture import View, steps_for, torture
from tests.support.torture_flow import EVENTS, FLOW, LATEST, Row

pytestmark = [pytest.mark.kill]

#: With ``make test``: when some tables have published an epoch, or were rewound, and others not.
_FEW_STEPS = ("sink-commit-half", "sink-rewind-half")


def make_tables(config: dict[str, Any]) -> dict[str, Sink]:
    """Two systems for the events, two for what ``latest`` makes of them."""
    folder = config["folder"]
    return {
        EVENTS: SQLite(f"{folder}/events.sqlite", "events"),
        f"{EVENTS}-lake": Delta(f"{folder}/events"),
        LATEST: Postgres(config["dsn"], "latest"),
        f"{LATEST}-lake": Iceberg(f"sqlite:///{folder}/catalog.sqlite", "t.latest", warehouse=folder),
    }


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_all_tables_are_read_at_one_epoch(tmp_path: Path, postgres_server: PostgresServer, kills: int) -> None:
    config = {"folder": str(tmp_path / "tables"), "dsn": postgres_server.fresh_database()}
    (tmp_path / "tables").mkdir()
    tables = {f"{name}-out": sink for name, sink in make_tables(config).items()}

    def read() -> View | None:
        try:
            found = cutline.read(tables, flow=FLOW, timeout_s=5)
        except SinkError as error:
            if "no flow has published" in error.what or "restarted or restored" in error.what:
                return None
            raise
        rows = {name: _rows(one) for name, one in found.items()}
        for name in (EVENTS, LATEST):
            assert rows[f"{name}-out"] == rows[f"{name}-lake-out"], f"epoch {found.epoch}"
        return {name: rows[f"{name}-out"] for name in (EVENTS, LATEST)}

    report = torture(
        f"{__name__}:make_tables",
        config,
        read,
        folder=tmp_path / "flow",
        kills=kills,
        seed=5,
        same_epoch=True,
        points=steps_for(kills) if kills > 2 else _FEW_STEPS,
    )
    assert report.killed >= kills and report.rollbacks >= 1 and report.states > 3, report


def _rows(found: cutline.ports.ReadResult) -> list[Row]:
    table = found.to_arrow()
    return sorted(zip(*(table[name].to_pylist() for name in ("id", "key", "value")), strict=True))
