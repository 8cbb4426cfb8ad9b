"""Changes of a file that a function's hash must see, and those it must not see."""

from __future__ import annotations

import importlib
import linecache
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from cutline.fingerprint.functions import Functions


def hashed(folder: Path, text: str) -> str:
    """The hash of ``f`` at a start of its own."""
    path = folder / "flow.py"
    path.write_text(text)
    linecache.clearcache()  # the text of the test before may have been as long, and of the same second
    return Functions().hash(runpy.run_path(str(path))["f"])


def is_seen(folder: Path, text: str, old: str, new: str) -> bool:
    assert old in text
    before = hashed(folder, text)
    assert hashed(folder, text) == before, "the same text is the same code"
    return hashed(folder, text.replace(old, new)) != before


def query(expression: str) -> str:
    return f"def f(df):\n    return df.{expression}\n"


@pytest.mark.parametrize(
    ("expression", "old", "new"),
    [
        ('groupBy("user").agg({"tokens": "sum"})', '"sum"', '"max"'),
        ('groupBy("user").agg({"token": "count"})', '"count"', '"max"'),
        ('groupBy("token", "day").count()', '"day"', '"hour"'),
        ('select("signature", "amount")', '"amount"', '"price"'),
        ('withColumnRenamed("token", "session")', '"session"', '"user"'),
        ("where(\"token = 'a'\")", "'a'", "'b'"),
        ("where(\"user = 'x' and host = 'y' and password = 'a'\")", "'a'", "'b'"),
        ('where("pass = 1 and x > 2")', "= 1", "= 0"),
        ('sql("select * from t where sas=old_limit")', "old_limit", "new_limit"),
        ("sql(\"select 'http://x' as url from t where token='a'\")", "'a'", "'b'"),
        ('withColumn("token_count", "a")', '"a"', '"b"'),
    ],
)
def test_columns_are_not_taken_for_secrets(tmp_path: Path, expression: str, old: str, new: str) -> None:
    assert is_seen(tmp_path, query(expression), old, new)


@pytest.mark.parametrize(
    "expression",
    [
        'option("password", "old")',
        'option("fs.s3a.secret.key", "old")',
        'options(**{"token": "old"})',
        'options(token="old")',
        'conf.set("spark.ssl.keyPassword", "old")',
        'jdbc({"password": "old"})',
        'jdbc(connect(password="old"))',
        'jdbc("postgresql://me:old@host/db")',
        'jdbc("jdbc:postgresql://host/db?user=me&password=old")',
        'jdbc("host=a dbname=b password=old")',
        "jdbc(\"host=a password='old'\")",
        'jdbc("Server=a;User Id=b;Password=old;")',
        'note("see postgresql://me:old@host/db for more")',
    ],
)
def test_a_password_that_is_rotated_is_no_change_of_code(tmp_path: Path, expression: str) -> None:
    assert not is_seen(tmp_path, query(expression), "old", "new")


METHODS = """
class Base:
    LIMIT = 3
    @staticmethod
    def shifted(x): return x + 1
class Pipe(Base):
    RATE = 2
    def __init__(self, rate, *, table="a"):
        import time
        scaled = rate * 10
        self.rate, self.name = scaled, table
        self.begun = time.time_ns()
    def helper(self, df): return df.where("x > 1").limit(self.shifted(self.LIMIT))
    @property
    def most(self): return 100
    def __call__(self, df): return self.helper(df).limit(self.RATE * self.rate)
    def totals(self, df): return self.helper(df).limit(self.most)
{how}
"""


