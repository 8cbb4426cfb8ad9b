"""The schema in a sink's ledger, when the ledger holds something else."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from cutline.base import records
from cutline.connectors.reading import read
from cutline.connectors.rows import recorded_schema
from cutline.errors import DamagedRecordError
from cutline.ports.sinks import Sink
from cutline.sinks import Foreach, Parquet, SQLite
from cutline.testing.conformance.sinks import SIMPLE, SinkSuite

WHOLE = SIMPLE.serialize().to_pybytes()
NONE = {"empty": b"", "text": b"no schema at all", "cut": WHOLE[: len(WHOLE) // 2], "zeros": bytes(len(WHOLE))}


@pytest.mark.parametrize("content", NONE.values(), ids=NONE)
def test_what_is_no_schema_is_refused_with_its_place(content: bytes) -> None:
    with pytest.raises(DamagedRecordError, match="holds no schema") as refused:
        recorded_schema(content, path="/data/ledger.json")
    assert refused.value.where == {"path": "/data/ledger.json"} and refused.value.next_step
    assert recorded_schema(WHOLE) == SIMPLE


def _in_json(path: Path) -> None:
    stored = msgspec.json.decode(path.read_bytes())
    kind = stored["kind"]
    path.write_bytes(records.encode(kind, stored["body"] | {"schema_ipc": "bm8gc2NoZW1h"}))


def _in_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE cutline_sinks SET schema_ipc = x'00ff'")


@pytest.mark.parametrize("kind", ["Parquet", "Foreach", "SQLite"])
def test_a_sink_with_a_damaged_ledger_says_so(tmp_path: Path, kind: str) -> None:
    makes: dict[str, Callable[[], Sink]] = {
        "Parquet": lambda: Parquet(tmp_path / "out"),
        "Foreach": lambda: Foreach(print, staging=tmp_path),
        "SQLite": lambda: SQLite(tmp_path / "out.db", "out"),
    }
    make, context = makes[kind], SinkSuite().context(pa.schema(SIMPLE))
    make().open(context)
    if kind == "SQLite":
        _in_database(tmp_path / "out.db")
    else:
        _in_json(next(tmp_path.rglob("ledger.json")))
    with pytest.raises(DamagedRecordError, match="holds no schema"):
        make().open(context)
    if kind != "Foreach":
        with pytest.raises(DamagedRecordError, match="holds no schema"):
            read(make())
