"""``cutline.read``, beside what the suite for all sinks says of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import cutline
from cutline.connectors.parquet.reader import settled
from cutline.errors import ConfigError, RewoundError, SinkError
from cutline.model.ids import Epoch, FlowName, SinkId
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Foreach, Parquet, Postgres, SQLite
from cutline.testing.conformance.sinks import RICH, RICH_ROW, SIMPLE, Case, SinkConformance, rows
from cutline.testing.servers.postgres import PostgresServer

Make = Callable[[], Any]

RICH_ROWS = [RICH_ROW, {**dict.fromkeys(RICH_ROW), "id": 2}]


def case_of(make: Make, schema: pa.Schema = SIMPLE, **context: Any) -> Case:
    sink: Sink = make()
    told = msgspec.structs.replace(SinkConformance().context(schema), **context)
    sink.open(told)
    return Case(sink=sink, context=told)


def ids(found: cutline.ports.ReadResult) -> list[int]:
    return sorted(found.to_arrow()["id"].to_pylist())


@pytest.fixture(params=["parquet", "partitioned", "delta", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    makers: dict[str, Make] = {
        "parquet": lambda: Parquet(tmp_path / "p"),
        "partitioned": lambda: Parquet(tmp_path / "p", partition_by=["name"]),
        "delta": lambda: Delta(tmp_path / "d"),
        "sqlite": lambda: SQLite(tmp_path / "s.sqlite", "t"),
    }
    return makers[request.param]


def test_every_type_comes_back_as_it_went(tmp_path: Path) -> None:
    for make in (
        lambda: Parquet(tmp_path / "p", partition_by=["day"]),
        lambda: Delta(tmp_path / "d", partition_by=["flag"]),
        lambda: SQLite(tmp_path / "s.sqlite", "t"),
    ):
        case = case_of(make, RICH)
        case.publish(1, 0, RICH_ROWS)
        found = cutline.read(make())
        assert sorted(found.to_arrow().to_pylist(), key=lambda row: row["id"]) == RICH_ROWS
        case.publish(2, 1, RICH_ROWS[:1])
        assert cutline.read(make(), after=1).to_arrow().to_pylist() == RICH_ROWS[:1]


def test_postgres_types_come_back_nested_ones_as_json(postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    case = case_of(lambda: Postgres(dsn, "t"), RICH)
    case.publish(1, 0, RICH_ROWS)
    found = cutline.read(Postgres(dsn, "t")).to_arrow().to_pylist()
    (first,) = [row for row in found if row["id"] == 1]
    texts = {name: first.pop(name) for name in ("point", "tags", "counts")}
    assert first == {name: value for name, value in RICH_ROW.items() if name not in texts}
    assert msgspec.json.decode(texts["tags"]) == ["a", None, ""]
    assert cutline.read(Postgres(dsn, "t"), after=1).to_arrow().num_rows == 0


def test_numbers_too_long_for_arrow_come_as_text(postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE t (id bigint, price numeric(50, 4), cutline_epoch bigint)")
    case = case_of(lambda: Postgres(dsn, "t"), pa.schema([("id", pa.int64()), ("price", pa.decimal128(20, 2))]))
    case.publish(1, 0, [{"id": 1, "price": Decimal("1.25")}])
    assert cutline.read(Postgres(dsn, "t")).to_arrow().to_pylist() == [{"id": 1, "price": "1.2500"}]


def test_what_was_read_stays_what_it_is(make: Make) -> None:
    case = case_of(make)
    case.publish(1, 0, rows(1))
    found = cutline.read(make())
    case.publish(2, 1, rows(2))
    assert (found.epoch, ids(found)) == (1, [1])
    assert ids(found) == [1]  # a second time too


def test_a_reader_that_goes_on_from_where_it_was_sees_every_row_once(make: Make) -> None:
    case = case_of(make)
    got: list[int] = []
    after = 0
    for epoch in range(1, 8):
        case.publish(epoch, epoch, rows(epoch), rows(100 + epoch))
        if epoch % 3:
            found = cutline.read(make(), after=after)
            got += ids(found)
            after = found.epoch
    assert sorted(got) == [*range(1, 8), *range(101, 108)]


def test_a_reader_undoes_what_was_taken_back_and_goes_on(make: Make) -> None:
    case = case_of(make)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(epoch))
    case.sink.rewind(Epoch(1))
    case.previous = Epoch(1)
    with pytest.raises(RewoundError, match=r"epoch 3 was rewound.* up to epoch 1 are still published") as told:
        cutline.read(make(), after=3)
    case.publish(5, 5, rows(5))
    with pytest.raises(RewoundError) as again:
        cutline.read(make(), after=2)
    assert told.value.still == again.value.still == 1
    found = cutline.read(make(), after=told.value.still)
    assert (found.epoch, ids(found)) == (5, [5])
    assert ids(cutline.read(make(), as_of=3)) == [1]


def test_another_target_and_nothing_at_all_are_told(make: Make) -> None:
    with pytest.raises(SinkError, match="no flow has published"):
        cutline.read(make())
    case = case_of(make)
    case.publish(1, 0, rows(1))
    with pytest.raises(SinkError, match="not published here"):
        cutline.read(make(), after=9)
    with pytest.raises(ConfigError, match="no epoch is after 5 and as of 3"):
        cutline.read(make(), after=5, as_of=3)


def test_a_sink_that_has_no_target_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Foreach cannot be read"):
        cutline.read(Foreach(print, staging=tmp_path))


def test_two_flows_in_one_delta_table_must_be_told_apart(tmp_path: Path) -> None:
    def make() -> Delta:
        return Delta(tmp_path / "d")

    first, second = case_of(make), case_of(make, flow=FlowName("returns"), sink=SinkId("back"))
    first.publish(4, 0, rows(1))
    second.publish(7, 0, rows(2))
    first.publish(5, 1, rows(3))
    with pytest.raises(SinkError, match="orders/totals-out, returns/back"):
        cutline.read(make())
    both = cutline.read(make(), flow="returns")
    assert (both.epoch, ids(both)) == (7, [1, 2, 3])
    new = cutline.read(make(), flow="orders", name="totals-out", after=4)
    assert (new.epoch, ids(new)) == (5, [3])
    with pytest.raises(SinkError, match="no such sink"):
        cutline.read(make(), flow="nobody")


def test_rows_that_others_add_to_a_delta_table_are_not_new_epochs(tmp_path: Path) -> None:
    case = case_of(lambda: Delta(tmp_path / "d"))
    case.publish(1, 0, rows(1))
    write_deltalake(tmp_path / "d", pa.Table.from_pylist(rows(50), SIMPLE), mode="append")
    case.publish(2, 1, rows(2))
    DeltaTable(tmp_path / "d").optimize.compact()
    assert ids(cutline.read(Delta(tmp_path / "d"), after=1)) == [2]
    assert ids(cutline.read(Delta(tmp_path / "d"), as_of=1)) == [1, 50]
    DeltaTable(tmp_path / "d").vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(SinkError, match="deleted by a vacuum"):
        cutline.read(Delta(tmp_path / "d"), after=1).to_arrow()


def test_a_listing_that_passes_an_epoch_by_is_not_believed() -> None:
    # Epoch 2 appeared behind the listing, epoch 3 in front of it; then epoch 4 came.
    listings = iter([[Epoch(1), Epoch(3)], [Epoch(1), Epoch(2), Epoch(3), Epoch(4)]])
    assert settled(lambda: next(listings)) == [1, 2, 3]


def test_parquet_that_is_taken_back_while_it_is_read_is_told(tmp_path: Path) -> None:
    case = case_of(lambda: Parquet(tmp_path / "p"))
    case.publish(1, 0, rows(1))
    case.publish(2, 1, rows(2))
    found = cutline.read(Parquet(tmp_path / "p"))
    case.sink.rewind(Epoch(1))
    with pytest.raises(RewoundError, match="while it was read"):
        found.to_arrow()
    assert ids(cutline.read(Parquet(tmp_path / "p"))) == [1]


def test_readers_beside_a_writer_get_whole_epochs_in_order(make: Make) -> None:
    """Epoch n has n rows, so the number of rows tells whether all of it, and all before it, is there."""
    case = case_of(make)
    wrong: list[Any] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set() and not wrong:
            found = cutline.read(make())
            if (count := found.to_arrow().num_rows) != found.epoch * (found.epoch + 1) // 2:
                wrong.append((found.epoch, count))

    reader = threading.Thread(target=look)
    reader.start()
    for epoch in range(1, 25):
        case.publish(epoch, epoch, rows(*range(epoch)))
    is_over.set()
    reader.join()
    assert not wrong
