"""The SQLite sink: the suite in both modes, and what is special about a database in one file."""

from __future__ import annotations

import base64
import json
import random
import sqlite3
import threading
from collections import Counter
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutline.connectors.sqlite import rows as sqlite_rows
from cutline.errors import ConfigError, FencedError, NotDone, SinkError
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, Generation
from cutline.ports.sinks import StageAttempt
from cutline.sinks import SQLite
from cutline.testing.conformance.sinks import SIMPLE, Case, Row, SinkBehaviour, rows
from tests.support.sink_targets import (
    SQLiteTarget,
    SQLiteUpsertTarget,
    SQLiteUpsertWithoutRewindTarget,
    SQLiteWithoutRewindTarget,
    read_sqlite,
)


class TestAppend(SQLiteTarget, SinkBehaviour):
    pass


class TestUpsert(SQLiteUpsertTarget, SinkBehaviour):
    pass


class TestAppendWithoutRewind(SQLiteWithoutRewindTarget, SinkBehaviour):
    pass


class TestUpsertWithoutRewind(SQLiteUpsertWithoutRewindTarget, SinkBehaviour):
    pass


def start(tmp_path: Path, schema: pa.Schema = SIMPLE, *, name: str = "totals-out", **options: Any) -> Case:
    table = options.pop("table", "totals")
    sink = SQLite(tmp_path / "data.sqlite", table, **options)
    context = TestAppend().context(schema)
    context = type(context)(**{**{f: getattr(context, f) for f in context.__struct_fields__}, "sink": name})
    sink.open(context)
    return Case(sink=sink, context=context)


def named(tmp_path: Path) -> dict[int, str]:
    return {row["id"]: row["name"] for row in read_sqlite(tmp_path / "data.sqlite")}


def row(number: int, name: str) -> Row:
    return {"id": number, "name": name}


# ---------------------------------------------------------------------- upsert


def test_a_row_replaces_the_one_with_the_same_key_and_the_newest_batch_wins(tmp_path: Path) -> None:
    case = start(tmp_path, mode="upsert", key="id")
    case.publish(1, 0, [row(1, "a"), row(2, "a")])
    older, newer = case.stage(1, [row(1, "b"), row(3, "b")]), case.stage(2, [row(3, "c")], [row(2, "c")])
    case.commit(2, older, newer)
    assert named(tmp_path) == {1: "b", 2: "c", 3: "c"}


def test_rows_that_are_all_key_are_kept_once(tmp_path: Path) -> None:
    case = start(tmp_path, mode="upsert", key=["id", "name"])
    case.publish(1, 0, rows(1, 2, 1))
    case.publish(2, 1, rows(2, 3))
    assert sorted(named(tmp_path)) == [1, 2, 3]
    case.sink.rewind(Epoch(1))
    assert sorted(named(tmp_path)) == [1, 2]


def test_rewind_brings_replaced_rows_back_at_random(tmp_path: Path) -> None:
    rng = random.Random(7)
    case = start(tmp_path, mode="upsert", key="id")
    states: dict[int, dict[int, str]] = {0: {}}
    newest = 0
    for epoch in range(1, 60):
        if newest and rng.random() < 0.25:
            back_to = rng.choice(sorted(states))
            case.sink.rewind(Epoch(back_to))
            states = {at: state for at, state in states.items() if at <= back_to}
            newest = max(states)
            assert named(tmp_path) == states[newest]
            assert (case.sink.published() or 0) == newest
        tasks = [[row(rng.randrange(12), f"{epoch}-{task}-{n}") for n in range(rng.randrange(5))] for task in range(2)]
        case.publish(epoch, epoch, *tasks)
        if any(tasks):
            states[epoch] = states[newest] | {one["id"]: one["name"] for task in tasks for one in task}
            newest = epoch
        assert named(tmp_path) == states[newest]


