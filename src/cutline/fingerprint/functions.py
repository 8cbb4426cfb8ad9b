"""The hash of a function: of its text and what it depends on in its file, or else of its bytecode.

A function without text (typed into a shell, made by ``exec``, a lambda) is judged by its bytecode, and by the values of
the globals it names. What a function closes over counts in both cases, and so do the modules it imports. Places
(absolute paths, addresses) never count: the same code may run anywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from cutline.base.redaction import is_secret_name, without_named_secrets
from cutline.fingerprint.modules import ImportedModules, imports_in, is_library
from cutline.fingerprint.sources import SourceFile, global_names
from cutline.model.ids import CodeHash

#: Hexadecimal digits of a hash: enough to tell the versions of one flow apart, few enough to read aloud.
_DIGITS = 12
#: How deep into a value, or into functions that close over functions, to look.
_MOST_DEPTH = 16
_PLACE = "<place>"


def hash_of(parts: Any) -> CodeHash:
    """The hash of plain values."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return CodeHash(hashlib.sha256(text.encode()).hexdigest()[:_DIGITS])


class Functions:
    """Hashes functions, and reads each file once."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile | None] = {}
        self._modules = ImportedModules()
        #: Functions that are being looked at: one may refer to itself.
        self._open: set[int] = set()

    def hash(self, function: Callable[..., Any]) -> CodeHash:
        return hash_of(self.parts(function))

    def parts(self, function: Any) -> Any:
        """What the hash covers, as plain values."""
        if id(function) in self._open or len(self._open) > _MOST_DEPTH:
            return ["again", getattr(function, "__qualname__", "")]
        self._open.add(id(function))
        try:
            return self._parts(function)
        finally:
            self._open.discard(id(function))

    def _parts(self, function: Any) -> Any:
        if isinstance(function, functools.partial):
            bound = [self.value(one) for one in function.args]
            return ["partial", self.parts(function.func), bound, self._values(function.keywords)]
        if isinstance(function, types.MethodType):
            return ["method", self.value(function.__self__), self.parts(function.__func__)]
        if isinstance(function, types.FunctionType):
            return self._of_function(function)
        call = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(call, types.FunctionType) and not isinstance(function, type):
            return ["object", self.value(function), self._of_function(call)]
        return ["named", _name_of(function)]

    def _of_function(self, function: types.FunctionType) -> Any:
        closed = {name: self._cell(name, cell) for name, cell in _cells(function)}
        given = [self.value(one) for one in function.__defaults__ or ()]
        named = self._values(function.__kwdefaults__ or {})
        file = self._file_of(function)
        statements = file.statements(function.__code__) if file is not None else None
        if file is not None and statements is not None:
            package = str(function.__globals__.get("__package__") or "")
            imported = self._modules.describe(imports_in(statements, package))
            return ["source", file.texts(statements), closed, given, named, imported]
        known = {name: function.__globals__[name] for name in global_names(function.__code__) & {*function.__globals__}}
        return ["bytecode", _bytecode(function.__code__), closed, given, named, self._values(known)]

    def _file_of(self, function: types.FunctionType) -> SourceFile | None:
        filename = function.__code__.co_filename
        if filename not in self._files:
            self._files[filename] = SourceFile.load(filename, function.__globals__)
        return self._files[filename]

    def _cell(self, name: str, cell: types.CellType) -> Any:
        try:
            return self._named(name, cell.cell_contents)
        except ValueError:  # it has no value yet
            return "empty"

    # ------------------------------------------------------------------ values

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._named(name, value) for name, value in values.items()}

    def _named(self, name: str, value: Any) -> Any:
        is_hidden = is_secret_name(name) and isinstance(value, str | bytes)
        return "<secret>" if is_hidden else self.value(value)

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value that the same code has at each start, as plain data; of anything else, its type."""
        try:
            return self._value(value, depth)
        except Exception:  # noqa: BLE001 (a mapping that reads a database, say: no reason to refuse the start)
            return ["object", _name_of(type(value))]

    def _value(self, value: Any, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            return "deep"
        if isinstance(value, str):
            return _PLACE if is_place(value) else without_named_secrets(value)
        if value is None or isinstance(value, bool | int | float | complex | bytes):
            return [type(value).__name__, repr(value)]
        if isinstance(value, PurePath):
            return _PLACE
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__qualname__, value.name]
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._collection(value, depth + 1)
        if isinstance(value, types.FunctionType) and is_library(value.__code__.co_filename):
            return ["library", _name_of(value)]
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            return self.parts(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
            return ["dataclass", type(value).__qualname__, self._values(fields)]
        if isinstance(value, types.ModuleType):
            return ["module", self._modules.describe([value.__name__])]
        if type(value).__module__ == "pyspark.sql.types":
            return ["type", repr(value)]
        return ["object", _name_of(value if isinstance(value, type) else type(value))]

    def _collection(self, value: Mapping[Any, Any] | Collection[Any], depth: int) -> Any:
        if isinstance(value, Mapping):
            pairs = [
                [self.value(key, depth), "<secret>" if _hides(key, one) else self.value(one, depth)]
                for key, one in value.items()
            ]
            return ["mapping", sorted(pairs, key=json.dumps)]
        found = [self.value(one, depth) for one in value]
        if isinstance(value, set | frozenset):  # their order differs from process to process
            return ["set", sorted(found, key=json.dumps)]
        return ["sequence", found]


def is_place(text: str) -> bool:
    """Whether a text says where something is: an absolute path or an address."""
    return text.startswith(("/", "~")) or "://" in text


def _hides(key: Any, value: Any) -> bool:
    return isinstance(key, str) and is_secret_name(key) and isinstance(value, str | bytes)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or ""
    # The same file has another module name when a command loads it.
    return f"{module}.{name}" if module.partition(".")[0] in ("pyspark", "cutline", "builtins") else str(name)


def _bytecode(code: types.CodeType) -> Any:
    return [
        code.co_code.hex(),
        [_constant(one) for one in code.co_consts],
        list(code.co_names),
        list(code.co_freevars),
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
    ]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _bytecode(value)
    if isinstance(value, tuple):
        return ["tuple", [_constant(one) for one in value]]
    if isinstance(value, frozenset):
        return ["set", sorted((_constant(one) for one in value), key=json.dumps)]
    return without_named_secrets(value) if isinstance(value, str) else [type(value).__name__, repr(value)]
