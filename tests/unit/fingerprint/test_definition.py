"""Which changes of a flow's file change its code, and which do not."""

from __future__ import annotations

import linecache
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.base import records
from cutline.errors import DamagedRecordError
from cutline.fingerprint import definition
from cutline.fingerprint.definition import code_of, place_of
from cutline.flow import Flow
from cutline.model.generation import FlowCode
from cutline.model.ids import OperatorId
from cutline.sinks import Parquet, Postgres
from cutline.testing.twins.sink import MemorySink

FILE = '''\
"""A flow."""
import functools
from pathlib import Path
import cutline
from cutline.sinks import Parquet

HERE = Path(__file__).parent
RATE = 0.25
PASSWORD = "hunter2"
TABLE = {"a": 1}
TABLE["b"] = 2
flow = cutline.Flow("sales")

def scaled(value):
    """Scale it."""
    return value * RATE

def unrelated(value):
    return value

def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@flow.operator()
def orders(spark):
    return spark.readStream.format("rate").option("password", "hunter2").load(HERE)

@flow.operator(inputs=[orders], output_mode="update")
@logged
def totals(df):
    """Sum them."""
    # A comment.
    limit = 100
    return df.where(df.amount < limit).select(scaled(df.amount), TABLE["a"])

flow.sink(totals, Parquet(HERE / "out", partition_by=["day"]))
'''
TOTALS, ORDERS = OperatorId("totals"), OperatorId("orders")


def code_in(folder: Path, text: str = FILE) -> FlowCode:
    folder.mkdir(exist_ok=True)
    path = folder / "sales.py"
    path.write_text(text)
    linecache.clearcache()  # the text of the test before may have been as long, and of the same second
    flow = next(one for one in runpy.run_path(str(path)).values() if isinstance(one, Flow))
    return code_of(flow.graph(), flow.functions, flow.sinks)


def changed(folder: Path, old: str, new: str) -> FlowCode:
    assert old in FILE
    return code_in(folder, FILE.replace(old, new))


def test_the_same_file_is_the_same_code_wherever_it_is(tmp_path: Path) -> None:
    assert code_in(tmp_path / "a") == code_in(tmp_path / "b")


def test_another_process_finds_the_same_code(tmp_path: Path) -> None:
    """Sets and hashes of texts have another order in each process."""
    text = FILE.replace("limit = 100", 'limit = 100 if df in {"a", "b", "c", "d"} else 200')
    here = code_in(tmp_path, text)
    script = (
        "import runpy, sys; from cutline.fingerprint.definition import code_of\n"
        "flow = runpy.run_path(sys.argv[1])['flow']\n"
        "print(code_of(flow.graph(), flow.functions, flow.sinks).hash)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "sales.py")], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == here.hash


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A comment.", "# Another one, and longer."),
        ('"""Sum them."""', '"""Add them up."""'),
        ("limit = 100\n", "limit = (100)\n\n"),
        ("return value\n", "return -value\n"),
        ('"hunter2"', '"correct horse"'),
        ('cutline.Flow("sales")', 'cutline.Flow("sales-two")'),
    ],
    ids=["comment", "docstring", "formatting", "unrelated function", "secret", "name of the flow"],
)
def test_what_makes_no_difference_is_the_same_code(tmp_path: Path, old: str, new: str) -> None:
    assert changed(tmp_path, old, new) == code_in(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("limit = 100", "limit = 101"),
        ("df.amount < limit", "df.amount <= limit"),
        ("value * RATE", "value + RATE"),
        ("RATE = 0.25", "RATE = 0.26"),
        ('TABLE["b"] = 2', 'TABLE["b"] = 3'),
        ("return function(*args)", "return function(*args).limit(1)"),
        ("df.where(df.amount < limit)", 'df.where("passengers = 6")'),
    ],
    ids=["constant", "operator", "helper", "global", "change of a global", "decorator", "text"],
)
def test_a_changed_function_differs_alone(tmp_path: Path, old: str, new: str) -> None:
    before, now = code_in(tmp_path), changed(tmp_path, old, new)
    assert now.hash != before.hash
    assert now.operators[TOTALS].function != before.operators[TOTALS].function
    assert now.operators[TOTALS].declaration == before.operators[TOTALS].declaration
    assert now.operators[ORDERS] == before.operators[ORDERS]
    assert now.sinks == before.sinks


def test_a_changed_declaration_differs(tmp_path: Path) -> None:
    before, now = code_in(tmp_path), changed(tmp_path, 'output_mode="update"', "subtasks=3")
    assert now.operators[TOTALS].function == before.operators[TOTALS].function
    assert now.operators[TOTALS].declaration != before.operators[TOTALS].declaration


