"""Options of a run. Flags win over the environment, the environment over ``cutline.toml``, that over the defaults."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from cutline.errors import ConfigError

ENVIRONMENT_PREFIX = "CUTLINE_"
Mode = Literal["auto", "aligned", "unaligned"]
StateBackend = Literal["rocksdb-changelog", "rocksdb", "heap"]

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS_BYTES = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


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
    return round(amount * factor)


def parse_bytes(value: str | int, *, option: str = "size") -> int:
    """``"64MB"``, ``"512kb"``, or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+)\s*(b|kb|mb|gb|)\s*", str(value).lower())
    if match is None:
        raise ConfigError(f"{option}: {value!r} is not a size", next_step='write for example "64MB"')
    return int(match[1]) * _UNITS_BYTES[match[2]]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that may be set for a run; the same names in ``cutline.toml``, as CUTLINE_… and as flags."""

    #: Folder that holds everything Cutline stores; a flow gets a sub-folder of its name.
    storage: str = "cutline-data"
    #: Time between automatic checkpoints; 0 switches the timer off (checkpoints are then only taken when asked for).
    checkpoint_interval_ms: int = 10_000
    #: At least this long between the end of one checkpoint and the start of the next.
    min_pause_ms: int = 0
    #: An epoch that is not complete after this long is aborted.
    checkpoint_timeout_ms: int = 60_000
    #: Most epochs pending at once.
    max_concurrent_checkpoints: int = 1
    #: auto: aligned for alignment_timeout, then unaligned. aligned: no limit. unaligned: never waits.
    mode: Mode = "auto"
    alignment_timeout_ms: int = 50
    #: Complete checkpoints to keep.
    retain_checkpoints: int = 3
    #: A channel holding this much unread data blocks its producer.
    channel_capacity_entries: int = 64
    channel_capacity_bytes: int = 512 << 20
    #: Most bytes one batch reads from one channel (at least one entry is always read).
    max_batch_bytes: int = 128 << 20
    #: How a failed query is restarted: so many times in a row without progress, with doubling pauses.
    restart_limit: int = 5
    restart_backoff_ms: int = 500
    state_backend: StateBackend = "rocksdb-changelog"

    def alignment_limit_ms(self) -> int | None:
        """How long an operator may wait for alignment: None means without limit."""
        return {"aligned": None, "unaligned": 0, "auto": self.alignment_timeout_ms}[self.mode]


_DURATIONS = {
    "checkpoint_interval": "checkpoint_interval_ms",
    "min_pause": "min_pause_ms",
    "checkpoint_timeout": "checkpoint_timeout_ms",
    "alignment_timeout": "alignment_timeout_ms",
    "restart_backoff": "restart_backoff_ms",
}
#: A channel without any room would block its producer for good.
_SIZES = {"channel_capacity_bytes": 1, "max_batch_bytes": 1}
_COUNTS = {"max_concurrent_checkpoints": 1, "retain_checkpoints": 1, "channel_capacity_entries": 1, "restart_limit": 0}
_CHOICES: dict[str, tuple[str, ...]] = {"mode": get_args(Mode), "state_backend": get_args(StateBackend)}

#: The names a user writes, in every place where options can be set.
OPTION_NAMES: tuple[str, ...] = ("storage", *_DURATIONS, *_SIZES, *_COUNTS, *_CHOICES)


def _field(name: str, value: Any) -> tuple[str, Any]:
    if name in _DURATIONS:
        duration_ms = parse_duration_ms(value, option=name)
        if name == "checkpoint_timeout" and not duration_ms:
            raise ConfigError(f"{name}: no checkpoint could ever complete", next_step="use more than zero")
        return _DURATIONS[name], duration_ms
    if name in _SIZES:
        return name, _at_least(_SIZES[name], name, parse_bytes(value, option=name))
    if name in _COUNTS:
        try:
            count = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
        except ValueError:
            count = None
        if count is None:
            raise ConfigError(f"{name}: {value!r} is not a whole number")
        return name, _at_least(_COUNTS[name], name, count)
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ConfigError(f"{name}: {value!r} is not known", next_step=f"use one of {', '.join(_CHOICES[name])}")
        return name, value
    if name == "storage":
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ConfigError(f"{name}: {value!r} is not a folder")
        return name, os.fspath(value)
    raise ConfigError(f"unknown option {name!r}", next_step=f"options are: {', '.join(OPTION_NAMES)}")


def _at_least(least: int, name: str, value: int) -> int:
    if value < least:
        raise ConfigError(f"{name}: {value} is too small", next_step=f"use {least} or more")
    return value


def build_options(*layers: Mapping[str, Any]) -> Options:
    """Options from layers of settings, the later ones winning; None means "not set here"."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(_field(name, value) for name, value in layer.items() if value is not None)
    return Options(**merged)


def environment_layer(environment: Mapping[str, str]) -> dict[str, str]:
    """The options set as CUTLINE_… variables."""
    names = {f"{ENVIRONMENT_PREFIX}{name.upper()}": name for name in OPTION_NAMES}
    return {names[key]: value for key, value in environment.items() if key in names}


def file_layer(path: Path) -> dict[str, Any]:
    """The options in a ``cutline.toml``, which hold in its top level."""
    try:
        loaded = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path.name} is not there", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}", path=path) from error
    return loaded
