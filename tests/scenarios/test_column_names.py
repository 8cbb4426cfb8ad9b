"""Columns with odd names in every sink that needs no server: as a value, as a key, as a partition, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from cutline.connectors.delta.commits import logged_path
from cutline.connectors.reading import read
from cutline.errors import SinkError
from cutline.model.ids import Epoch
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Foreach, Parquet, SQLite
from cutline.testing.conformance.sinks import Case, Row, SinkSuite
from tests.support.column_names import DOTTED, GOOD, LONG, OWN, WITH_NUL
from tests.support.sink_targets import iceberg

KINDS: dict[str, Callable[[Path, str], Sink]] = {
    "Parquet": lambda path, _: Parquet(path / "out"),
    "Parquet, partition": lambda path, name: Parquet(path / "out", partition_by=[name]),
    "Delta": lambda path, _: Delta(path / "out"),
    "Delta, partition": lambda path, name: Delta(path / "out", partition_by=[name]),
    "Delta, key": lambda path, name: Delta(path / "out", mode="upsert", key=[name]),
    "Delta, second key": lambda path, name: Delta(path / "out", mode="upsert", key=["value", name]),
    "Delta, key and partition": lambda path, name: Delta(path / "out", mode="upsert", key=name, partition_by=name),
    "Delta, overwritten": lambda path, name: Delta(path / "out", mode="overwrite_partitions", partition_by=[name]),
    "Iceberg": lambda path, _: iceberg(path),
    "Iceberg, partition": lambda path, name: iceberg(path, partition_by=[name]),
    "Iceberg, key": lambda path, name: iceberg(path, mode="upsert", key=[name]),
    "Iceberg, overwritten": lambda path, name: iceberg(path, mode="overwrite_partitions", partition_by=[name]),
    "SQLite": lambda path, _: SQLite(path / "out.db", "out"),
    "SQLite, key": lambda path, name: SQLite(path / "out.db", "out", mode="upsert", key=[name]),
    "SQLite, for good": lambda path, name: SQLite(path / "out.db", "out", mode="upsert", key=[name], rewindable=False),
}
#: Where one of these works, the others of GOOD do too.
RISKY = ("a.b", "[0]", "a,b;(c)", "%2F", 'quo"ted', "a`b", "", "a\nb\tc", "min.value", "partition")
REPLACE = {kind for kind in KINDS if "key" in kind or kind.endswith(("overwritten", "for good"))} - {
    "Delta, second key"
}
FOLDERS = {kind for kind in KINDS if kind.endswith(("partition", "overwritten"))}


def schema_with(name: str) -> pa.Schema:
    # The statistics of a.b and of a's field b must not be mistaken for one another: those of the field are far away.
    return pa.schema([(name, pa.int64()), ("a", pa.struct([("b", pa.int64())])), ("value", pa.int64())])


def row(name: str, key: int, value: int) -> Row:
    return {name: key, "a": {"b": 1_000_000}, "value": value}


def pairs(sink: Sink, name: str) -> list[tuple[Any, int]]:
    """Key and value of each row that a reader sees."""
    return sorted((found[name], found["value"]) for found in read(sink).to_arrow().to_pylist())


def opened(kind: str, path: Path, name: str) -> Case:
    path.mkdir()
    sink, context = KINDS[kind](path, name), SinkSuite().context(schema_with(name))
    sink.open(context)
    return Case(sink=sink, context=context)


def story_of(kind: str, path: Path, name: str) -> list[Any]:
    """What readers see after two epochs with the same keys, and after a rewind to the first."""
    case = opened(kind, path, name)
    for epoch in (1, 2):
        keys = [row(name, key, 7 if kind == "Delta, second key" else epoch) for key in range(5)]
        case.publish(epoch, epoch - 1, keys[:3], keys[3:])
    seen: list[Any] = [pairs(case.sink, name)]
    if case.sink.can_rewind:
        case.sink.rewind(Epoch(1))
        seen.append(pairs(KINDS[kind](path, name), name))
    return seen


def truth_of(kind: str) -> list[Any]:
    if kind == "Delta, second key":
        return [[(key, 7) for key in range(5)]] * 2
    first = [(key, 1) for key in range(5)]
    second = [(key, 2) for key in range(5)]
    after_two = second if kind in REPLACE else sorted(first + second)
    return [after_two] if kind == "SQLite, for good" else [after_two, first]


def names_for(kind: str, *names: str) -> list[str]:
    """Iceberg takes ``a.b`` for the field ``b`` of a struct ``a``, if there is one."""
    return [name for name in names if name != "a.b" or not kind.startswith("Iceberg")]


def test_iceberg_takes_a_dotted_name_unless_it_is_that_of_a_field(tmp_path: Path) -> None:
    schema = pa.schema([("a.b", pa.int64()), ("value", pa.int64())])
    ways: list[dict[str, Any]] = [{}, {"mode": "upsert", "key": ["a.b"]}, {"partition_by": ["a.b"]}]
    for number, options in enumerate(ways):
        path = tmp_path / str(number)
        path.mkdir()
        sink, context = iceberg(path, **options), SinkSuite().context(schema)
        sink.open(context)
        Case(sink=sink, context=context).publish(1, 0, [{"a.b": 1, "value": 2}])
        assert read(sink).to_arrow().to_pylist() == [{"a.b": 1, "value": 2}]
    with pytest.raises(SinkError, match="does not tell these columns apart"):
        iceberg(tmp_path).open(SinkSuite().context(schema_with("a.b")))


@pytest.mark.parametrize("kind", ["Parquet", "Delta", "Iceberg", "SQLite"])
def test_every_name_may_be_that_of_a_value(tmp_path: Path, kind: str) -> None:
    names = names_for(kind, *GOOD, *DOTTED, LONG)
    schema = pa.schema([*((name, pa.int64()) for name in names), ("a", pa.struct([("b", pa.int64())]))])
    sink, context = KINDS[kind](tmp_path, ""), SinkSuite().context(schema)
    sink.open(context)
    sent = {name: number for number, name in enumerate(names)} | {"a": {"b": -1}}
    Case(sink=sink, context=context).publish(1, 0, [sent])
    assert read(sink).to_arrow().to_pylist() == [sent]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "," in kind])
def test_every_name_may_be_that_of_a_key_or_partition(tmp_path: Path, kind: str) -> None:
    names = names_for(kind, *([*GOOD, *DOTTED, LONG] if kind in ("Delta, key", "SQLite, key") else RISKY))
    if kind not in FOLDERS:
        names += [*DOTTED, LONG]
    elif kind != "Parquet, partition":
        names += DOTTED
    found = {name: story_of(kind, tmp_path / str(number), name) for number, name in enumerate(names)}
    assert found == dict.fromkeys(names, truth_of(kind))


def test_a_function_gets_every_name(tmp_path: Path) -> None:
    names = [*GOOD, *DOTTED, LONG, *OWN]
    got: list[Row] = []
    sink = Foreach(lambda batches, _epoch, _key: got.extend(*(one.to_pylist() for one in batches)), staging=tmp_path)
    context = SinkSuite().context(pa.schema([(name, pa.int64()) for name in names if name != OWN[1]]))
    sink.open(context)
    sent = {name: number for number, name in enumerate(names) if name != OWN[1]}
    Case(sink=sink, context=context).publish(1, 0, [sent])
    assert got == [sent]


@pytest.mark.parametrize(
    ("kinds", "names", "said"),
    [
        (list(KINDS), [WITH_NUL], "NUL"),
        (list(KINDS), ["A", "VALUE"], "two columns have the same name"),
        (["Parquet, partition"], DOTTED, "begin with a dot"),
        (FOLDERS, [LONG], "too long for the name of a folder"),
        (["Parquet", "Parquet, partition"], OWN[:2], "reserved"),
        (["SQLite", "SQLite, key", "SQLite, for good"], OWN, "is taken"),
    ],
)
def test_what_cannot_be_a_name_is_refused_when_the_sink_is_opened(
    tmp_path: Path, kinds: list[str], names: list[str], said: str
) -> None:
    for number, (kind, name) in enumerate((kind, name) for kind in kinds for name in names):
        with pytest.raises(SinkError, match=said) as refused:
            opened(kind, tmp_path / str(number), name)
        assert refused.value.next_step


def test_fields_of_a_struct_need_names_of_their_own(tmp_path: Path) -> None:
    twice = pa.schema([("id", pa.int64()), ("a", pa.struct([("b", pa.int64()), ("b", pa.int64())]))])
    with pytest.raises(SinkError, match="two fields of a struct") as refused:
        SQLite(tmp_path / "out.db", "out").open(SinkSuite().context(twice))
    assert refused.value.where["column"] == "a"
    ended = pa.schema([("id", pa.int64()), ("a", pa.struct([(WITH_NUL, pa.int64())]))])
    with pytest.raises(SinkError, match="NUL"):
        Delta(tmp_path / "out").open(SinkSuite().context(ended))


# ------------------------------------------------------------------------------------------------- names of files


def test_the_log_spells_every_file_as_deltalake_does(tmp_path: Path) -> None:
    """Files are added by Cutline and removed by deltalake, which compares what it spells itself."""
    table = DeltaTable.create(tmp_path, pa.schema([("x", pa.int64())]))
    characters = [chr(code) for code in range(1, 127) if chr(code) != "/"] + ["é", "日", "😀", "%2C", "a b", "..", "~"]
    paths = [f"x={character}/part-{number}.parquet" for number, character in enumerate(characters)]
    adds = [
        AddAction(path=path, size=1, partition_values={}, modification_time=0, data_change=True, stats="{}")
        for path in paths
    ]
    table.create_write_transaction(list(adds), mode="append", schema=table.schema())
    lines = (tmp_path / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    spelled = [action["add"]["path"] for action in map(json.loads, lines) if "add" in action]
    assert sorted(spelled) == sorted(map(logged_path, paths))


@pytest.mark.parametrize("mode", ["upsert", "overwrite_partitions"])
def test_a_rewind_removes_files_of_every_partition(tmp_path: Path, mode: Any) -> None:
    key = {"key": ["place"]} if mode == "upsert" else {}
    sink = Delta(tmp_path / "out", mode=mode, partition_by=["place"], **key)
    context = SinkSuite().context(pa.schema([("place", pa.string()), ("value", pa.int64())]))
    sink.open(context)
    case = Case(sink=sink, context=context)
    places = ["Paris, France", "a@b", "x+y", "$", "(1)", "é", "a;b", "a&b", "it's!", "a/b", "100%", "a:b", "\n", "none"]
    for epoch in (1, 2):
        case.publish(epoch, epoch - 1, [{"place": place, "value": epoch} for place in places])
    sink.rewind(Epoch(1))
    assert pairs(sink, "place") == sorted((place, 1) for place in places)


def test_files_that_an_earlier_version_spelled_otherwise_are_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.connectors.delta.commits._LEFT_AS_IT_IS", "/=")
    case = opened("Delta, overwritten", tmp_path / "table", "a,b")
    for epoch in (1, 2):
        case.publish(epoch, epoch - 1, [row("a,b", 1, epoch)])
    monkeypatch.undo()
    with pytest.raises(SinkError, match="former versions"):
        case.sink.rewind(Epoch(1))
    assert pairs(case.sink, "a,b") == [(1, 2)]