@pytest.mark.parametrize("how", ["f = Pipe(1, table='b').totals", "f = Pipe(1, table='b')"], ids=["method", "object"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x > 1", "x > 5"),
        ("RATE = 2", "RATE = 3"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("x + 1", "x + 2"),
        ("return 100", "return 101"),
        ("Pipe(1,", "Pipe(7,"),
        ("table='b'", "table='c'"),
    ],
    ids=["method", "class attribute", "of a base", "static method", "property", "argument", "under another name"],
)
def test_all_that_a_method_or_object_uses_counts(tmp_path: Path, how: str, old: str, new: str) -> None:
    """``begun`` differs at each start, and does not."""
    assert is_seen(tmp_path, METHODS.format(how=how), old, new)


CLOSED = """
import dataclasses, datetime, functools, re, uuid
from collections import Counter
from decimal import Decimal
from fractions import Fraction
class Processor:
    LIMIT = 1
    def handle(self, rows): return rows
class Plain:
    LIMIT = 1
class Config:
    def __init__(self, a): self.a = a
class Slots:
    __slots__ = ("a",)
    def __init__(self, a): self.a = a
class Loose:
    def __init__(self, **more): self.__dict__.update(more)
class Counts(Counter): pass
class Failure(Exception):
    def __init__(self, a): super().__init__(a); self.code = a
@dataclasses.dataclass
class Data:
    a: int = 1
    def twice(self): return 2 * self.a
def inner(v):
    class Inner:
        RATE = v
        def handle(self): return 1
    return Inner
def instance(v):
    class Inner:
        def handle(self): return v
    return Inner()
def around(v):
    def f(df): return df.where(v)
    return f
f = around({value})
"""


@pytest.mark.parametrize(
    ("value", "old", "new"),
    [
        ("Decimal('1')", "'1'", "'2'"),
        ("Fraction(1, 2)", "2)", "3)"),
        ("datetime.date(2020, 1, 1)", "2020", "2021"),
        ("datetime.datetime(2020, 1, 1)", "2020", "2021"),
        ("datetime.timedelta(1)", "(1)", "(2)"),
        ("uuid.UUID(int=1)", "=1", "=2"),
        ("re.compile('a+')", "a+", "b+"),
        ("re.compile('a+', re.I)", "re.I", "re.M"),
        ("'/a/.*'", "/a", "/b"),
        ("'see http://a and b'", "b'", "c'"),
        ("range(3)", "3", "4"),
        ("slice(3)", "3", "4"),
        ("Config(11)", "11", "12"),
        ("Slots(11)", "11", "12"),
        ("Loose(a=11)", "11", "12"),
        ("Data(11)", "11", "12"),
        ("Failure(11)", "11", "12"),
        ("Data()", "2 * self", "3 * self"),
        ("Processor()", "return rows", "return rows[1:]"),
        ("Processor", "return rows", "return rows[1:]"),
        ("Plain()", "LIMIT = 1", "LIMIT = 2"),
        ("{'token': 'sum'}", "sum", "max"),
        ("instance(11)", "e(11)", "e(12)"),
        ("inner(11)", "r(11)", "r(12)"),
    ],
)
def test_what_a_function_closes_over_counts_by_value_and_code(tmp_path: Path, value: str, old: str, new: str) -> None:
    assert is_seen(tmp_path, CLOSED.replace("{value}", value), old, new)


@pytest.mark.parametrize("value", ["'/a/in'", "'~/in'", "'s3://bucket/a'", "Config('/a/in')", "{'password': 'a'}"])
def test_places_and_passwords_that_it_closes_over_do_not_count(tmp_path: Path, value: str) -> None:
    text = CLOSED.replace("{value}", value)
    assert not is_seen(tmp_path, text, value, value.replace("a", "b").replace("pbss", "pass").replace("bucket", "c"))


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("class P:\n    def go(self): return 1\nf = lambda df: df.go(P())\n", "return 1", "return 2"),
        ("import re\nPAT = re.compile('a+')\nf = lambda df: df.where(PAT.pattern)\n", "a+", "b+"),
        ("N = 1\nf, g = (lambda df: df.limit(N)), (lambda df: df.limit(2))\n", "N = 1", "N = 3"),
        ("N = 1\nf = (lambda n: lambda df: df.limit(n + N))(1)\n", "N = 1", "N = 3"),
        ("N = 1\nf = (lambda n: lambda df: df.limit(n + N))(1)\n", ")(1)", ")(2)"),
        ("R = []\ndef register(x): R.append(x)\nregister('a')\ndef f(df): return df.select(*R)\n", "'a'", "'b'"),
    ],
)
def test_a_lambda_is_judged_by_its_text_too(tmp_path: Path, text: str, old: str, new: str) -> None:
    assert is_seen(tmp_path, text, old, new)


def test_a_global_that_differs_at_each_start_is_judged_by_its_text(tmp_path: Path) -> None:
    text = "import time\nT = time.time_ns()\nf = lambda df: df.withColumn('t', T)\n"
    assert hashed(tmp_path, text) == hashed(tmp_path, text)


# ---------------------------------------------------------------------- notebooks


class Notebook:
    """Cells of one kernel, as IPython runs them."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._count = 0

    def run(self, text: str) -> Notebook:
        self._count += 1
        filename = f"/kernel/{self._count}-{abs(hash(text))}.py"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        exec(compile(text, filename, "exec"), self.names)
        return self

    def hash(self) -> str:
        return Functions().hash(self.names["f"])


FIRST = "RATE = 1\nPASSWORD = 'a'\nclass Rows:\n    def go(self): return 1\ndef helper(df):\n    return df.limit(1)\n"
SECOND = "def f(df):\n    return helper(df).where(df.x > RATE).go(Rows(), PASSWORD)\n"


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("limit(1)", "limit(2)", True),
        ("RATE = 1", "RATE = 2", True),
        ("return 1", "return 2", True),
        ("'a'", "'b'", False),
        ("class Rows", "unused = 1\nclass Rows", False),
    ],
)
def test_what_another_cell_defines_counts(old: str, new: str, *, differs: bool) -> None:
    before = Notebook().run(FIRST).run(SECOND).hash()
    assert Notebook().run(FIRST).run("x = 1").run(SECOND).hash() == before, "in whichever cell it is"
    assert (Notebook().run(FIRST.replace(old, new)).run(SECOND).hash() != before) == differs


def test_a_module_that_is_loaded_again_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, and as long as before; and one that was edited and not loaded again is not believed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = tmp_path / "reloaded_rules.py"
    module.write_text("def g(x):\n    return x + 1\n")
    flow = "import reloaded_rules\ndef f(df): return reloaded_rules.g(df)\n"
    try:
        first = hashed(tmp_path, flow)
        module.write_text("def g(x):\n    return x + 1000\n")
        edited = hashed(tmp_path, flow)
        importlib.reload(sys.modules["reloaded_rules"])
        second = hashed(tmp_path, flow)
    finally:
        sys.modules.pop("reloaded_rules", None)
    assert second not in (first, edited)
    module.write_text("def g(x):\n    return x + 1\n")
    try:
        assert hashed(tmp_path, flow) == first
    finally:
        sys.modules.pop("reloaded_rules", None)
