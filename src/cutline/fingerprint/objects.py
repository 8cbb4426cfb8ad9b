"""Classes of the user's own and their instances: which code they are made of, and which arguments they were given.

An instance counts by its class and by those attributes that its constructor derives from arguments. Whatever else the
constructor assigns, a start time say, follows from its text, and need not be the same at each start.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from cutline.fingerprint.modules import is_library
from cutline.fingerprint.secret_texts import is_value_name

#: They are in the description of a flow by their versions.
_NOT_OWN = frozenset({"builtins", "cutline", "py4j", "pyspark"})
#: Set by Python, or the same as something else.
_NO_MEMBERS = frozenset(
    {
        "__annotations__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__static_attributes__",
        "__weakref__",
    }
)


def is_own(kind: type) -> bool:
    """Whether a class is the user's own, not one of Python or of an installed package."""
    module = kind.__module__
    if module.partition(".")[0] in _NOT_OWN:
        return False
    if module == "__main__" or module not in sys.modules:  # a file that a command runs is no module
        return True
    filename = getattr(sys.modules[module], "__file__", None)
    return filename is not None and not is_library(filename)


def own_classes(kind: type) -> list[type]:
    """The class and those it inherits from, as far as they are the user's own."""
    return [one for one in kind.__mro__ if is_own(one)]


def members_of(kind: type) -> dict[str, Any]:
    """What a class itself defines: functions, and values."""
    found = {name: value for name, value in vars(kind).items() if name not in _NO_MEMBERS}
    return {name: value for name, value in found.items() if not isinstance(value, types.MemberDescriptorType)}


def functions_in(member: Any) -> Iterator[types.FunctionType]:
    """The functions behind a member: those of a property, and what a static or class method is made of."""
    if isinstance(member, property):
        wrapped: tuple[Any, ...] = (member.fget, member.fset, member.fdel)
    elif isinstance(member, staticmethod | classmethod):
        wrapped = (member.__func__,)
    elif isinstance(member, functools.cached_property):
        wrapped = (member.func,)
    else:
        wrapped = (member,)
    yield from (one for one in wrapped if isinstance(one, types.FunctionType))


def attributes_of(value: object) -> dict[str, Any]:
    """All attributes of an instance, without running code of its class."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and isinstance(value, kind):
                try:
                    found[name] = member.__get__(value)
                except AttributeError:
                    continue
    return {name: one for name, one in found.items() if not (name.startswith("__") and name.endswith("__"))}


#: Attribute → whether a secret argument is in it.
Derived = Mapping[str, bool]


def derived_attributes(
    constructor: ast.FunctionDef | ast.AsyncFunctionDef, *, has_other_bases: bool = False
) -> Derived | None:
    """Attributes that a constructor derives from its arguments; None: any of them may be.

    Follows names from arguments through local variables, in the order of the text. ``has_other_bases``: the class
    inherits from one of a library, whose constructor may keep arguments too.
    """
    arguments = constructor.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None]
    if not names:
        return None
    itself, *given = names
    known = {name: is_value_name(name) for name in given}
    found: dict[str, bool] = {}
    for node in _in_order(constructor):
        if isinstance(node, ast.Call) and (_sets_any(node, itself) or (has_other_bases and _passes_on(node, known))):
            return None
        for target, value in _assigned(node):
            read = _read_in(value, itself, found, known)
            for one in ast.walk(target) if read else ():
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == itself:
                    found[one.attr] = any(read.values())
                elif isinstance(one, ast.Name) and one.id != itself:
                    known[one.id] = any(read.values())
    return found


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    for inner in ast.iter_child_nodes(node):
        yield inner
        yield from _in_order(inner)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What gets a value, and the expression that gives it."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _pairs(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
            yield target, value
        case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
            yield target, value
        case _:
            return


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """``self.a, self.b = a, b``"""
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        yield target, value
        return
    is_starred = any(isinstance(one, ast.Starred) for one in (*target.elts, *value.elts))
    if is_starred or len(target.elts) != len(value.elts):
        yield target, value
        return
    for inner, given in zip(target.elts, value.elts, strict=True):
        yield from _pairs(inner, given)


def _read_in(value: ast.expr, itself: str, found: Derived, known: Derived) -> dict[str, bool]:
    """Arguments, and what was derived from them, that an expression reads."""
    read: dict[str, bool] = {}
    for one in ast.walk(value):
        if isinstance(one, ast.Name) and one.id in known:
            read[one.id] = known[one.id]
        elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == itself:
            read |= {one.attr: found[one.attr]} if one.attr in found else {}
    return read


def _passes_on(node: ast.Call, known: Derived) -> bool:
    """``super().__init__(rate)``"""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == "__init__"):
        return False
    given = [*node.args, *(one.value for one in node.keywords)]
    return any(isinstance(one, ast.Name) and one.id in known for value in given for one in ast.walk(value))


def _sets_any(node: ast.Call, itself: str) -> bool:
    """``setattr(self, …)``, ``vars(self)``, ``self.__dict__.update(…)``"""
    if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "vars"):
        return any(isinstance(one, ast.Name) and one.id == itself for one in node.args)
    return any(isinstance(one, ast.Attribute) and one.attr == "__dict__" for one in ast.walk(node.func))
