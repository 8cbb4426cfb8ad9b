"""The hash of a function: of its text and what it depends on in its file, or else of its bytecode.

A function without text (typed into a shell, made by ``exec``) is judged by its bytecode, and by the values of the
globals it names. So are names that another cell of a notebook binds. What a function closes over counts in both cases,
and so do the modules it imports, the classes it uses and the arguments that their instances were given. Places
(absolute paths, addresses) never count: the same code may run anywhere.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import json
import re
import types
import uuid
import zoneinfo
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from cutline.fingerprint.bytecode import bytecode, global_names
from cutline.fingerprint.modules import ImportedModules, imports_in, is_library
from cutline.fingerprint.objects import (
    Derived,
    attributes_of,
    derived_attributes,
    functions_in,
    is_own,
    members_of,
    own_classes,
)
from cutline.fingerprint.secret_texts import is_password_name, is_value_name, without_secrets_of_addresses
from cutline.fingerprint.sources import SourceFile
from cutline.model.ids import CodeHash

#: Hexadecimal digits of a hash: enough to tell the versions of one flow apart, few enough to read aloud.
_DIGITS = 12
#: How deep into a value, or into functions that close over functions, to look.
_MOST_DEPTH = 16
#: How many objects to look into: one may lead to all others of a program.
_MOST_OBJECTS = 2_000
_PLACE = "<place>"
_SECRET = "<secret>"
#: Nothing that a pattern or a sentence would have.
_PATH = re.compile(r"[/~][\w./@+=:,% -]*")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://\S*")
#: What their ``repr`` shows is all there is to them.
_PLAIN = (
    bool,
    int,
    float,
    complex,
    bytes,
    types.NoneType,
    types.EllipsisType,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    zoneinfo.ZoneInfo,
    range,
    uuid.UUID,
)


def hash_of(parts: Any) -> CodeHash:
    """The hash of plain values."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return CodeHash(hashlib.sha256(text.encode()).hexdigest()[:_DIGITS])


