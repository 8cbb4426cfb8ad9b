"""The text behind a function: its own, and that of the module's statements it depends on.

Comments, formatting and docstrings do not count, and secrets are left out: to rotate a password is not to change code.
A file may have been edited since it was loaded, so its text counts only where it compiles to the code that runs.
"""

from __future__ import annotations

import ast
import dis
import linecache
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cutline.fingerprint.reduced import is_declaration, text_of

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
_Place = tuple[str, int]
#: What ``from module import *`` binds.
_ANY_NAME = "*"


class SourceFile:
    """One file of Python, as it is now."""

    def __init__(self, tree: ast.Module, code: types.CodeType) -> None:
        self._codes: dict[_Place, list[types.CodeType]] = {}
        for one in _codes_in(code):
            self._codes.setdefault((one.co_name, one.co_firstlineno), []).append(one)
        self._functions: dict[_Place, _Function] = {
            _place(node): node for node in ast.walk(tree) if isinstance(node, _Function)
        }
        #: Name → the statements of the module that bind or change it.
        self._bindings: dict[str, list[ast.stmt]] = {}
        #: What was found out about statements: operators share many of them.
        self._texts: dict[int, str] = {}
        self._reads: dict[int, set[str]] = {}
        for statement in tree.body:
            for name in sorted(set(_bound_by(statement))):
                self._bindings.setdefault(name, []).append(statement)

    @classmethod
    def load(cls, filename: str, module: Mapping[str, Any]) -> SourceFile | None:
        """None: there is no text, or it is no Python (a notebook's cell with magics)."""
        linecache.checkcache(filename)
        text = "".join(linecache.getlines(filename, dict(module)))
        try:
            return cls(ast.parse(text), compile(text, filename, "exec", dont_inherit=True)) if text else None
        except (SyntaxError, ValueError, RecursionError):
            return None

    def statements(self, code: types.CodeType) -> list[ast.stmt] | None:
        """The function, then every statement of its module it depends on; None: what runs is not what stands here."""
        place = (code.co_name, code.co_firstlineno)
        node = self._functions.get(place)
        if node is None or not any(_are_same(code, one) for one in self._codes.get(place, ())):
            return None
        found: dict[int, ast.stmt] = {}
        waiting = [*sorted(self._names(node)), _ANY_NAME]
        seen = set(waiting)
        while waiting:
            for statement in self._bindings.get(waiting.pop(), ()):
                if id(statement) in found or statement is node:
                    continue
                found[id(statement)] = statement
                waiting += (more := self._names(statement) - seen)
                seen |= more
        return [node, *found.values()]

    def texts(self, statements: Sequence[ast.stmt]) -> list[str]:
        return [self._text(statements[0]), *sorted(map(self._text, statements[1:]))]

    def _text(self, statement: ast.stmt) -> str:
        if id(statement) not in self._texts:
            self._texts[id(statement)] = text_of(statement)
        return self._texts[id(statement)]

    def _names(self, node: ast.stmt) -> set[str]:
        """Names of the module that a statement reads. A function's locals may have the same names: its code knows."""
        if id(node) not in self._reads:
            self._reads[id(node)] = self._read_by(node)
        return self._reads[id(node)]

    def _read_by(self, node: ast.stmt) -> set[str]:
        codes = self._codes.get(_place(node), ()) if isinstance(node, _Function) else ()
        if not codes or not isinstance(node, _Function):
            return _loaded_in(node)
        outside = [*(one for one in node.decorator_list if not is_declaration(one)), node.args]
        return {name for one in codes for name in global_names(one)}.union(*map(_loaded_in, outside))


def global_names(code: types.CodeType) -> set[str]:
    """Names that the code, or a function inside of it, reads from its module."""
    return {
        str(step.argval)
        for one in _codes_in(code)
        for step in dis.get_instructions(one)
        if step.opname.startswith("LOAD_") and step.opname.endswith(("_GLOBAL", "_NAME", "_GLOBALS"))
    }


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes_in(one)


def _are_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether they do the same; an interpreter that has run one of them may have changed it in other respects."""
    if (one.co_code, one.co_names, one.co_freevars) != (other.co_code, other.co_names, other.co_freevars):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not _are_same(mine, theirs):
                return False
        elif (type(mine), mine) != (type(theirs), theirs):
            return False
    return True


def _place(node: ast.AST) -> _Place:
    """Where the code of a function says that it begins: at its first decorator."""
    if not isinstance(node, _Function):
        return "", 0
    return node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _loaded_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Names that a statement of the module binds or changes: ``x = 1``, ``x["a"] = 1``, ``x.add(1)``."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (one.asname or one.name.partition(".")[0] for one in names)
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Subscript(ctx=ast.Store(), value=value) | ast.Attribute(ctx=ast.Store(), value=value):
            yield from _base_of(value)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=value))):
            yield from _base_of(value)
        case _:
            pass
    if not isinstance(node, _Scope):
        for inner in ast.iter_child_nodes(node):
            yield from _bound_by(inner)


def _base_of(node: ast.expr) -> Iterator[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
