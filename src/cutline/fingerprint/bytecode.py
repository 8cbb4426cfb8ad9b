"""What a compiled function does, as plain values: for code without text, and to tell whether a text is what runs."""

from __future__ import annotations

import dis
import json
import types
from collections.abc import Iterator
from typing import Any

from cutline.fingerprint.secret_texts import without_secrets_of_addresses


def bytecode(code: types.CodeType) -> Any:
    return [
        code.co_code.hex(),
        [_constant(one) for one in code.co_consts],
        list(code.co_names),
        list(code.co_freevars),
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
    ]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return bytecode(value)
    if isinstance(value, tuple):
        return ["tuple", [_constant(one) for one in value]]
    if isinstance(value, frozenset):
        return ["set", sorted((_constant(one) for one in value), key=json.dumps)]
    return without_secrets_of_addresses(value) if isinstance(value, str) else [type(value).__name__, repr(value)]


def global_names(code: types.CodeType) -> set[str]:
    """Names that the code, or a function inside of it, reads from its module."""
    return {
        str(step.argval)
        for one in codes_in(code)
        for step in dis.get_instructions(one)
        if step.opname.startswith("LOAD_") and step.opname.endswith(("_GLOBAL", "_NAME", "_GLOBALS"))
    }


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from codes_in(one)


def are_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether they do the same; an interpreter that has run one of them may have changed it in other respects."""
    if (one.co_code, one.co_names, one.co_freevars) != (other.co_code, other.co_names, other.co_freevars):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not are_same(mine, theirs):
                return False
        elif (type(mine), mine) != (type(theirs), theirs):
            return False
    return True


def range_of(code: types.CodeType) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where its instructions stand in the text: (line, column) of begin and end; None: the interpreter does not say."""
    begins, ends = [], []
    for line, end_line, column, end_column in code.co_positions():
        if line is None or end_line is None or column is None or end_column is None or not end_column:
            continue  # an instruction of the compiler's own
        begins.append((line, column))
        ends.append((end_line, end_column))
    return (min(begins), max(ends)) if begins else None
