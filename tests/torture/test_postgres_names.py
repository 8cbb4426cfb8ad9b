"""Columns with odd names in PostgreSQL."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cutline.connectors.reading import read
from cutline.errors import SinkError
from cutline.model.ids import Epoch
from cutline.sinks import Postgres
from cutline.testing.conformance.sinks import Case, SinkSuite
from cutline.testing.servers.postgres import PostgresServer
from tests.support.column_names import DOTTED, GOOD, OWN, WITH_NUL

NAMES = [name for name in (*GOOD, *DOTTED, "x" * 63) if name and "%" not in name]


@pytest.mark.parametrize("mode", [{}, {"mode": "upsert", "key": ["a.b", ".x", 'quo"ted']}], ids=["append", "upsert"])
def test_a_column_may_have_any_name(postgres_server: PostgresServer, mode: dict[str, Any]) -> None:
    sink = Postgres(postgres_server.fresh_database(), "out", **mode)
    columns = [*((name, pa.int64()) for name in NAMES), ("epoch", pa.int64())]
    context = SinkSuite().context(pa.schema(columns))
    sink.open(context)
    case, sent = Case(sink=sink, context=context), {name: number for number, name in enumerate(NAMES)}
    for epoch in (1, 2):
        case.publish(epoch, epoch - 1, [sent | {"epoch": epoch}])
    expected = [sent | {"epoch": epoch} for epoch in ((2,) if mode else (1, 2))]
    assert sorted(read(sink).to_arrow().to_pylist(), key=str) == sorted(expected, key=str)
    sink.rewind(Epoch(1))
    assert read(sink).to_arrow().to_pylist() == [sent | {"epoch": 1}]


@pytest.mark.parametrize("name", ["", "x" * 64, "a%b", *OWN[::2], WITH_NUL, "xmin"])
def test_a_name_that_a_column_cannot_have_is_refused(postgres_server: PostgresServer, name: str) -> None:
    sink = Postgres(postgres_server.fresh_database(), "out")
    with pytest.raises(SinkError, match="column"):
        sink.open(SinkSuite().context(pa.schema([("id", pa.int64()), (name, pa.int64())])))
