"""Moves the modules as tools/moves.toml says, and rewrites what names them. No logic changes.

Run it on the commit before the move, with these two files in ``tools/``: ``python tools/move.py``. It needs ruff on the
path, and leaves the result in git's index.

The table's sections:

- ``src``, ``tests``, ``twins``: old module = new module; below ``cutline``, below ``tests``, with full names.
- ``gone``: packages whose ``__init__.py`` is deleted.
- ``reexports``: names that a deleted ``__init__.py`` gave away, with the modules that they come from. Who imported the
  package itself imports the module under ``""``.
- ``packages``: the docstring of each new package's ``__init__.py``.
- ``text``: what no rule covers, replaced word by word after the rules: layers, lists of modules, depths of folders. An
  empty ``old`` makes a new file.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OWN = ("tools/move.py", "tools/moves.toml")
DOTTED = re.compile(r"(?<![\w./])(?:cutline|tests)(?:\.\w+)+")
#: A path to a module, as documents write it: `service/operator`, `cutline/sinks/delta.py`, `tests/unit/test_x.py`.
SLASHED = re.compile(r"(?<![\w./])(?:\w+/)+\w+(?![\w/…])(?:\.py\b)?")


class Edit(NamedTuple):
    start: int
    end: int
    text: str


class Table:
    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.modules: dict[str, str] = dict(content["twins"])
        for section, root in (("src", "cutline"), ("tests", "tests")):
            self.modules |= {f"{root}.{old}": f"{root}.{new}" for old, new in content[section].items()}
        self.reexports: dict[str, dict[str, str]] = content["reexports"]
        #: What statements and texts name: a package is named without its ``__init__``.
        self.names = {package: homes[""] for package, homes in self.reexports.items()}
        self.names |= {
            old.removesuffix(".__init__"): new.removesuffix(".__init__")
            for old, new in self.modules.items()
            if not old.endswith(".__init__")
        }

    def renamed(self, dotted: str) -> str:
        """``dotted`` with the longest part of it that is the name of a moved module replaced."""
        parts = dotted.split(".")
        for length in range(len(parts), 1, -1):
            new = self.names.get(".".join(parts[:length]))
            if new is not None:
                return ".".join([new, *parts[length:]])
        return dotted

    def renamed_path(self, path: str) -> str:
        """The same for ``src/cutline/a/b.py``, ``cutline/a/b.py``, ``a/b`` and ``tests/a/b.py``."""
        suffix = ".py" if path.endswith(".py") else ""
        parts = path.removesuffix(".py").split("/")
        lead = [parts.pop(0)] if parts[0] == "src" else []
        if parts[0] in ("cutline", "tests"):
            lead.append(parts[0])
            dotted = ".".join(parts)
        else:
            dotted = ".".join(["cutline", *parts])
        new = self.names.get(dotted)
        return path if new is None else "/".join([*lead, *new.split(".")[1:]]) + suffix


def path_of(module: str) -> Path:
    root = ROOT / "src" if module.startswith("cutline.") else ROOT
    return root.joinpath(*module.split(".")).with_suffix(".py")


# ------------------------------------------------------------------------------------------------------- statements


def rewritten_from(node: ast.ImportFrom, table: Table, indent: str) -> str | None:
    """The statements instead of ``from module import names``; None: it stays. Every name stays as it is known."""
    module = node.module or ""
    found: dict[str, list[str]] = {}
    for alias in node.names:
        known = alias.asname or alias.name
        whole = f"{module}.{alias.name}"
        if alias.name in table.reexports.get(module, {}):
            home, name = table.reexports[module][alias.name], alias.name
        elif whole in table.names:
            home, _, name = table.names[whole].rpartition(".")
        else:
            home, name = table.renamed(module), alias.name
        # "import a as a" would say that it is given away.
        found.setdefault(home, []).append(name if known == name and alias.asname is None else f"{name} as {known}")
    if list(found) == [module] and found[module] == [
        f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names
    ]:
        return None
    return f"\n{indent}".join(f"from {home} import {', '.join(names)}" for home, names in found.items())


def statement_edits(source: str, table: Table) -> Iterator[Edit]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()

    def offset(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("cutline", "tests"):
            if node.level:
                raise SystemExit(f"a relative import: {ast.unparse(node)}")
            start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
            text = rewritten_from(node, table, " " * node.col_offset)
            yield Edit(start, end, source[start:end] if text is None else text)


def rewritten(source: str, table: Table, *, is_python: bool) -> str:
    """Each place is looked at once: some new names begin like old ones."""
    edits = list(statement_edits(source, table)) if is_python else []
    taken = [(edit.start, edit.end) for edit in edits]
    for pattern, renamed in ((DOTTED, table.renamed), (SLASHED, table.renamed_path)):
        for match in pattern.finditer(source):
            if not any(start < match.end() and match.start() < end for start, end in taken):
                edits.append(Edit(match.start(), match.end(), renamed(match.group())))
    for edit in sorted(edits, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


# -------------------------------------------------------------------------------------------------------------- files


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def move_files(table: Table) -> None:
    for package in table.content["gone"]:
        git("rm", "-q", str(path_of(f"{package}.__init__").relative_to(ROOT)))
    # A module x.py and a package x never exist at the same time, and no file is moved onto one that is yet to move.
    waiting = [(path_of(old), path_of(new)) for old, new in table.modules.items()]
    for old, _ in waiting:
        git("mv", str(old.relative_to(ROOT)), str(old.with_suffix(".moving").relative_to(ROOT)))
    for old, new in waiting:
        new.parent.mkdir(parents=True, exist_ok=True)
        git("mv", str(old.with_suffix(".moving").relative_to(ROOT)), str(new.relative_to(ROOT)))
    for package, docstring in table.content["packages"].items():
        path = path_of(f"{package}.__init__")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{docstring}"""\n', encoding="utf-8")
        git("add", str(path.relative_to(ROOT)))


def replace_texts(table: Table) -> None:
    for text in table.content["text"]:
        path = ROOT / text["file"]
        content = path.read_text(encoding="utf-8") if path.exists() else ""
        if text["old"] and content.count(text["old"]) != 1:
            raise SystemExit(f"{text['file']}: {content.count(text['old'])} times there: {text['old']!r}")
        path.write_text(content.replace(text["old"], text["new"]) if text["old"] else text["new"], encoding="utf-8")
        git("add", text["file"])


def rewrite_files(table: Table) -> None:
    for name in git("ls-files").splitlines():
        path = ROOT / name
        if name in OWN or path.suffix not in (".py", ".md") or name == "CHANGELOG.md":
            continue
        source = path.read_text(encoding="utf-8")
        result = rewritten(source, table, is_python=path.suffix == ".py")
        if result != source:
            path.write_text(result, encoding="utf-8")


def main() -> int:
    table = Table(tomllib.loads((ROOT / "tools" / "moves.toml").read_text(encoding="utf-8")))
    move_files(table)
    rewrite_files(table)
    replace_texts(table)
    for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        subprocess.run(["ruff", *command, "."], cwd=ROOT, check=True)
    git("add", "--update")
    return 0


if __name__ == "__main__":
    sys.exit(main())
