"""The hash of a function that has no text, or whose text is not what runs."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cutline.fingerprint.functions import Functions, is_place


def hashed(function: Callable[..., Any]) -> str:
    return Functions().hash(function)


def typed(text: str, name: str = "f") -> Callable[..., Any]:
    """As in a shell: there is no file."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names[name]  # type: ignore[no-any-return]


def test_a_function_without_text_is_judged_by_bytecode_and_constants() -> None:
    base = "def f(x):\n    return x * 2 in {'a', 'b'}"
    assert hashed(typed(base)) == hashed(typed("\n\n" + base))
    assert hashed(typed(base)) != hashed(typed(base.replace("2", "3")))
    assert hashed(typed(base)) != hashed(typed(base.replace("*", "+")))
    assert hashed(typed(base)) != hashed(typed(base.replace("'b'", "'c'")))


def test_a_function_without_text_is_judged_by_the_globals_it_names() -> None:
    text = "RATE = 2\nOTHER = 1\ndef g(x):\n    return x + 1\ndef f(x):\n    return g(x) * RATE"
    assert hashed(typed(text)) == hashed(typed(text.replace("OTHER = 1", "OTHER = 2")))
    assert hashed(typed(text)) != hashed(typed(text.replace("RATE = 2", "RATE = 3")))
    assert hashed(typed(text)) != hashed(typed(text.replace("x + 1", "x + 2")))


def test_lambdas_of_one_line_are_told_apart() -> None:
    first, second = (lambda x: x + 1), (lambda x: x + 2)
    assert hashed(first) != hashed(second)
    assert hashed(first) == hashed(lambda x: x + 1)


def test_what_a_function_closes_over_counts() -> None:
    def made(rate: Any) -> Callable[..., Any]:
        def f(x: Any) -> Any:
            return x * rate

        return f

    assert hashed(made(1)) == hashed(made(1))
    assert hashed(made(1)) != hashed(made(2))
    assert hashed(made(1)) != hashed(made(1.0))
    assert hashed(made({"b": 1, "a": {1, 2}})) == hashed(made({"a": {2, 1}, "b": 1}))
    assert hashed(made(made(1))) != hashed(made(made(2)))
    assert hashed(made(Path("/somewhere"))) == hashed(made(Path("/elsewhere")))
    assert hashed(made("/somewhere")) == hashed(made("/elsewhere"))
    assert hashed(made({"password": "a"})) == hashed(made({"password": "b"}))
    assert hashed(made(object())) == hashed(made(object()))


def test_defaults_partials_methods_and_callable_objects_count() -> None:
    def f(x: int, y: int = 1) -> int:
        return x + y

    @dataclass
    class Adding:
        y: int

        def __call__(self, x: int) -> int:
            return x + self.y

        def method(self, x: int) -> int:
            return x + self.y

    assert hashed(functools.partial(f, 1)) == hashed(functools.partial(f, 1))
    assert hashed(functools.partial(f, 1)) != hashed(functools.partial(f, 2))
    assert hashed(functools.partial(f, y=1)) != hashed(functools.partial(f, y=2))
    assert hashed(Adding(1)) == hashed(Adding(1))
    assert hashed(Adding(1)) != hashed(Adding(2))
    assert hashed(Adding(1).method) != hashed(Adding(2).method)
    assert hashed(f) != hashed(Adding(1))


def test_a_function_that_refers_to_itself_has_a_hash() -> None:
    def f(x: int) -> int:
        return f(x - 1) if x else 0

    assert hashed(f) == hashed(f)
    assert hashed(typed("def f(x):\n    return g(x)\ndef g(x):\n    return f(x)"))


@pytest.mark.parametrize("is_longer", [True, False])
def test_a_file_that_was_edited_after_it_was_loaded_is_not_believed(tmp_path: Path, *, is_longer: bool) -> None:
    path = tmp_path / "module.py"
    text = "def f(x):\n    return x + 1\n"
    path.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    running, parts = hashed(names["f"]), Functions().parts(names["f"])
    assert parts[0] == "source"
    path.write_text(text.replace("1", "100" if is_longer else "2"))
    linecache.clearcache()
    assert Functions().parts(names["f"])[0] == "bytecode"
    assert hashed(names["f"]) != running


def test_places_are_recognised() -> None:
    assert [text for text in ("/a", "~/a", "s3://a", "a/b", "a", "") if is_place(text)] == ["/a", "~/a", "s3://a"]


class _Failing(int):
    def __repr__(self) -> str:
        raise OSError("the database does not answer")


def test_a_value_that_cannot_be_looked_at_counts_as_its_type() -> None:
    def made(value: Any) -> Callable[..., Any]:
        return lambda x: (x, value)

    assert hashed(made(_Failing(1))) == hashed(made([_Failing(2)][0]))
    assert hashed(made(_Failing(1))) != hashed(made(1))
