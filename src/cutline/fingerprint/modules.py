"""The modules that a function imports: the user's own by their text, libraries by their version.

A deploy often changes a module beside the flow's file and not the file. Own modules count as a whole, with all that
they import in turn: to call a change of an unused function a deploy costs one savepoint; to miss a change leaves
nothing to restore.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import linecache
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cutline.fingerprint.bytecode import are_same, bytecode, codes_in
from cutline.fingerprint.reduced import text_of

#: These are in the description of a flow by their versions already.
_DESCRIBED = frozenset({"cutline", "pyspark", "py4j", "__main__"})
_LIBRARIES = tuple(
    f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED = ("site-packages", "dist-packages")


def is_library(filename: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return filename.startswith(("<frozen", *_LIBRARIES)) or any(part in _INSTALLED for part in Path(filename).parts)


def imports_in(nodes: Iterable[ast.AST], package: str) -> Iterator[str]:
    """Absolute names of all that these import. Of ``from a import b`` both a and a.b: b may be a module."""
    for node in (inner for one in nodes for inner in ast.walk(one)):
        if isinstance(node, ast.Import):
            yield from (name for one in node.names for name in _with_packages(one.name))
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
            except ImportError:  # relative, in a file that belongs to no package
                continue
            yield from _with_packages(base)
            yield from (f"{base}.{one.name}" for one in node.names)


def _with_packages(name: str) -> Iterator[str]:
    """The module and the packages it is in: their own code runs, and ``import a.b`` makes a usable."""
    while name:
        yield name
        name = name.rpartition(".")[0]


class ImportedModules:
    """Describes modules, and reads each one once."""

    def __init__(self) -> None:
        self._described: dict[str, str] = {}
        self._imports: dict[str, frozenset[str]] = {}

    def describe(self, names: Iterable[str]) -> dict[str, str]:
        """Name of each module that is reached from these → its text, or its library's version."""
        found: dict[str, str] = {}
        waiting = {*names}
        seen = {*waiting}
        while waiting:
            name = waiting.pop()
            if name.partition(".")[0] in _DESCRIBED:
                continue
            if name not in self._described:
                self._described[name], self._imports[name] = _look_at(name)
            if self._described[name]:
                found[name] = self._described[name]
            waiting |= (more := self._imports[name] - seen)
            seen |= more
        return found


def _look_at(name: str) -> tuple[str, frozenset[str]]:
    """What is known of one module, and what it imports. Empty: there is no such module, or nothing is known of it."""
    filename, namespace = _file_of(name)
    if filename is None:
        return "", frozenset()
    if is_library(filename):
        package = name.partition(".")[0]
        # Python's own modules have its version. A module of the user's may have the same name: it is no library.
        return "" if package in sys.stdlib_module_names else _version_of(package), frozenset()
    linecache.checkcache(filename)
    try:
        text = "".join(linecache.getlines(filename, dict(namespace)))
        tree = ast.parse(text)
        package = str(namespace.get("__package__") or "")
        imports = frozenset(imports_in([tree], package))
        running = _running(namespace, filename)
        if running and not _stands_in(text, filename, running.values()):  # it was edited and not loaded again
            return json.dumps({one: bytecode(code) for one, code in running.items()}, sort_keys=True), imports
        return text_of(tree), imports
    except (SyntaxError, ValueError, RecursionError):  # no Python: an extension of the user's own
        return "", frozenset()


def _running(namespace: Mapping[str, Any], filename: str) -> dict[str, types.CodeType]:
    """The code of the functions and methods that a loaded module has defined."""
    found: dict[str, types.CodeType] = {}
    for name, value in namespace.items():
        members = vars(value).items() if isinstance(value, type) else [("", value)]
        for inner, one in members:
            code = getattr(getattr(one, "__func__", one), "__code__", None)
            if isinstance(code, types.CodeType) and code.co_filename == filename:
                found[f"{name}.{inner}"] = code
    return found


def _stands_in(text: str, filename: str, codes: Iterable[types.CodeType]) -> bool:
    """Whether a text compiles to this code."""
    there: dict[tuple[str, int], list[types.CodeType]] = {}
    for one in codes_in(compile(text, filename, "exec", dont_inherit=True)):
        there.setdefault((one.co_name, one.co_firstlineno), []).append(one)
    return all(any(are_same(code, one) for one in there.get((code.co_name, code.co_firstlineno), ())) for code in codes)


def _file_of(name: str) -> tuple[str | None, Mapping[str, Any]]:
    """The file of a module and its namespace; one that is imported later, by a function, is only looked for."""
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType):
        return getattr(module, "__file__", None), vars(module)
    parent = name.rpartition(".")[0]
    if parent and not hasattr(sys.modules.get(parent), "__path__"):
        return None, {}  # to find it would run its package
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None, {}
    if spec is None or not spec.has_location:
        return None, {}
    package = name if spec.submodule_search_locations is not None else parent
    return spec.origin, {"__name__": name, "__loader__": spec.loader, "__spec__": spec, "__package__": package}


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name than its module
        loaded = getattr(sys.modules.get(package), "__version__", "")
        return loaded if isinstance(loaded, str) else ""
