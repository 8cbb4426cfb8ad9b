"""How the value of an option is written, checked and shown: durations, sizes, counts, choices, places, tables. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cutline.errors import ConfigError

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS_BYTES = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}

#: What a signed number of 64 bits can hold: values are stored, added, and passed to Spark.
MOST = (1 << 62) - 1


def parse_duration_ms(value: str | float, *, option: str = "duration") -> int:
    """``"10s"``, ``"500ms"``, ``"2m"``, or a number of seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        amount, factor = float(value), 1_000
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*", value) if isinstance(value, str) else None
        if match is None:
            raise ConfigError(f"{option}: {value!r} is not a duration", next_step='write for example "10s" or "500ms"')
        amount, factor = float(match[1]), _UNITS_MS[match[2]]
    if amount < 0:
        raise ConfigError(f"{option}: {value!r} is negative", next_step="use zero or more")
    if amount * factor > MOST:
        raise ConfigError(f"{option}: {value!r} is too long", next_step="use a shorter duration")
    return round(amount * factor)


def parse_bytes(value: str | int, *, option: str = "size") -> int:
    """``"64MB"``, ``"512kb"``, or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+)\s*(b|kb|mb|gb|)\s*", str(value).lower())
    if match is None or isinstance(value, bool):
        raise ConfigError(f"{option}: {value!r} is not a size", next_step='write for example "64MB"')
    if len(match[1]) > len(str(MOST)) or (size := int(match[1]) * _UNITS_BYTES[match[2]]) > MOST:
        raise ConfigError(f"{option}: {value!r} is too large", next_step="use a smaller size")
    return size


class Kind(Protocol):
    """The kind of an option's value."""

    def parse(self, option: str, value: Any) -> Any:
        """Parse what the user wrote. Raises ConfigError, which names the option, the value and what is allowed."""

    def show(self, value: Any) -> str:
        """A value as a user would write it."""

    def allowed(self) -> str:
        """What may be written, in a few words."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Milliseconds. ``never_zero`` says why zero is refused; empty: zero is allowed."""

    never_zero: str = ""

    def parse(self, option: str, value: Any) -> int:
        duration_ms = parse_duration_ms(value, option=option)
        if self.never_zero and not duration_ms:
            raise ConfigError(f"{option}: {self.never_zero}", next_step="use more than zero")
        return duration_ms

    def show(self, value: Any) -> str:
        for unit in ("d", "h", "min", "s"):
            if value and value % _UNITS_MS[unit] == 0 and (value >= 2 * _UNITS_MS[unit] or unit != "min"):
                return f"{value // _UNITS_MS[unit]}{unit}"
        return f"{value}ms" if value else "0"

    def allowed(self) -> str:
        return "duration above 0" if self.never_zero else "duration"


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes."""

    least: int = 0

    def parse(self, option: str, value: Any) -> int:
        return _at_least(self.least, option, parse_bytes(value, option=option))

    def show(self, value: Any) -> str:
        for unit in ("gb", "mb", "kb"):
            if value and value % _UNITS_BYTES[unit] == 0:
                return f"{value // _UNITS_BYTES[unit]}{unit.upper()}"
        return str(value)

    def allowed(self) -> str:
        return "size above 0" if self.least else "size"


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number."""

    least: int = 0

    def parse(self, option: str, value: Any) -> int:
        try:
            count = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
        except ValueError:
            count = None
        if count is not None and count > MOST:
            raise ConfigError(f"{option}: {value!r} is too large", next_step=f"use {MOST} or less")
        if count is None:
            raise ConfigError(f"{option}: {value!r} is not a whole number", next_step=f"use {self.least} or more")
        return _at_least(self.least, option, count)

    def show(self, value: Any) -> str:
        return str(value)

    def allowed(self) -> str:
        return f"{self.least} or more"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Pairs of milliseconds: until which age, and one in each how many; 0: each one."""

    def parse(self, option: str, value: Any) -> tuple[tuple[int, int], ...]:
        texts = value.split(",") if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            raise ConfigError(f"{option}: {value!r} is not a list of durations", next_step=self._example())
        rungs = tuple(self._rung(option, one) for one in texts if one.strip())
        for before, after in itertools.pairwise(rungs):
            if after[0] <= before[0] or after[1] <= before[1]:
                raise ConfigError(
                    f"{option}: {self.show([after])} does not follow {self.show([before])}",
                    next_step=f"let ages and distances grow; {self._example()}",
                )
        return rungs

    def _rung(self, option: str, text: str) -> tuple[int, int]:
        until, has_distance, every = text.partition("/")
        rung = (
            parse_duration_ms(until, option=option),
            parse_duration_ms(every, option=option) if has_distance else 0,
        )
        if rung[1] >= rung[0] or (has_distance and not rung[1]):
            raise ConfigError(f"{option}: {text.strip()!r} keeps nothing", next_step=self._example())
        return rung

    def _example(self) -> str:
        return 'write for example "10min, 2h/1min, 2d/1h": all for ten minutes, then one a minute, then one an hour'

    def show(self, value: Any) -> str:
        return ", ".join(
            f"{self._span(until)}/{self._span(every)}" if every else self._span(until) for until, every in value
        )

    def _span(self, value: int) -> str:
        return "1min" if value == _UNITS_MS["min"] else Duration().show(value)

    def allowed(self) -> str:
        return "durations, each with the distance of what stays until that age"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def parse(self, option: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ConfigError(f"{option}: {value!r} is not known", next_step=f"use one of {', '.join(self.words)}")
        return str(value)

    def show(self, value: Any) -> str:
        return str(value)

    def allowed(self) -> str:
        return ", ".join(f"`{word}`" for word in self.words)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or a URL. ``is_needed``: it cannot be left empty."""

    example: str
    is_needed: bool = False

    def parse(self, option: str, value: Any) -> str:
        # A pathlib.Path is accepted; this module must not import pathlib.
        text = value.__fspath__() if hasattr(value, "__fspath__") else value
        if not isinstance(text, str) or (self.is_needed and not text):
            raise ConfigError(f"{option}: {value!r} is not a place", next_step=f'write for example "{self.example}"')
        return text

    def show(self, value: Any) -> str:
        return str(value)

    def allowed(self) -> str:
        return f"for example `{self.example}`"


@dataclass(frozen=True, slots=True)
class TextTable:
    """Names and texts. ``table``: how its section is called in ``cutline.toml``."""

    table: str

    def parse(self, option: str, value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping) or not all(isinstance(one, str) for pair in value.items() for one in pair):
            raise ConfigError(f"{option}: not a table of texts", next_step=f"write [{self.table}] in cutline.toml")
        return dict(value)

    def show(self, value: Any) -> str:
        return ""

    def allowed(self) -> str:
        return f"table `[{self.table}]`"


def _at_least(least: int, option: str, value: int) -> int:
    if value < least:
        raise ConfigError(f"{option}: {value} is too small", next_step=f"use {least} or more")
    return value
