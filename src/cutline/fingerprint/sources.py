"""The text behind a function: its own, and that of the module's statements it depends on.

Comments, formatting and docstrings do not count, and secrets are left out: to rotate a password is not to change code.
A file may have been edited since it was loaded, so its text counts only where it compiles to the code that runs.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cutline.fingerprint.bytecode import are_same, codes_in, global_names, range_of
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
        for one in codes_in(code):
            self._codes.setdefault((one.co_name, one.co_firstlineno), []).append(one)
        nodes = list(ast.walk(tree))
        self._functions: dict[_Place, _Function] = {_place(node): node for node in nodes if isinstance(node, _Function)}
        self._lambdas = [node for node in nodes if isinstance(node, ast.Lambda)]
        self._classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        #: Name → the statements of the module that bind or change it.
        self._bindings: dict[str, list[ast.stmt]] = {}
        #: What was found out about statements: operators share many of them.
        self._texts: dict[int, str] = {}
        self._reads: dict[int, set[str]] = {}
        for statement in tree.body:
            for name in sorted(set(_bound_by(statement))):
                self._bindings.setdefault(name, []).append(statement)
        for statement in tree.body:
            for name in sorted(self._changed_by_call(statement)):
                self._bindings[name].append(statement)

    @classmethod
    def load(cls, filename: str, module: Mapping[str, Any]) -> SourceFile | None:
        """None: there is no text, or it is no Python (a notebook's cell with magics)."""
        linecache.checkcache(filename)
        text = "".join(linecache.getlines(filename, dict(module)))
        try:
            return cls(ast.parse(text), compile(text, filename, "exec", dont_inherit=True)) if text else None
        except (SyntaxError, ValueError, RecursionError):
            return None

    def node_of(self, code: types.CodeType) -> _Function | ast.Lambda | None:
        """The function in the text; None: what runs is not what stands here."""
        place = (code.co_name, code.co_firstlineno)
        if not any(are_same(code, one) for one in self._codes.get(place, ())):
            return None
        return self._functions.get(place) or self._lambda_at(code)

    def class_of(self, methods: Sequence[types.CodeType]) -> ast.ClassDef | None:
        """The class in the text that has these methods; None: what runs is not what stands here, or there is none."""
        nodes = [self.node_of(code) for code in methods]
        found = [one for one in self._classes if nodes and all(any(node is own for own in one.body) for node in nodes)]
        return found[0] if len(found) == 1 else None

    def statements(self, code: types.CodeType) -> list[ast.AST] | None:
        """The function, then every statement of its module it depends on; None: what runs is not what stands here."""
        node = self.node_of(code)
        return self.with_dependencies(node, code) if node is not None else None

    def with_dependencies(self, node: ast.AST, code: types.CodeType | None = None) -> list[ast.AST]:
        """A part of the text, then every statement of the module it depends on. ``code``: of a lambda."""
        if code is not None and isinstance(node, ast.Lambda):
            self._reads[id(node)] = global_names(code)
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

    def bound_elsewhere(self, statements: Iterable[ast.AST]) -> set[str]:
        """Names that these read, and that no statement of this text binds: another cell of a notebook does, say."""
        return {name for one in statements for name in self._names(one) if name not in self._bindings}

    def texts(self, statements: Sequence[ast.AST]) -> list[str]:
        return [self._text(statements[0]), *sorted(map(self._text, statements[1:]))]

    def _lambda_at(self, code: types.CodeType) -> ast.Lambda | None:
        """The innermost lambda whose body holds all instructions."""
        found = range_of(code)
        if found is None:
            return None
        around = [one for one in self._lambdas if _begin(one.body) <= found[0] and found[1] <= _end(one.body)]
        return max(around, key=lambda one: _begin(one.body), default=None)

    def _changed_by_call(self, statement: ast.stmt) -> set[str]:
        """Names that ``register("a")`` may change: those which the function reads, without what is imported."""
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
                called = [one for one in self._bindings.get(name, ()) if isinstance(one, _Function)]
            case _:
                return set()
        read = set[str]().union(*map(self._names, called))
        imported = (ast.Import, ast.ImportFrom)
        return {
            one
            for one in read & self._bindings.keys()
            if not any(isinstance(binding, (*imported, _Function, ast.ClassDef)) for binding in self._bindings[one])
        }

    def _text(self, statement: ast.AST) -> str:
        if id(statement) not in self._texts:
            self._texts[id(statement)] = text_of(statement)
        return self._texts[id(statement)]

    def _names(self, node: ast.AST) -> set[str]:
        """Names of the module that a statement reads. A function's locals may have the same names: its code knows."""
        if id(node) not in self._reads:
            self._reads[id(node)] = self._read_by(node)
        return self._reads[id(node)]

    def _read_by(self, node: ast.AST) -> set[str]:
        codes = self._codes.get(_place(node), ())
        if not codes or not isinstance(node, _Function | ast.ClassDef):
            return _loaded_in(node)
        outside: list[ast.AST] = [one for one in node.decorator_list if not is_declaration(one)]
        outside += [*node.bases, *node.keywords] if isinstance(node, ast.ClassDef) else [node.args]
        return {name for one in codes for name in global_names(one)}.union(*map(_loaded_in, outside))


def _begin(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _place(node: ast.AST) -> _Place:
    """Where the code of a function or class says that it begins: at its first decorator."""
    if not isinstance(node, _Function | ast.ClassDef):
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