class Functions:
    """Hashes functions, and reads each file once."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile | None] = {}
        self._modules = ImportedModules()
        #: What is being looked at: it may refer to itself.
        self._open: set[int] = set()
        self._objects = 0

    def hash(self, function: Callable[..., Any]) -> CodeHash:
        return hash_of(self.parts(function))

    def parts(self, function: Any) -> Any:
        """What the hash covers, as plain values."""
        return self.class_parts(function) if isinstance(function, type) else self._once(function, self._parts)

    def _once(self, value: Any, describe: Callable[[Any], Any]) -> Any:
        if id(value) in self._open or len(self._open) > _MOST_DEPTH:
            return ["again", getattr(value, "__qualname__", "")]
        self._open.add(id(value))
        try:
            return describe(value)
        finally:
            self._open.discard(id(value))

    def _parts(self, function: Any) -> Any:
        if isinstance(function, functools.partial):
            bound = [self.value(one) for one in function.args]
            return ["partial", self.parts(function.func), bound, self._values(function.keywords)]
        if isinstance(function, types.MethodType):
            return ["method", self.value(function.__self__), self.parts(function.__func__)]
        if isinstance(function, types.FunctionType):
            return self._of_function(function)
        call = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(call, types.FunctionType):
            return ["object", self._of_instance(function), self._of_function(call)]
        return ["named", _name_of(function)]

    def _of_function(self, function: types.FunctionType) -> Any:
        closed = {name: self._cell(name, cell) for name, cell in _cells(function)}
        given = [self._named(name, one) for name, one in _defaults(function)]
        named = self._values(function.__kwdefaults__ or {})
        file = self._file_of(function)
        statements = file.statements(function.__code__) if file is not None else None
        if file is not None and statements is not None:
            return ["source", *self._text(file, statements, function.__globals__), closed, given, named]
        known = self._globals(global_names(function.__code__), function.__globals__)
        return ["bytecode", bytecode(function.__code__), closed, given, named, known]

    def _text(self, file: SourceFile, statements: list[ast.AST], namespace: Mapping[str, Any]) -> Iterator[Any]:
        """Statements, what they import, and the values of names that are bound elsewhere."""
        yield file.texts(statements)
        yield self._modules.describe(imports_in(statements, str(namespace.get("__package__") or "")))
        yield self._globals(file.bound_elsewhere(statements), namespace)

    def _globals(self, names: Collection[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
        own = [name for name in names if name in namespace and not (name.startswith("__") and name.endswith("__"))]
        return self._values({name: namespace[name] for name in own if not _is_builtin(name, namespace[name])})

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

    # ------------------------------------------------------------------ classes and their instances

    def class_parts(self, kind: type) -> Any:
        """A class, with those of the user's own that it inherits from; of any other, its name."""
        if not is_own(kind):
            return ["named", _name_of(kind)]
        return self._once(kind, lambda one: ["class", [self._of_class(each) for each in own_classes(one)]])

    def _of_class(self, kind: type) -> Any:
        members = members_of(kind)
        functions = [one for member in members.values() for one in functions_in(member)]
        named = [one for one in functions if one.__qualname__.startswith(f"{kind.__qualname__}.")]
        methods = [one for one in named if self._file_of(one) is not None]  # others are made by decorators
        file = self._file_of(methods[0]) if methods else None
        node = file.class_of([one.__code__ for one in methods]) if file is not None else None
        if file is None or node is None:
            return ["members", kind.__qualname__, {name: self._member(name, one) for name, one in members.items()}]
        closed = {
            f"{one.__name__}.{name}": self._cell(name, cell)
            for one in methods
            for name, cell in _cells(one)
            if name != "__class__"
        }
        # In a function, the values of a class may be those of an argument.
        is_inner, generated = "<locals>" in kind.__qualname__, set(map(id, named)) - set(map(id, methods))
        others = {
            name: self._member(name, one)
            for name, one in members.items()
            if _is_given(one, methods, generated) or (is_inner and not list(functions_in(one)))
        }
        return [
            "source",
            kind.__qualname__,
            *self._text(file, file.with_dependencies(node), methods[0].__globals__),
            closed,
            others,
        ]

    def _member(self, name: str, member: Any) -> Any:
        functions = list(functions_in(member))
        return [self.parts(one) for one in functions] if functions else self._named(name, member)

    def _of_instance(self, value: Any) -> Any:
        kind = type(value)
        self._objects += 1
        if not is_own(kind) or self._objects > _MOST_OBJECTS:
            return ["object", _name_of(kind)]
        return ["instance", self.class_parts(kind), self.attributes(value)]

    def attributes(self, value: Any, *, or_all: bool = True) -> dict[str, Any]:
        """What an instance was given, as far as its attributes tell; ``or_all``: if it cannot be known, all of them."""
        found, derived = attributes_of(value), self._derived(type(value))
        if derived is None:
            return self._values(found) if or_all else {}
        return {
            name: _SECRET if derived[name] and isinstance(one, str | bytes) else self._named(name, one)
            for name, one in found.items()
            if name in derived
        }

    def _derived(self, kind: type) -> Derived | None:
        """Attributes that the constructors of a class derive from arguments; None: any of them may be."""
        found: dict[str, bool] = {}
        own = own_classes(kind)
        has_other_bases = len(own) < len(kind.__mro__) - 1
        for one in own:
            constructor = vars(one).get("__init__")
            if constructor is None:
                continue
            file = self._file_of(constructor) if isinstance(constructor, types.FunctionType) else None
            node = file.node_of(constructor.__code__) if file is not None else None
            if node is None or isinstance(node, ast.Lambda):
                return None
            derived = derived_attributes(node, has_other_bases=has_other_bases)
            if derived is None:
                return None
            found |= derived
        return found if any("__init__" in vars(one) for one in own) else None

    # ------------------------------------------------------------------ values

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._named(name, value) for name, value in values.items()}

    def _named(self, name: str, value: Any) -> Any:
        is_hidden = is_value_name(name) and isinstance(value, str | bytes)
        return _SECRET if is_hidden else self.value(value)

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value that the same code has at each start, as plain data; of anything else, its type."""
        try:
            return self._value(value, depth)
        except Exception:  # noqa: BLE001 (a mapping that reads a database, say: no reason to refuse the start)
            return ["object", _name_of(type(value))]

    def _value(self, value: Any, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            return "deep"
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__qualname__, value.name]
        if (plain := _plain(value)) is not None:
            return plain
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._collection(value, depth + 1)
        if isinstance(value, types.FunctionType) and is_library(value.__code__.co_filename):
            return ["library", _name_of(value)]
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial | type):
            return self.parts(value)
        if isinstance(value, types.ModuleType):
            return ["module", self._modules.describe([value.__name__])]
        if type(value).__module__ == "pyspark.sql.types":
            return ["type", repr(value)]
        if dataclasses.is_dataclass(value) and not is_own(type(value)):
            fields = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
            return ["dataclass", type(value).__qualname__, self._values(fields)]
        return self._once(value, self._of_instance)

    def _collection(self, value: Mapping[Any, Any] | Collection[Any], depth: int) -> Any:
        if isinstance(value, Mapping):
            pairs = [
                [self.value(key, depth), _SECRET if _hides(key, one) else self.value(one, depth)]
                for key, one in value.items()
            ]
            return ["mapping", sorted(pairs, key=json.dumps)]
        found = [self.value(one, depth) for one in value]
        if isinstance(value, set | frozenset):  # their order differs from process to process
            return ["set", sorted(found, key=json.dumps)]
        return ["sequence", found]


def is_place(text: str) -> bool:
    """Whether a text says where something is: an absolute path or an address."""
    return (_PATH.fullmatch(text) or _ADDRESS.fullmatch(text)) is not None


def _plain(value: Any) -> Any:
    """A value that shows all there is to it; None: it is another one."""
    if isinstance(value, str):
        return _PLACE if is_place(value) else without_secrets_of_addresses(value)
    if isinstance(value, PurePath):
        return _PLACE
    if isinstance(value, re.Pattern):
        return ["pattern", str(value.pattern), value.flags]
    if isinstance(value, slice):
        return ["slice", repr(value)]
    return [type(value).__name__, repr(value)] if isinstance(value, _PLAIN) else None


def _hides(key: Any, value: Any) -> bool:
    return isinstance(key, str) and is_password_name(key) and isinstance(value, str | bytes)


def _is_builtin(name: str, value: Any) -> bool:
    return getattr(builtins, name, None) is value and value is not None


def _is_given(member: Any, methods: Collection[types.FunctionType], generated: Collection[int]) -> bool:
    """Whether the class was given a function that its text does not hold: ``handle = helper``."""
    functions = [one for one in functions_in(member) if id(one) not in generated]
    return bool(functions) and not all(one in methods for one in functions)


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code, values = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(values) : code.co_argcount], values, strict=True)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or ""
    # The same file has another module name when a command loads it.
    return f"{module}.{name}" if module.partition(".")[0] in ("pyspark", "cutline", "builtins") else str(name)
