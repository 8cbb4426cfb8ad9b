"""The limits of the house: how many modules a folder holds, how long modules and functions are, how much a constructor
takes. Each exception has a name and a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "cutline"

MOST_MODULES = 15
MOST_LINES = 500
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8

#: Module, function or constructor → why it may be larger.
NOT_YET_CUT = "to be cut"
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
WIDE_CONSTRUCTORS: dict[str, str] = {}

MODULES = sorted(SOURCES.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name, those inside others included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | Function):
            name = f"{prefix}{node.name}"
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def in_module(module: Path) -> Iterator[tuple[str, Function]]:
    for name, node in functions(ast.parse(module.read_text())):
        yield f"{module.relative_to(SOURCES)}: {name}", node


def parameters(node: Function) -> int:
    """Without ``self``."""
    return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1


@pytest.fixture(scope="module")
def every_function() -> list[tuple[str, Function]]:
    return [found for module in MODULES for found in in_module(module)]


def test_no_folder_holds_more_modules_than_one_can_keep_in_mind() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {module.parent for module in MODULES}}
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_no_module_is_too_long() -> None:
    lengths = {str(module.relative_to(SOURCES)): len(module.read_text().splitlines()) for module in MODULES}
    too_long = {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
    assert {name: lines for name, lines in too_long.items() if name not in LONG_MODULES} == {}


def test_no_function_is_too_long(every_function: list[tuple[str, Function]]) -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in every_function}
    too_long = {name: lines for name, lines in lengths.items() if lines > MOST_FUNCTION_LINES}
    assert {name: lines for name, lines in too_long.items() if name not in LONG_FUNCTIONS} == {}


def test_no_constructor_takes_too_much(every_function: list[tuple[str, Function]]) -> None:
    counts = {
        name.removesuffix(".__init__"): parameters(node) for name, node in every_function if node.name == "__init__"
    }
    too_wide = {name: count for name, count in counts.items() if count > MOST_PARAMETERS}
    assert {name: count for name, count in too_wide.items() if name not in WIDE_CONSTRUCTORS} == {}
