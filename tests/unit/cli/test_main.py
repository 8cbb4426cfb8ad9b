"""Rules for everything that the commands print."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cutline.cli

COMMANDS = sorted(Path(cutline.cli.__file__).parent.rglob("*.py"))
#: What rich prints, and takes as markup unless it is told otherwise.
PRINTING = {"print", "status", "add_row", "add_task", "add_column"}
#: Texts that do not come from outside: numbers, colours, words of our own.
OUR_OWN = {
    "verb",
    "number",
    "where",
    "verdict",
    "count",
    "one.tier",
    "one.kind",
    "report.seeds",
    "outcome.seed",
    "item['path']",
    "item['seconds']",
    "report['checkpoint_ms']['p50']",
    "len(report.violations)",
    "min((one.seed for one in report.violations))",
    "'Every byte was read.' if deep else 'Contents of large files: --deep.'",
}


def printed(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PRINTING:
            yield node


def is_markup(call: ast.Call) -> bool:
    return not any(one.arg == "markup" and ast.unparse(one.value) == "False" for one in call.keywords)


def unescaped(call: ast.Call) -> Iterator[str]:
    """The values in the call's texts that rich would read as markup."""
    for argument in call.args:
        if isinstance(argument, ast.Call) and ast.unparse(argument.func) in ("Text", "escape"):
            continue
        for node in ast.walk(argument):
            if isinstance(node, ast.FormattedValue) and node.format_spec is None:
                value = ast.unparse(node.value)
                if not value.startswith(("escape(", "counted(")) and value not in OUR_OWN:
                    yield value


def test_no_text_from_outside_is_read_as_markup() -> None:
    """A name such as [red] would vanish, and [/] would end the command with an error."""
    found = [
        f"{path.name}:{call.lineno}: {value}"
        for path in COMMANDS
        for call in printed(ast.parse(path.read_text()))
        if is_markup(call)
        for value in unescaped(call)
    ]
    assert found == []


def test_cells_of_tables_are_no_markup() -> None:
    """A bare name in a cell is read as markup too; verify colours its own words."""
    found = [
        f"{path.name}:{call.lineno}: {ast.unparse(argument)}"
        for path in COMMANDS
        if path.name != "verify.py"
        for call in printed(ast.parse(path.read_text()))
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_row"
        for argument in call.args
        if not ast.unparse(argument).startswith(("*map(Text,", "*map(Text.copy,", "Text("))
    ]
    assert found == []
