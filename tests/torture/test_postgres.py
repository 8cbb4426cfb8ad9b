"""The PostgreSQL sink on a real server: the suite, in each of its ways to write."""

from __future__ import annotations

import math
import os
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psycopg
import pyarrow as pa
import pytest

from cutline.connectors import shared_epochs
from cutline.connectors.postgres import cleanup as postgres_clearing
from cutline.connectors.postgres import publish as postgres_publish
from cutline.errors import CutlineError, RecoveryError, SinkError
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, SinkId
from cutline.model.staging import StagedBatch
from cutline.ports.sinks import StageAttempt
from cutline.recovery.sinks import rewind_all
from cutline.sinks import Postgres
from cutline.testing.conformance.sinks import FIRST, SIMPLE, Case, Row, SinkConformance, rows
from cutline.testing.servers.postgres import PASSWORD, PostgresServer
from tests.support.torture_flow import EVENTS, TortureFlow

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


# ------------------------------------------------------------------------------------------------- the table


def start(
    dsn: str, table: str = "out", *, sink: str = "totals-out", schema: pa.Schema = SIMPLE, **options: Any
) -> Case:
    context = msgspec.structs.replace(SinkConformance().context(schema), sink=SinkId(sink))
    target = Postgres(dsn, table, **options)
    target.open(context)
    return Case(sink=target, context=context)