def test_a_null_in_a_key_fails_the_batch(tmp_path: Path) -> None:
    case = start(tmp_path, mode="upsert", key="name")
    with pytest.raises(SinkError, match="no value in a key column"):
        case.stage(0, [{"id": 1, "name": None}])


def test_a_year_that_cannot_be_written_fails_the_batch_and_not_the_epoch(tmp_path: Path) -> None:
    """As 9999-12-31 23:59:59 in New York is: in UTC it is in the year 10000."""
    schema = pa.schema([("id", pa.int64()), ("until", pa.timestamp("us", "UTC"))])
    case = start(tmp_path, schema)
    late = pa.array([253_402_318_799_000_000]).cast(pa.timestamp("us", "UTC"))
    writer = case.sink.stager().open(
        StageAttempt(
            flow=case.context.flow,
            operator=case.context.operator,
            generation=Generation(1),
            batch=BatchId(0),
            partition=0,
            attempt="first",
        )
    )
    with pytest.raises(SinkError, match="year 9999"):
        writer.write(pa.RecordBatch.from_arrays([pa.array([1]), late], schema=schema))


# ---------------------------------------------------------------------- how far back


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": ["id"]}])
def test_only_so_many_epochs_can_be_taken_back(tmp_path: Path, options: dict[str, Any]) -> None:
    case = start(tmp_path, rewind_epochs=3, **options)
    for epoch in range(1, 9):
        case.publish(epoch, epoch, rows(epoch))
    with pytest.raises(SinkError, match="epoch 5 at the earliest"):
        case.sink.rewind(Epoch(4))
    assert sorted(named(tmp_path)) == [*range(1, 9)]
    case.sink.rewind(Epoch(5))
    assert sorted(named(tmp_path)) == [*range(1, 6)]
    assert case.sink.published() == 5
    with closing(sqlite3.connect(tmp_path / "data.sqlite")) as db:
        assert db.execute("SELECT COUNT(*) FROM cutline_epochs").fetchone() == (1,)


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": ["id"]}])
def test_a_table_can_be_rewound_to_every_checkpoint_that_stays(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.connectors.sqlite.sink.REWIND_EPOCHS", 2)
    rng, is_upsert = random.Random(5), bool(options)
    case = start(tmp_path, **options)
    states: dict[int, list[str]] = {0: []}
    newest, points = 0, {Epoch(0)}
    for epoch in range(1, 120):
        points = {Epoch(epoch), *(one for one in points if rng.random() > 0.08)}
        case.rewind_points = tuple(sorted(points))
        changed = [row(rng.randrange(9), f"{epoch}-{n}") for n in range(rng.randrange(4))]
        case.publish(epoch, epoch, changed)
        before = {} if not is_upsert else {text.partition("=")[0]: text for text in states[newest]}
        texts = {str(one["id"]): f"{one['id']}={one['name']}" for one in changed}
        states[epoch] = (
            sorted({**before, **texts}.values())
            if is_upsert
            else sorted([*states[newest], *(f"{one['id']}={one['name']}" for one in changed)])
        )
        newest = epoch
        if epoch % 10 == 0:
            back_to = rng.choice(sorted(points))
            case.sink.rewind(back_to)
            states = {at: state for at, state in states.items() if at <= back_to}
            newest, points = back_to, {one for one in points if one <= back_to}
            found = sorted(f"{one['id']}={one['name']}" for one in read_sqlite(tmp_path / "data.sqlite"))
            assert found == states[back_to]
    with closing(sqlite3.connect(tmp_path / "data.sqlite")) as db:
        (listed,) = db.execute("SELECT COUNT(*) FROM cutline_epochs").fetchone()
    assert listed <= len(points) + 4


def test_a_table_is_not_rewound_to_an_epoch_that_no_checkpoint_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.connectors.sqlite.sink.REWIND_EPOCHS", 1)
    case = start(tmp_path, mode="upsert", key=["id"])
    for epoch in range(1, 9):
        case.rewind_points = (Epoch(2), Epoch(6), Epoch(epoch))
        case.publish(epoch, epoch, rows(epoch))
    sink = case.sink
    assert isinstance(sink, SQLite)
    assert (sink.oldest_rewind(), sink.rewind_gaps()) == (2, ((3, 6),))
    with pytest.raises(SinkError, match="restore the flow to epoch 6, or to a checkpoint before epoch 3"):
        sink.rewind(Epoch(4))
    assert sorted(named(tmp_path)) == [*range(1, 9)]
    sink.rewind(Epoch(2))
    assert sorted(named(tmp_path)) == [1, 2]


def test_a_ledger_of_the_former_version_is_taken_up(tmp_path: Path) -> None:
    case = start(tmp_path, mode="upsert", key=["id"])
    case.publish(1, 1, rows(1))
    with closing(sqlite3.connect(tmp_path / "data.sqlite")) as db:
        db.execute("ALTER TABLE cutline_epochs DROP COLUMN merged_from")
        db.commit()
    case.open(SQLite(tmp_path / "data.sqlite", "totals", mode="upsert", key=["id"]))
    case.publish(2, 2, rows(2))
    case.sink.rewind(Epoch(1))
    assert sorted(named(tmp_path)) == [1]


def test_without_rewind_nothing_is_kept_for_it(tmp_path: Path) -> None:
    case = start(tmp_path, rewindable=False)
    case.publish(1, 0, rows(1))
    assert not case.sink.can_rewind
    with closing(sqlite3.connect(tmp_path / "data.sqlite")) as db:
        assert [name for _, name, *_ in db.execute("PRAGMA table_info(totals)")] == ["id", "name"]
    with pytest.raises(SinkError, match="rewindable"):
        case.sink.rewind(NO_EPOCH)


# ---------------------------------------------------------------------- one file, several users


def test_several_sinks_and_flows_share_a_database(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path, table="others", name="others-out")
    first.publish(1, 0, rows(1))
    second.publish(1, 0, rows(10))
    first.publish(2, 1, rows(2))
    first.sink.rewind(Epoch(1))
    assert (first.sink.published(), second.sink.published()) == (1, 1)
    assert [one["id"] for one in read_sqlite(tmp_path / "data.sqlite", "others")] == [10]


def pair(tmp_path: Path) -> tuple[Case, Case]:
    return start(tmp_path), start(tmp_path, table="others", name="others-out")


def others(tmp_path: Path) -> list[int]:
    return [one["id"] for one in read_sqlite(tmp_path / "data.sqlite", "others")]


def test_whichever_commits_first_publishes_for_all_of_the_flow(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    for epoch in (1, 2, 3):
        staged = [case.stage(epoch, rows(epoch)) for case in (first, second)]
        tokens = [case.sink.prepare(Epoch(epoch), [one]) for case, one in zip((first, second), staged, strict=True)]
        permits = [case.permit(epoch, [one]) for case, one in zip((first, second), staged, strict=True)]
        first.sink.commit(permits[0], [staged[0]], tokens[0])
        assert others(tmp_path) == [*range(1, epoch + 1)]
        second.sink.commit(permits[1], [staged[1]], tokens[1])
        assert others(tmp_path) == [*range(1, epoch + 1)]
        for case, permit in zip((first, second), permits, strict=True):
            case.previous, case.through = Epoch(epoch), permit.through_batch
    assert first.sink.published() == second.sink.published() == 3
    assert not list(tmp_path.rglob("*.parquet"))


def test_what_was_bound_again_while_an_epoch_was_open_is_published_once(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    mine, theirs = first.stage(1, rows(1)), [second.stage(1, rows(1)), second.stage(2, rows(2))]
    token = first.sink.prepare(Epoch(1), [mine])
    second.sink.prepare(Epoch(1), theirs[:1])
    second.sink.prepare(Epoch(2), theirs)  # nobody knows yet whether epoch 1 will be complete
    first.sink.commit(first.permit(1, [mine]), [mine], token)
    assert others(tmp_path) == [1]
    first.previous, first.through = Epoch(1), first.permit(1, [mine]).through_batch
    more = first.stage(2, rows(2))
    first.commit(2, more)
    assert others(tmp_path) == [1, 2]
    # Its own permits come late, and find everything done.
    for epoch, batch in ((1, theirs[0]), (2, theirs[1])):
        permit = second.permit(epoch, [batch])
        second.sink.commit(permit, [batch], {})
        second.previous, second.through = Epoch(epoch), permit.through_batch
    assert others(tmp_path) == [1, 2]


def test_what_another_process_prepared_or_who_is_not_as_far_waits_for_its_own_permit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair(tmp_path)
    theirs = second.stage(1, rows(1))
    second.sink.prepare(Epoch(1), [theirs])
    monkeypatch.setattr("cutline.connectors.shared_epochs._processes", {})
    first.publish(1, 1, rows(1))
    assert others(tmp_path) == []
    second.sink.prepare(Epoch(2), [theirs])
    first.publish(2, 2, rows(2))
    assert others(tmp_path) == [], "it has yet to publish epoch 1"
    second.commit(1, theirs)
    assert others(tmp_path) == [1]


def test_after_going_back_without_the_tables_no_batch_is_taken_for_one_that_they_have(tmp_path: Path) -> None:
    """With on_rollback="keep" batches of the same numbers come again, in a later generation."""
    cases = pair(tmp_path)

    def publish(epoch: int, *batches: int) -> None:
        staged = [[case.stage(batch, rows(batch)) for batch in batches] for case in cases]
        tokens = [case.sink.prepare(Epoch(epoch), own) for case, own in zip(cases, staged, strict=True)]
        for case, own, token in zip(cases, staged, tokens, strict=True):
            permit = case.permit(epoch, own)
            case.sink.commit(permit, own, token)
            case.previous, case.through = Epoch(epoch), permit.through_batch

    publish(1, 1)
    publish(2, 2)
    for case in cases:
        case.generation, case.previous, case.through = Generation(2), Epoch(1), BatchId(1)
    publish(3, 2, 3)
    assert others(tmp_path) == [1, 2, 2, 3]
    publish(4, 4)
    assert others(tmp_path) == [1, 2, 2, 3, 4]


def test_tables_go_back_together(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    for epoch in (1, 2):
        first.publish(epoch, epoch, rows(epoch))
        second.publish(epoch, epoch, rows(epoch))
    assert first.sink.rewind_group() == second.sink.rewind_group()  # type: ignore[attr-defined]
    first.sink.rewind_together([(first.sink, Epoch(1)), (second.sink, Epoch(1))])  # type: ignore[attr-defined]
    assert (sorted(named(tmp_path)), others(tmp_path)) == ([1], [1])
    assert first.sink.oldest_rewind() == NO_EPOCH  # type: ignore[attr-defined]


def test_a_reader_is_not_blocked_and_sees_whole_epochs(tmp_path: Path) -> None:
    case = start(tmp_path)
    seen: list[Counter[int]] = []
    is_over = threading.Event()

    def poll() -> None:
        with closing(sqlite3.connect(tmp_path / "data.sqlite", timeout=0)) as db:
            while not is_over.is_set():
                seen.append(Counter(number // 10 for (number,) in db.execute("SELECT id FROM totals")))

    reader = threading.Thread(target=poll)
    reader.start()
    for epoch in range(1, 200):
        case.publish(epoch, epoch, *(rows(10 * epoch + task) for task in range(4)))
        if len({len(counts) for counts in seen}) >= 5:
            break
    is_over.set()
    reader.join()
    assert all(count == 4 for counts in seen for count in counts.values())
    assert len({len(counts) for counts in seen}) > 1


def test_a_database_that_somebody_holds_locked_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    monkeypatch.setattr("cutline.connectors.sqlite.sink.BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(tmp_path / "data.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(NotDone, match="locked"):
            case.commit(1, staged)
        other.execute("ROLLBACK")
    case.commit(1, staged)
    assert named(tmp_path) == {1: "row 1"}


def test_two_that_hold_the_same_permit_publish_once(tmp_path: Path) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1), rows(2))
    permit = case.permit(1, [staged])
    zombie = start(tmp_path).sink
    case.sink.commit(permit, [staged], {})
    zombie.commit(permit, [staged], {})
    assert TestAppend().ids(tmp_path) == [1, 2]
    case.sink.rewind(NO_EPOCH)
    with pytest.raises(FencedError):
        zombie.commit(permit, [staged], {})


def test_staged_files_are_gone_after_their_epoch(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.stage(0, rows(1))  # an attempt that failed
    case.publish(1, 0, rows(1))
    later = case.stage(1, rows(2))
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    case.sink.abort([later])
    assert not list(tmp_path.rglob("*.parquet"))


# ---------------------------------------------------------------------- what must be refused


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(SinkError, match="was created with"):
        start(tmp_path, mode="upsert", key="id")
    with pytest.raises(SinkError, match="belongs to sink totals-out of flow orders"):
        start(tmp_path, name="another")
    with pytest.raises(SinkError, match="has written to table totals so far"):
        start(tmp_path, table="more")
    with closing(sqlite3.connect(tmp_path / "data.sqlite")) as db:
        db.execute("CREATE TABLE theirs (id)")
    with pytest.raises(SinkError, match="no Cutline sink created it"):
        start(tmp_path, table="Theirs", name="another")
    with pytest.raises(SinkError, match="taken"):
        start(tmp_path, SIMPLE.append(pa.field("cutline_epoch", pa.int64())), table="t", name="t")
    with pytest.raises(SinkError, match="nothing"):
        start(tmp_path, mode="upsert", key="nothing", table="t", name="t")


def test_modes_need_what_they_need() -> None:
    for table, options in (
        ("t", {"mode": "upsert"}),
        ("t", {"key": ["a"]}),
        ("t", {"mode": "else"}),
        ("cutline_x", {}),
        ("t", {"rewind_epochs": 0}),
    ):
        with pytest.raises(ConfigError):
            SQLite("unused", table, **options)


def test_odd_names_and_bytes_inside_json(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field('we"ird', pa.int64()),
            pa.field("select", pa.list_(pa.binary())),
            pa.field("m", pa.map_(pa.int8(), pa.bool_())),
        ]
    )
    case = start(tmp_path, schema, table='my "table"', mode="upsert", key='we"ird')
    case.publish(1, 0, [{'we"ird': 1, "select": [b"\x00"], "m": [(1, True)]}])
    case.publish(2, 1, [{'we"ird': 1, "select": None, "m": None}])
    case.sink.rewind(Epoch(1))
    with closing(sqlite3.connect(tmp_path / "data.sqlite")) as db:
        ((_, raw, pairs),) = db.execute('SELECT * FROM "my ""table"""').fetchall()
    assert [base64.b64decode(one) for one in json.loads(raw)] == [b"\x00"]
    assert json.loads(pairs) == [[1, True]]


@pytest.mark.parametrize("zone", [None, "UTC", "+02:00"])
def test_timestamps_become_the_same_texts_together_as_one_by_one(zone: str | None) -> None:
    edges = [datetime.min, datetime(1969, 12, 31, 23, 59, 59, 1), datetime(2024, 2, 29), datetime.max, None]  # noqa: DTZ001, DTZ901
    column = pa.array(edges, pa.timestamp("us")).cast(pa.timestamp("us", "UTC" if zone else None))
    one_by_one = [None if value is None else sqlite_rows._timestamp(value) for value in column.to_pylist()]
    given = column.cast(pa.timestamp("us", zone)) if zone else column
    assert [row[0] for row in sqlite_rows.tuples_of(pa.record_batch([given], ["at"]))] == one_by_one