@pytest.mark.parametrize(("old", "new"), [('["day"]', '["hour"]'), ('"out"', '"elsewhere"')])
def test_a_changed_setting_of_a_sink_differs(tmp_path: Path, old: str, new: str) -> None:
    before, now = code_in(tmp_path), changed(tmp_path, old, new)
    assert now.sinks != before.sinks
    assert now.operators == before.operators


OWN_SINK = """\
import cutline
from cutline.sinks import Parquet
from cutline.testing.twins.sink import MemorySink

class Base(MemorySink):
    def encoded(self): return "one"

class Mine(Base):
    LIMIT = 1
    def __init__(self, url_table="a", api_token="secret"):
        super().__init__()
        self.table_name, self._auth = url_table, "Bearer " + api_token
    @property
    def most(self): return 100
    @staticmethod
    def shifted(value): return value

class Days(Parquet):
    def __init__(self, folder, columns):
        super().__init__(folder, partition_by=columns)

flow = cutline.Flow("sales")
@flow.operator()
def orders(spark): ...
flow.sink(orders, Mine("b"), name="mine")
flow.sink(orders, Days("/data/out", ["day"]), name="days")
"""


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ('"one"', '"two"', ["mine"]),
        ("LIMIT = 1", "LIMIT = 2", ["mine"]),
        ("return 100", "return 101", ["mine"]),
        ("return value", "return -value", ["mine"]),
        ('Mine("b")', 'Mine("c")', ["mine"]),
        ('api_token="secret"', 'api_token="other"', []),
        ('["day"]', '["hour"]', ["days"]),
        ("/data/out", "/elsewhere/out", []),
    ],
)
def test_a_sink_of_the_users_own_counts_with_all_it_is_made_of(
    tmp_path: Path, old: str, new: str, differs: list[str]
) -> None:
    before, now = code_in(tmp_path, OWN_SINK), code_in(tmp_path, OWN_SINK.replace(old, new))
    assert [name for name, one in now.sinks.items() if before.sinks[name] != one] == differs


def test_a_sink_that_has_run_is_the_same_code(tmp_path: Path) -> None:
    """In a notebook a flow is started again with the same objects."""
    (tmp_path / "sales.py").write_text(OWN_SINK.replace("/data/out", str(tmp_path / "out")))
    flow = runpy.run_path(str(tmp_path / "sales.py"))["flow"]
    before = code_of(flow.graph(), flow.functions, flow.sinks)
    for name, sink in flow.sinks.items():
        sink.__dict__ |= {"_schema_ipc": b"abc", "_opened_at": 12, "_rows": [name]}
    assert code_of(flow.graph(), flow.functions, flow.sinks) == before


def test_the_place_of_a_sink_is_told_without_its_secrets(tmp_path: Path) -> None:
    one, same, table, other = (
        Postgres("postgresql://u:a@host/db", "t"),
        Postgres("postgresql://u:b@host/db", "t", rewindable=False),
        Postgres("postgresql://u:a@host/db", "t2"),
        Postgres("postgresql://u:a@elsewhere/db", "t"),
    )
    assert place_of(one) == place_of(same)
    assert len({place_of(sink) for sink in (one, table, other)}) == 3
    assert place_of(Parquet(tmp_path / "a")) != place_of(Parquet(tmp_path / "b"))
    assert place_of(MemorySink()) == ""


@pytest.mark.parametrize("package", ["pyspark", "cutline"])
def test_another_version_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before, versions = code_in(tmp_path), definition.version_of
    monkeypatch.setattr(definition, "version_of", lambda name: "9.9" if name == package else versions(name))
    now = code_in(tmp_path)
    assert (now.hash != before.hash, now.operators, now.sinks) == (True, before.operators, before.sinks)


@pytest.mark.parametrize(
    "change",
    [
        {"hash": "../../etc/x"},
        {"hash": "ABCDEF012345"},
        {"python": "3\x1b[2J"},
        {"pyspark": "9" * 65},
        {"operators": {"../x": {"function": "", "declaration": ""}}},
        {"operators": {"x": {"function": "?", "declaration": ""}}},
        {"sinks": {"a b": ""}},
    ],
)
def test_a_description_that_no_start_writes_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    plain = msgspec.to_builtins(code_in(tmp_path))
    assert records.decode("code", records.encode("code", plain), FlowCode)
    with pytest.raises(DamagedRecordError):
        records.decode("code", records.encode("code", {**plain, **change}), FlowCode)