def query(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def dsn(postgres_server: PostgresServer) -> str:
    return postgres_server.fresh_database()


KEYED = pa.schema([("key", pa.string()), ("value", pa.int64())])


def pairs(**values: int | None) -> list[Row]:
    return [{"key": key, "value": value} for key, value in values.items()]


def test_the_newest_row_of_a_key_wins_across_batches_and_within_one(dsn: str) -> None:
    case = start(dsn, schema=KEYED, mode="upsert", key=["key"])
    first, second = case.stage(0, pairs(a=1, b=1)), case.stage(1, [*pairs(a=2), *pairs(a=3), *pairs(a=4)])
    case.commit(1, first, second)
    assert query(dsn, "SELECT * FROM out ORDER BY key") == [("a", 4), ("b", 1)]


def test_an_upsert_leaves_other_columns_alone_and_a_rewind_puts_values_back(dsn: str) -> None:
    query(dsn, "CREATE TABLE out (note text DEFAULT 'mine', value numeric, key varchar PRIMARY KEY)")
    query(dsn, "INSERT INTO out VALUES ('yours', 0, 'a')")
    case = start(dsn, schema=KEYED, mode="upsert", key=["key"])
    case.publish(1, 0, pairs(a=1, b=1))
    case.publish(2, 1, pairs(b=2, c=2))
    case.publish(3, 2, pairs(a=3, b=3, c=None))
    seen = "SELECT key, value, note FROM out ORDER BY key"
    assert query(dsn, seen) == [("a", 3, "yours"), ("b", 3, "mine"), ("c", None, "mine")]
    case.sink.rewind(Epoch(2))
    assert query(dsn, seen) == [("a", 1, "yours"), ("b", 2, "mine"), ("c", 2, "mine")]
    case.sink.rewind(Epoch(0))
    assert query(dsn, seen) == [("a", 0, "yours")]


def test_a_table_of_keys_alone_and_names_that_need_quoting(dsn: str) -> None:
    schema = pa.schema([('a "b"', pa.string()), ("Ü", pa.int32())])
    case = start(dsn, 'odd "name"', schema=schema, mode="upsert", key=['a "b"', "Ü"])
    for epoch in (1, 2):
        case.publish(epoch, epoch, [{'a "b"': "x", "Ü": 1}, {'a "b"': "x", "Ü": epoch}])
    assert query(dsn, 'SELECT * FROM "odd ""name""" ORDER BY 2') == [("x", 1), ("x", 2)]
    case.sink.rewind(Epoch(1))
    assert query(dsn, 'SELECT * FROM "odd ""name"""') == [("x", 1)]


def test_what_only_old_epochs_need_is_let_go_of(dsn: str) -> None:
    case = start(dsn, schema=KEYED, mode="upsert", key=["key"], keep_epochs=3)
    for epoch in range(1, 9):
        case.publish(epoch, epoch, pairs(a=epoch))
    assert isinstance(case.sink, Postgres)
    assert case.sink.oldest_rewind() == 5
    for table in ("epochs", "pieces", "before_1"):
        assert query(dsn, f"SELECT count(*) FROM cutline_books.{table}") == [(3,)]
    with pytest.raises(SinkError, match="epoch 5 at the earliest"):
        case.sink.rewind(Epoch(4))
    case.sink.rewind(Epoch(5))
    assert query(dsn, "SELECT * FROM out") == [("a", 5)]
    assert case.sink.published() == 5


def test_what_was_published_for_good_stays_when_later_epochs_can_be_taken_back(dsn: str) -> None:
    case = start(dsn, schema=KEYED, mode="upsert", key=["key"], rewindable=False)
    for epoch in (1, 2):
        case.publish(epoch, epoch, pairs(a=epoch))
    case.open(Postgres(dsn, "out", mode="upsert", key=["key"]))
    case.publish(3, 3, pairs(a=3))
    assert isinstance(case.sink, Postgres)
    assert case.sink.oldest_rewind() == 2
    with pytest.raises(SinkError, match="epoch 2 at the earliest"):
        case.sink.rewind(Epoch(1))
    case.sink.rewind(Epoch(2))
    assert query(dsn, "SELECT * FROM out") == [("a", 2)]


def test_a_flow_is_not_taken_back_further_than_its_sinks_can_be(dsn: str, tmp_path: Path) -> None:
    def open_flow(restore_to: int | None = None) -> TortureFlow:
        sinks = {
            "events": Postgres(dsn, "events"),
            "latest": Postgres(dsn, "latest", mode="upsert", key=["key"], keep_epochs=2),
        }
        return TortureFlow(tmp_path, sinks, only_newest=True, restore_to=restore_to)

    def rows_now() -> list[tuple[Any, ...]]:
        return query(dsn, "SELECT (SELECT count(*) FROM events), (SELECT max(id) + 1 FROM latest)")

    flow = open_flow()
    for _ in range(5):
        flow.step(EVENTS)
        flow.drain()
    epochs = flow.epochs()
    flow.stop()
    with pytest.raises(RecoveryError, match=f"cannot be rewound further than epoch {epochs[2]}"):
        open_flow(restore_to=epochs[1])
    assert rows_now() == [(20, 20)]
    flow = open_flow(restore_to=epochs[2])
    assert rows_now() == [(12, 12)]
    flow.step(EVENTS)
    flow.drain()
    flow.stop()
    assert rows_now() == [(16, 16)]


def test_nothing_staged_is_left_behind(dsn: str) -> None:
    case = start(dsn)
    case.stage(0, rows(1))  # an attempt that nobody has named
    case.publish(1, 0, rows(1, 2))
    late = case.stage(1, rows(3))
    case.sink.abort([late])
    assert query(dsn, "SELECT count(*) FROM cutline_books.staged_1") == [(0,)]
    assert query(dsn, "SELECT count(*) FROM cutline_books.prepared") == [(0,)]
    assert query(dsn, "SELECT count(*) FROM cutline_books.pieces WHERE epoch IS NULL") == [(0,)]


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are treated as many ones are: nothing is deleted while publishing, tables are emptied afterwards."""
    monkeypatch.setattr(postgres_publish, "FEW_ROWS", 0)
    monkeypatch.setattr(postgres_clearing, "WORTH_TRUNCATING_BYTES", 1)


def attempt_of(case: Case, batch: int) -> StageAttempt:
    names = case.context
    return StageAttempt(
        flow=names.flow, operator=names.operator, generation=FIRST, batch=BatchId(batch), partition=0, attempt="a"
    )


def staged_bytes(dsn: str) -> int:
    found = query(dsn, "SELECT sum(pg_relation_size(inhrelid)) FROM pg_inherits")
    return int(found[0][0])


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": ["id"]}])
def test_staging_tables_are_emptied_but_for_what_is_not_published(dsn: str, options: dict[str, Any]) -> None:
    case = start(dsn, **options)
    later = case.stage(4, rows(3))  # is staged in the same table as batch 0
    case.stage(0, rows(1))  # an attempt that nobody has named
    case.publish(1, 0, rows(1, 2))
    assert query(dsn, "SELECT id FROM cutline_books.staged_1") == [(3,)]
    case.commit(2, later)
    assert query(dsn, "SELECT id FROM out ORDER BY id") == [(1,), (2,), (3,)]
    assert staged_bytes(dsn) == 0


@pytest.mark.usefixtures("many")
def test_a_table_that_a_task_writes_to_is_not_emptied(dsn: str) -> None:
    case = start(dsn)
    writer = case.sink.stager().open(attempt_of(case, 4))
    writer.write(pa.RecordBatch.from_pylist(rows(3), SIMPLE))
    case.publish(1, 0, rows(1, 2))
    pieces = writer.close()
    assert query(dsn, "SELECT id FROM cutline_books.staged_1") == [(3,)]
    case.commit(2, StagedBatch(generation=FIRST, batch=BatchId(4), rows=1, bytes=0, pieces=pieces))
    assert query(dsn, "SELECT id FROM out ORDER BY id") == [(1,), (2,), (3,)]
    assert staged_bytes(dsn) == 0


@pytest.mark.usefixtures("many")
def test_what_a_crash_left_staged_is_not_published_again(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(dsn)
    with monkeypatch.context() as crash:
        crash.setattr("cutline.connectors.postgres.sink.collect_staged_rows", lambda *_: None)
        case.publish(1, 0, rows(1, 2))
    assert query(dsn, "SELECT count(*) FROM cutline_books.staged_1") == [(2,)]
    case.open(Postgres(dsn, "out"))
    case.publish(2, 4, rows(3))
    assert query(dsn, "SELECT id, cutline_epoch FROM out ORDER BY id") == [(1, 1), (2, 1), (3, 2)]
    assert staged_bytes(dsn) == 0


def test_an_epoch_of_many_rows_leaves_nothing_staged(dsn: str) -> None:
    case = start(dsn)
    writer = case.sink.stager().open(attempt_of(case, 0))
    writer.write(pa.record_batch({"id": range(30_000), "name": ["x" * 40] * 30_000}, SIMPLE))
    case.commit(1, StagedBatch(generation=FIRST, batch=BatchId(0), rows=30_000, bytes=0, pieces=writer.close()))
    assert query(dsn, "SELECT count(*), count(DISTINCT id) FROM out") == [(30_000, 30_000)]
    assert staged_bytes(dsn) == 0


def test_text_that_copy_could_misread_comes_back(dsn: str) -> None:
    texts = ["\\.", "a\n\\.\nb", "\\N", "", "tab\there", "cr\rlf\r\n", "back\\slash", "'\"{}%s", "☃", None]
    case = start(dsn)
    case.publish(1, 0, [{"id": number, "name": text} for number, text in enumerate(texts)])
    assert [name for (name,) in query(dsn, "SELECT name FROM out ORDER BY id")] == texts


def test_nested_values_become_json(dsn: str) -> None:
    inner = pa.struct([("raw", pa.binary()), ("at", pa.date32()), ("price", pa.decimal128(30, 9)), ("f", pa.float64())])
    schema = pa.schema([("id", pa.int64()), ("inner", inner), ("days", pa.map_(pa.date32(), pa.list_(inner)))])
    price, day = Decimal("123456789012345678901.000000001"), date(2024, 2, 29)
    value = {"raw": b"\x00\xff", "at": day, "price": price, "f": math.nan}
    start(dsn, schema=schema).publish(1, 0, [{"id": 1, "inner": value, "days": [(day, [value, None])]}])
    found = query(
        dsn,
        """SELECT "inner"->>'raw', ("inner"->>'at')::date, ("inner"->'price')::numeric,
                                 "inner"->'f', days->'2024-02-29'->1, days->'2024-02-29'->0 = "inner" FROM out""",
    )
    assert found == [("AP8=", day, price, None, None, True)]


def test_numbers_at_the_edge_come_back(dsn: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("f", pa.float64()), ("g", pa.float32()), ("t", pa.timestamp("us"))])
    values = [0.1, 1e308, -5e-324, math.inf, -math.inf]
    at = datetime(1, 1, 1, 0, 0, 0, 1)  # noqa: DTZ001 (it has no zone on purpose)
    case = start(dsn, schema=schema)
    case.publish(1, 0, [{"id": 2**63 - 1, "f": value, "g": 0.5, "t": at} for value in values])
    assert query(dsn, "SELECT id, f, g, t FROM out") == [(2**63 - 1, value, 0.5, at) for value in values]


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("table", "options", "complaint"),
    [
        ("CREATE TABLE out (key text, value integer)", {}, "value is integer"),
        ("CREATE TABLE out (key text)", {}, r"no column value \(bigint\)"),
        ("CREATE TABLE out (key text, value bigint)", {}, "no column cutline_epoch"),
        (
            "CREATE TABLE out (key text, value bigint, more int NOT NULL)",
            {"rewindable": False},
            "more must not be null",
        ),
        ("CREATE TABLE out (key text, value bigint GENERATED ALWAYS AS (1) STORED)", {"rewindable": False}, "computed"),
        ("CREATE VIEW out AS SELECT 'a' AS key, 1 AS value", {}, "not a table"),
        ("CREATE TABLE out (key text NOT NULL, value bigint)", {"mode": "upsert", "key": ["key"]}, "no unique index"),
        ("CREATE TABLE out (key text UNIQUE, value bigint)", {"mode": "upsert", "key": ["key"]}, "may be null"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(dsn: str, table: str, options: dict[str, Any], complaint: str) -> None:
    query(dsn, table)
    with pytest.raises(SinkError, match=complaint):
        start(dsn, schema=KEYED, **options)


def test_a_table_that_fits_is_taken_as_it_is(dsn: str) -> None:
    query(dsn, "CREATE TABLE out (more int DEFAULT 7, value numeric, key text, cutline_epoch bigint)")
    start(dsn, schema=KEYED).publish(1, 0, pairs(a=1))
    assert query(dsn, "SELECT key, value, more, cutline_epoch FROM out") == [("a", 1, 7, 1)]


def test_rows_that_do_not_fit_fail_where_they_are_staged(dsn: str) -> None:
    case = start(dsn, schema=KEYED, mode="upsert", key=["key"])
    for bad, complaint in (({"key": None, "value": 1}, "key"), ({"key": "a\x00b", "value": 1}, "0x00")):
        with pytest.raises(SinkError, match=complaint):
            case.stage(0, [bad])
    assert query(dsn, "SELECT count(*) FROM cutline_books.staged_1") == [(0,)]


def test_strange_arguments_and_types_are_refused(dsn: str) -> None:
    for options in ({"mode": "upsert"}, {"key": ["id"]}, {"mode": "merge"}, {"keep_epochs": 0}):
        with pytest.raises(SinkError):
            Postgres(dsn, "out", **options)
    for table in ("a.b.c", "", "100%", "x" * 64):
        with pytest.raises(SinkError):
            Postgres(dsn, table)
    with pytest.raises(SinkError, match="no such key"):
        start(dsn, mode="upsert", key=["absent"])
    for field in (("cutline_row", pa.int64()), ("50%", pa.int64()), ("when", pa.time64("us"))):
        with pytest.raises(SinkError):
            start(dsn, schema=pa.schema([field]))


def test_the_ledgers_schema_takes_no_other_tables(dsn: str) -> None:
    for table in ("ledger", "new"):
        with pytest.raises(SinkError, match="where the sink keeps its ledger"):
            start(dsn, table, books="cutline")  # the name of the user, so it is where unqualified names lead
    start(dsn, "public.ledger", books="cutline").publish(1, 0, rows(1))
    assert query(dsn, "SELECT id FROM public.ledger") == [(1,)]


def test_without_psycopg_it_says_what_to_install(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SinkError, match=r"pip install 'cutline\[postgres\]'"):
        start(dsn)


def test_the_password_is_nowhere_to_be_seen(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(dsn)
    staged = case.stage(0, rows(1))
    token = case.sink.prepare(Epoch(1), [staged])
    shown = [
        repr(case.sink),
        repr(case.sink.stager()),
        repr(staged),
        repr(token),
        str(vars(case.sink)["_reads"].address),
    ]
    wrong = PASSWORD.replace("secret", "wrong")
    for bad in (dsn.replace(PASSWORD, wrong), f"host=127.0.0.1 password={wrong} {wrong}", dsn + "?nonsense=1"):
        with pytest.raises(CutlineError) as caught:
            start(bad)
        shown += [str(caught.value), repr(caught.value.__cause__)]
    assert not [text for text in shown if PASSWORD in text or "wrong" in text], shown
    # It need not be in the connection string at all.
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    start(dsn.replace(f":{PASSWORD}@", "@")).publish(1, 0, rows(7))
    assert query(dsn, "SELECT id FROM out") == [(7,)]


# ------------------------------------------------------------------------------------------------- several tables


def two(dsn: str) -> tuple[Case, Case]:
    return start(dsn, "a", sink="a-out"), start(dsn, "b", sink="b-out", mode="upsert", key=["id"])


def counts(dsn: str) -> tuple[int, int]:
    return tuple(query(dsn, "SELECT (SELECT count(*) FROM a), (SELECT count(*) FROM b)")[0])


def test_whoever_comes_first_publishes_for_all(dsn: str) -> None:
    for epoch, order in ((1, (0, 1)), (2, (1, 0))):
        cases = two(dsn)
        staged = [case.stage(epoch, rows(10 * epoch, 10 * epoch + 1)) for case in cases]
        tokens = [case.sink.prepare(Epoch(epoch), [one]) for case, one in zip(cases, staged, strict=True)]
        for number in order:
            permit = cases[number].permit(epoch, [staged[number]])
            cases[number].sink.commit(permit, [staged[number]], tokens[number])
            assert counts(dsn) == (2 * epoch, 2 * epoch)
        assert [case.sink.published() for case in cases] == [epoch, epoch]


def test_a_sink_without_rows_or_without_this_epoch_does_not_hinder_the_other(dsn: str) -> None:
    a, b = two(dsn)
    a.publish(1, 0, rows(1))  # the other is checkpointed by itself, or has nothing in this epoch
    assert counts(dsn) == (1, 0)
    b.commit(1)
    b.publish(2, 0, rows(1))
    assert counts(dsn) == (1, 1)
    staged = [a.stage(1, rows(2)), b.stage(1, rows(2))]
    b.sink.prepare(Epoch(3), [staged[1]])
    a.commit(3, staged[0])
    assert counts(dsn) == (2, 2)


def test_batches_that_two_open_epochs_hold_are_published_once(dsn: str) -> None:
    a, b = two(dsn)
    first, second = [[case.stage(batch, rows(batch)) for case in (a, b)] for batch in (0, 1)]
    for case, one, other in zip((a, b), first, second, strict=True):
        case.sink.prepare(Epoch(1), [one])
        case.sink.prepare(Epoch(2), [one, other])  # the outcome of epoch 1 was open
    a.commit(1, first[0])
    assert counts(dsn) == (1, 1)
    a.commit(2, second[0])
    assert counts(dsn) == (2, 2)
    # Now the other hears that it may: nothing is left to do.
    for epoch, one in ((1, first[1]), (2, second[1])):
        b.sink.commit(b.permit(epoch, [one]), [one], {})
    assert counts(dsn) == (2, 2)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_nobody_is_published_for_before_its_earlier_epochs(
    dsn: str, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    """Each sink has its own permits: one without rows in an epoch may be at the next before others have begun."""
    a, b = two(dsn)
    theirs = [b.stage(batch, rows(batch)) for batch in (1, 2)]
    tokens = [b.sink.prepare(Epoch(1), theirs[:1])]
    if is_resumed:  # one operator had acknowledged the epoch before the process died, the other after
        monkeypatch.setattr(shared_epochs, "_processes", {})
    a.commit(1)  # nothing in it
    assert counts(dsn) == ((0, 0) if is_resumed else (0, 1))
    tokens.append(b.sink.prepare(Epoch(2), theirs[1:]))
    a.publish(2, 2, rows(2))
    assert counts(dsn) == ((1, 0) if is_resumed else (1, 2))
    for epoch, one, token in zip((1, 2), theirs, tokens, strict=True):
        permit = b.permit(epoch, [one])
        b.sink.commit(permit, [one], token)
        b.previous, b.through = Epoch(epoch), permit.through_batch
    assert counts(dsn) == (1, 2)


def test_pieces_that_open_epochs_hold_are_remembered_however_few_epochs_are_kept(dsn: str) -> None:
    cases = [start(dsn, name, sink=f"{name}-out", keep_epochs=1) for name in ("a", "b")]
    staged = [[case.stage(batch, rows(batch)) for batch in (1, 2, 3)] for case in cases]
    tokens: list[dict[str, Any]] = []
    for epoch in (1, 2, 3):  # all open at once: each holds what those before it hold
        tokens = [case.sink.prepare(Epoch(epoch), own[:epoch]) for case, own in zip(cases, staged, strict=True)]
    for epoch in (1, 2, 3):
        for case, own, token in zip(cases, staged, tokens, strict=True):
            one = own[epoch - 1]
            permit = case.permit(epoch, [one])
            case.sink.commit(permit, [one], token)
            case.previous, case.through = Epoch(epoch), permit.through_batch
    assert counts(dsn) == (3, 3)
    assert query(dsn, "SELECT count(*) FROM cutline_books.pieces") == [(2,)]


def test_a_sink_may_be_told_late_of_what_others_have_published_for_it(dsn: str) -> None:
    """As one is whose operator has another sink that takes its time."""
    a, b = (start(dsn, name, sink=f"{name}-out", keep_epochs=1) for name in ("a", "b"))
    late = []
    for epoch in (1, 2, 3, 4):
        staged = b.stage(epoch, rows(epoch))
        late.append((b.permit(epoch, [staged]), staged, b.sink.prepare(Epoch(epoch), [staged])))
        b.previous, b.through = Epoch(epoch), staged.batch
        a.publish(epoch, epoch, rows(epoch))
    assert counts(dsn) == (4, 4)
    for permit, staged, token in late:
        b.sink.commit(permit, [staged], token)
    assert counts(dsn) == (4, 4)
    # Another history of the same flow is recognised all the same: its rows are staged, and nobody has published them.
    b.previous, b.through = NO_EPOCH, NO_BATCH
    with pytest.raises(SinkError, match="another history"):
        b.publish(1, 0, rows(1))


def test_what_was_thrown_away_is_not_published_by_others_nor_in_their_way(dsn: str) -> None:
    """Sinks that publish at once number by batches: those of two operators have the same numbers."""
    a, b = two(dsn)
    late = b.stage(7, rows(7))
    b.sink.prepare(Epoch(10_000_000_007), [late])
    b.sink.abort([late])  # before it was published its operator went back to a checkpoint
    a.publish(10_000_000_007, 7, rows(7))
    assert counts(dsn) == (1, 0)


def test_what_a_process_has_prepared_is_published_for_all_by_the_next(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two(dsn)
    staged = [a.stage(0, rows(1)), b.stage(0, rows(1))]
    token, _ = a.sink.prepare(Epoch(1), [staged[0]]), b.sink.prepare(Epoch(1), [staged[1]])
    monkeypatch.setattr(shared_epochs, "_processes", {})
    again, _ = two(dsn)
    again.sink.commit(again.permit(1, [staged[0]]), [staged[0]], token)
    assert counts(dsn) == (1, 1)


def test_tables_go_back_together(dsn: str) -> None:
    a, b = two(dsn)
    for epoch in (1, 2, 3):
        a.publish(epoch, epoch, rows(epoch))
        b.publish(epoch, epoch, rows(epoch))
    assert isinstance(a.sink, Postgres) and isinstance(b.sink, Postgres)
    assert a.sink.rewind_group() == b.sink.rewind_group()
    with psycopg.connect(dsn) as connection:
        before = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    rewind_all([(a.sink, Epoch(1)), (b.sink, Epoch(1))])
    assert counts(dsn) == (1, 1)
    assert before is not None
    assert query(dsn, "SELECT pg_current_xact_id()::text::bigint") == [(before[0] + 2,)]  # one for both


# ------------------------------------------------------------------------------------------------- binary

SIMPLE_TYPES = pa.schema(
    [
        ("id", pa.int64()),
        ("tiny", pa.int8()),
        ("small", pa.int16()),
        ("number", pa.int32()),
        ("single", pa.float32()),
        ("double", pa.float64()),
        ("flag", pa.bool_()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("local", pa.timestamp("us")),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)


def simple_row(number: int) -> Row:
    """Its values at the edges; every column but the first is null in some row."""
    edge: Row = {
        "tiny": -128,
        "small": 2**15 - 1,
        "number": -(2**31),
        "single": 0.25,
        "double": -5e-324,
        "flag": number % 2 == 0,
        "text": "☃\n\t\\." * number,
        "raw": b"\x00\xff" * number,
        "day": date(1, 1, 1),
        "local": datetime(1, 1, 1, 0, 0, 0, 1),  # noqa: DTZ001 (it has no zone on purpose)
        "at": datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
    }
    names = list(edge)
    if number < len(names):
        edge[names[number]] = None
    return {"id": number, **edge}


def test_simple_types_are_sent_in_binary_and_come_back(dsn: str) -> None:
    given = [simple_row(number) for number in range(len(SIMPLE_TYPES) + 1)]
    case = start(dsn, schema=SIMPLE_TYPES)
    assert case.sink.stager().is_binary  # type: ignore[attr-defined]
    case.publish(1, 0, given[:5], given[5:])
    with psycopg.connect(dsn) as connection:
        connection.execute("SET timezone = 'UTC'")
        found = connection.execute("SELECT * FROM out ORDER BY id").fetchall()
    assert [dict(zip(SIMPLE_TYPES.names, row, strict=False)) for row in found] == given


def test_rows_that_other_arrow_types_hold_are_sent_in_binary_too(dsn: str) -> None:
    case = start(dsn)
    kinds = (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
    pieces = []
    for batch, kind in enumerate(kinds):
        writer = case.sink.stager().open(attempt_of(case, batch))
        names = pa.array(["left out", None, "", f"as {batch}"]).cast(kind)
        table = pa.record_batch([pa.array(range(batch * 4, batch * 4 + 4)), names], names=["id", "name"])
        writer.write(table.slice(1))  # an array that does not begin where its buffers do
        pieces.append(StagedBatch(generation=FIRST, batch=BatchId(batch), rows=3, bytes=0, pieces=writer.close()))
    case.commit(1, *pieces)
    assert query(dsn, "SELECT id % 4, name FROM out ORDER BY id") == [
        row for batch in range(3) for row in ((1, None), (2, ""), (3, f"as {batch}"))
    ]


@pytest.mark.parametrize(
    ("table", "is_binary"),
    [
        ("key varchar, value bigint", True),
        ("key text, value numeric", False),
    ],
)
def test_binary_is_for_columns_of_exactly_the_type(dsn: str, table: str, is_binary: bool) -> None:
    query(dsn, f"CREATE TABLE out ({table}, cutline_epoch bigint)")
    case = start(dsn, schema=KEYED)
    assert case.sink.stager().is_binary is is_binary  # type: ignore[attr-defined]
    case.publish(1, 0, pairs(a=1))
    assert query(dsn, "SELECT key, value FROM out") == [("a", 1)]


def test_what_lies_before_postgres_calendar_is_refused(dsn: str) -> None:
    schema = pa.schema([("day", pa.date32()), ("at", pa.timestamp("us"))])
    case = start(dsn, schema=schema)
    for day, at in ((-(2**31), 0), (0, -(2**63)), (0, -(2**63) + 946_684_800_000_000)):
        writer = case.sink.stager().open(attempt_of(case, 0))
        columns = [pa.array([day], pa.int32()).cast(pa.date32()), pa.array([at], pa.int64()).cast(pa.timestamp("us"))]
        with pytest.raises(SinkError, match="4713"):
            writer.write(pa.record_batch(columns, schema))
