"""Checks the arguments of the public API against their annotations: a wrong one is named when the flow is declared.

Without it, ``subtasks="four"`` fails somewhere later, in code that the user has never seen.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from cutline.base.redaction import without_secrets
from cutline.errors import FlowDefinitionError

P = ParamSpec("P")
R = TypeVar("R")

_MOST_CHARACTERS = 80
#: What annotations name, also where it is imported for type checkers only.
_NAMES = {"os": os, "Sequence": Sequence, "Mapping": Mapping, "Callable": Callable, "Any": Any}
#: Annotations in words.
_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
    os.PathLike: "a path",
    Sequence: "a list",
    Mapping: "a dict",
    Callable: "a function",
}


def checked(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Raise FlowDefinitionError for an argument that its annotation excludes; ``name``: as users write the call.

    What an annotation cannot say is the function's own business, and so is a type that is imported for type checkers
    only.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.cache
        def hints() -> dict[str, Any]:
            return {key: _resolved(one.annotation, function) for key, one in signature.parameters.items()}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python's own error names the argument
            flow = getattr(bound.arguments.get("self"), "name", None)
            for key, value in bound.arguments.items():
                kind = signature.parameters[key].kind
                if kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                    check_argument(name, key, value, hints()[key], flow=flow)
            return function(*args, **kwargs)

        return call

    return decorate


def _resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """An annotation as a type; Any if it is imported for type checkers only."""
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, {**_NAMES, **getattr(function, "__globals__", {})})
    except NameError:
        return Any


def check_argument(name: str, argument: str, value: Any, hint: Any, **where: object) -> None:
    """Raise FlowDefinitionError, which names the argument, if the type excludes the value."""
    if not _fits(value, hint):
        shown = without_secrets(repr(value))
        shown = shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}…"
        raise FlowDefinitionError(
            f"{name}: {argument}={shown} is not {_words(hint)}", next_step=f"correct {argument}", **where
        )


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any or isinstance(hint, TypeVar):
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:  # which words are known is said better by the code that knows what they mean
        return any(isinstance(value, type(one)) for one in inner)
    kind = origin or (type(None) if hint is None else hint)
    if kind in (int, float):
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if getattr(kind, "_is_protocol", False):
        return _has_members(value, kind)
    return not isinstance(kind, type) or (isinstance(value, kind) and _content_fits(value, kind, inner))


def _content_fits(value: Any, kind: type, inner: tuple[Any, ...]) -> bool:
    if kind is Sequence and inner:
        return isinstance(value, str) or all(_fits(one, inner[0]) for one in value)
    if kind is Mapping and inner:
        return all(_fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items())
    return True


def _has_members(value: Any, protocol: Any) -> bool:
    """Whether an object, not a class, has what the protocol asks for."""
    names = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(one) for one in inner if one is not type(None))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin in (Sequence, Mapping) and inner:
        return f"{_WORDS[origin]} of {_plural(inner[-1])}"
    kind = origin or hint
    return _WORDS.get(kind) or f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _plural(hint: Any) -> str:
    return " or ".join({str: "texts"}.get(one, f"{getattr(one, '__name__', one)}s") for one in _parts(hint))


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
