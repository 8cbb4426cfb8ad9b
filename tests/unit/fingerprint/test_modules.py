"""A change in a module that a function imports is a change of its code."""

from __future__ import annotations

import importlib
import linecache
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.fingerprint.functions import Functions
from cutline.fingerprint.modules import ImportedModules

FLOW = """\
import math
import numpy
import unused_rules
from fees import fee
from fees.rates import RATE
{more}

def f(x):
    {inside}
    return fee(x) * RATE + numpy.abs(math.pi)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "fees").mkdir()
    write(tmp_path, "fees/__init__.py", "from .rules import fee\n")
    write(tmp_path, "fees/rules.py", '"""Fees."""\nfrom fees import rates\ndef fee(x):\n    return x + rates.RATE\n')
    write(tmp_path, "fees/rates.py", "RATE = 2\nPASSWORD = 'a'\n")
    write(tmp_path, "unused_rules.py", "LIMIT = 1\n")
    write(tmp_path, "later.py", "def late(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    linecache.clearcache()
    importlib.invalidate_caches()


def forget() -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] in ("fees", "unused_rules", "later")]:
        del sys.modules[name]


def hashed(folder: Path, *, more: str = "", inside: str = "pass") -> str:
    """The hash at a start of its own: nothing is loaded yet."""
    forget()
    write(folder, "flow.py", FLOW.format(more=more, inside=inside))
    return Functions().hash(runpy.run_path(str(folder / "flow.py"))["f"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fees/rules.py", "from fees import rates\ndef fee(x):\n    return x - rates.RATE\n"),
        ("fees/rates.py", "RATE = 3\nPASSWORD = 'a'\n"),
        ("fees/__init__.py", "def fee(x):\n    return x\n"),
    ],
)
def test_a_change_of_an_own_module_counts_however_it_is_reached(folder: Path, name: str, text: str) -> None:
    before = hashed(folder)
    assert hashed(folder) == before
    write(folder, name, text)
    assert hashed(folder) != before


def test_comments_docstrings_secrets_and_unused_modules_do_not_count(folder: Path) -> None:
    before = hashed(folder)
    write(folder, "fees/rules.py", "# new\nfrom fees import rates\ndef fee(x):\n    return (x + rates.RATE)\n")
    write(folder, "fees/rates.py", "RATE = 2\nPASSWORD = 'b'\n")
    write(folder, "unused_rules.py", "LIMIT = 2\n")
    assert hashed(folder) == before


@pytest.mark.parametrize(
    ("more", "inside"),
    [("", "from later import late"), ("from later import *", "late = late"), ("import later", "late = later.late")],
)
def test_imports_inside_a_function_and_of_all_names_count(folder: Path, more: str, inside: str) -> None:
    before = hashed(folder, more=more, inside=inside)
    write(folder, "later.py", "def late(x):\n    return -x\n")
    assert hashed(folder, more=more, inside=inside) != before


def test_a_module_that_a_function_without_text_names_counts(folder: Path) -> None:
    def of_lambda() -> str:
        forget()
        return Functions().hash(eval("lambda x: unused_rules.LIMIT * x", {"unused_rules": import_anew()}))

    before = of_lambda()
    assert of_lambda() == before
    write(folder, "unused_rules.py", "LIMIT = 2\n")
    assert of_lambda() != before


def import_anew() -> object:
    return importlib.import_module("unused_rules")


def test_a_package_counts_whose_module_is_imported(folder: Path) -> None:
    """``import fees.rates`` runs the package, and makes its names usable."""
    inside = "x = fees.fee(x)"
    before = hashed(folder, more="import fees.rates", inside=inside)
    only = ImportedModules().describe(["fees.rates"])
    write(folder, "fees/__init__.py", "def fee(x):\n    return -x\n")
    assert hashed(folder, more="import fees.rates", inside=inside) != before
    assert set(only) == {"fees.rates"}


@pytest.mark.parametrize("name", ["code", "fees.queue"])
def test_an_own_module_with_the_name_of_one_of_python_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(sys.modules, name.partition(".")[0], raising=False)
    (folder / "fees/queue.py").write_text("LIMIT = 1\n")
    write(folder, "code.py", "LIMIT = 1\n")
    importlib.import_module("fees")
    before = ImportedModules().describe([name])
    assert "LIMIT = 1" in before[name]
    assert ImportedModules().describe(["json", "os.path", "sys"]) == {}


def test_libraries_count_by_their_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hashed(folder)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    assert hashed(folder) != before


def test_what_cannot_be_read_is_passed_over(folder: Path) -> None:
    write(folder, "later.py", "this is no Python (\n")
    names = ["later", "no_such_module", "no_such.module", "sys", "", "fees.rates.RATE"]
    assert ImportedModules().describe(names) == {}


def test_describing_a_module_does_not_run_it(folder: Path) -> None:
    write(folder, "later.py", "raise SystemExit('it ran')\n")
    assert "it ran" in ImportedModules().describe(["later"])["later"]
    assert "later" not in sys.modules
