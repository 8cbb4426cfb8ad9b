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
Mode = Literal["auto", "aligned", "unaligned", "per-operator"]
Tier = Literal["local", "remote"]
StateBackend = Literal["rocksdb-changelog", "rocksdb", "heap"]
MissingInput = Literal["fail", "continue"]

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


class OperatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What may be set for one operator; None: as for the flow."""

    mode: Mode | None = None
    alignment_timeout_ms: int | None = None
    #: Per-operator mode only: the time between this operator's checkpoints.
    checkpoint_interval_ms: int | None = None
    #: An operator that has not acknowledged an epoch after this long fails it.
    checkpoint_timeout_ms: int | None = None
    #: At least so long between two times that this operator's content is sent to the remote tier.
    replicate_interval_ms: int | None = None

    def sets_alignment(self) -> bool:
        return self.mode is not None or self.alignment_timeout_ms is not None

    def alignment_limit_ms(self, flow: Options) -> int | None:
        """How long this operator may wait for alignment: None means without limit."""
        timeout_ms = flow.alignment_timeout_ms if self.alignment_timeout_ms is None else self.alignment_timeout_ms
        return _LIMITS_MS.get(self.mode or flow.mode, timeout_ms)

    def over(self, other: OperatorOptions) -> OperatorOptions:
        """These, and for what they do not set, the other ones."""
        mine = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **mine)


#: Modes whose limit is fixed; "auto" waits for the alignment timeout.
_LIMITS_MS: dict[Mode, int | None] = {"aligned": None, "unaligned": 0, "per-operator": 0}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that may be set for a run; the same names in ``cutline.toml``, as CUTLINE_… and as flags."""

    #: Folder that holds everything Cutline stores; a flow gets a sub-folder of its name.
    storage: str = "cutline-data"
    #: Time between automatic checkpoints; 0 switches the timer off (checkpoints are then only taken when asked for).
    checkpoint_interval_ms: int = 10_000
    #: At least this long between the end of one checkpoint and the start of the next.
    min_pause_ms: int = 0
    #: A checkpoint also begins after so many batches or rows of the sources; 0 switches it off.
    checkpoint_every_batches: int = 0
    checkpoint_every_rows: int = 0
    #: And whenever all watermarks have passed another multiple of this; 0 switches it off.
    checkpoint_event_time_ms: int = 0
    #: The timer's interval while a channel is full, if that is longer; 0: no other.
    checkpoint_interval_backlog_ms: int = 0
    #: An epoch that is not complete after this long is aborted.
    checkpoint_timeout_ms: int = 60_000
    #: So long may a single operator take to acknowledge; None: as long as the checkpoint.
    operator_timeout_ms: int | None = None
    #: So many aborted checkpoints in a row are borne; with one more the flow is unhealthy. None: any number.
    tolerable_failures: int | None = None
    #: Most epochs pending at once.
    max_concurrent_checkpoints: int = 1
    #: auto: aligned for alignment_timeout, then unaligned. aligned: no limit. unaligned: never waits.
    #: per-operator: every operator is checkpointed by itself, at its own interval.
    mode: Mode = "auto"
    alignment_timeout_ms: int = 50
    #: Complete checkpoints to keep.
    retain_checkpoints: int = 3
    #: Younger ones are kept beyond that number. None: age keeps nothing.
    retain_age_ms: int | None = None
    #: A channel holding this much unread data blocks its producer.
    channel_capacity_entries: int = 64
    channel_capacity_bytes: int = 512 << 20
    #: Most bytes one batch reads from one channel (at least one entry is always read).
    max_batch_bytes: int = 128 << 20
    #: How a failed query is restarted: so many times in a row without progress, with doubling pauses.
    restart_limit: int = 5
    restart_backoff_ms: int = 500
    #: A message between coordinator and operator that is not answered is sent again: so often, with doubling pauses.
    message_retry_ms: int = 500
    message_retry_limit: int = 8
    state_backend: StateBackend = "rocksdb-changelog"
    #: When a source cannot read again what a restore needs: refuse, or go on with the earliest that is there.
    missing_input: MissingInput = "fail"
    #: Where checkpoints are copied to: "s3://bucket/prefix", "gs://…", "az://…", a folder on another disk. "": nowhere.
    remote: str = ""
    #: What the object store's client needs beside the environment: endpoint, region … No secrets belong here.
    remote_options: dict[str, str] = {}
    #: Where the rows between operators lie, for executors on several machines: "s3://bucket/prefix" … "": in storage.
    channel_store: str = ""
    #: Where Spark's own directories lie, for executors on several machines: a URL that the user's Spark can open,
    #: "hdfs://host/path" for example. "": in storage.
    spark_dirs: str = ""
    #: A checkpoint is complete when this tier has it.
    durable: Tier = "local"
    #: At least so long between two copies; 0: every checkpoint, or the newest one when they come faster.
    replicate_interval_ms: int = 0
    #: What no checkpoint needs is left in the remote tier for so long: somebody may be about to need it.
    remote_grace_ms: int = 3_600_000
    #: With at least so much to send or fetch at once, executors do it in Spark jobs of their own; 0: never.
    #: None: 64 MB if they are on other machines than the driver, otherwise always the driver.
    executor_transfer_bytes: int | None = None
    #: By the operator's name; wins over what the flow's code says of it.
    operators: dict[str, OperatorOptions] = {}

    def alignment_limit_ms(self) -> int | None:
        """How long an operator may wait for alignment: None means without limit."""
        return _LIMITS_MS.get(self.mode, self.alignment_timeout_ms)

    @property
    def is_per_operator(self) -> bool:
        return self.mode == "per-operator"


_DURATIONS = {
    "checkpoint_interval": "checkpoint_interval_ms",
    "min_pause": "min_pause_ms",
    "checkpoint_timeout": "checkpoint_timeout_ms",
    "alignment_timeout": "alignment_timeout_ms",
    "restart_backoff": "restart_backoff_ms",
    "checkpoint_event_time": "checkpoint_event_time_ms",
    "checkpoint_interval_backlog": "checkpoint_interval_backlog_ms",
    "operator_timeout": "operator_timeout_ms",
    "retain_age": "retain_age_ms",
    "message_retry": "message_retry_ms",
    "replicate_interval": "replicate_interval_ms",
    "remote_grace": "remote_grace_ms",
}
#: Zero would mean "at once, and never anything else".
_ABOVE_ZERO = {
    "checkpoint_timeout": "no checkpoint could ever complete",
    "operator_timeout": "no operator could ever acknowledge",
    "message_retry": "messages would be repeated without end",
}
#: A channel without any room would block its producer for good.
_SIZES = {"channel_capacity_bytes": 1, "max_batch_bytes": 1, "executor_transfer_bytes": 0}
_COUNTS = {
    "max_concurrent_checkpoints": 1,
    "retain_checkpoints": 1,
    "channel_capacity_entries": 1,
    "restart_limit": 0,
    "checkpoint_every_batches": 0,
    "checkpoint_every_rows": 0,
    "tolerable_failures": 0,
    "message_retry_limit": 0,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": get_args(Mode),
    "state_backend": get_args(StateBackend),
    "durable": get_args(Tier),
    "missing_input": get_args(MissingInput),
}

#: The names a user writes, in every place where options can be set.
OPTION_NAMES: tuple[str, ...] = (
    *("storage", "remote", "channel_store", "spark_dirs"),
    *_DURATIONS,
    *_SIZES,
    *_COUNTS,
    *_CHOICES,
    *("remote_options", "operators"),
)
#: Those of them that an operator may have for itself.
OPERATOR_OPTION_NAMES: tuple[str, ...] = (
    "mode",
    "alignment_timeout",
    "checkpoint_timeout",
    "checkpoint_interval",
    "replicate_interval",
)


def _field(name: str, value: Any) -> tuple[str, Any]:
    if name in _DURATIONS:
        duration_ms = parse_duration_ms(value, option=name)
        if name in _ABOVE_ZERO and not duration_ms:
            raise ConfigError(f"{name}: {_ABOVE_ZERO[name]}", next_step="use more than zero")
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
    if name in ("remote", "channel_store", "spark_dirs"):
        if not isinstance(value, str | os.PathLike):
            raise ConfigError(f"{name}: {value!r} is not a place", next_step='write for example "s3://bucket/prefix"')
        return name, os.fspath(value)
    if name == "remote_options":
        if not isinstance(value, Mapping) or not all(isinstance(one, str) for pair in value.items() for one in pair):
            raise ConfigError(f"{name}: not a table of texts", next_step="write [remote_options] in cutline.toml")
        return name, dict(value)
    if name == "operators":
        return name, _operators(value)
    raise ConfigError(f"unknown option {name!r}", next_step=f"options are: {', '.join(OPTION_NAMES)}")


def _at_least(least: int, name: str, value: int) -> int:
    if value < least:
        raise ConfigError(f"{name}: {value} is too small", next_step=f"use {least} or more")
    return value


def operator_options(settings: Mapping[str, Any], *, where: str) -> OperatorOptions:
    """One operator's own options; ``where`` names it in errors. None means "not set here"."""
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in OPERATOR_OPTION_NAMES:
            raise ConfigError(
                f"{where}: unknown option {name!r}",
                next_step=f"an operator's own options are: {', '.join(OPERATOR_OPTION_NAMES)}",
            )
        if value is not None:
            try:
                field, parsed = _field(name, value)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error.what}", next_step=error.next_step) from error
            fields[field] = parsed
    if fields.get("mode") == "per-operator":
        raise ConfigError(
            f"{where}: an operator cannot be in per-operator mode by itself", next_step="set mode for the whole flow"
        )
    return OperatorOptions(**fields)


def _operators(value: Any) -> dict[str, OperatorOptions]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"operators: {value!r} is not a table", next_step="write [operators.<name>] in cutline.toml")
    for name, settings in value.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"operators.{name}: {settings!r} is not a table", next_step=f"write [operators.{name}]")
    return {name: operator_options(settings, where=f"operators.{name}") for name, settings in value.items()}


def build_options(*layers: Mapping[str, Any]) -> Options:
    """Options from layers of settings, the later ones winning; None means "not set here"."""
    merged: dict[str, Any] = {}
    for layer in layers:
        fields = dict(_field(name, value) for name, value in layer.items() if value is not None)
        before: dict[str, OperatorOptions] = merged.get("operators", {})
        own: dict[str, OperatorOptions] = fields.pop("operators", {})
        merged.update(fields)
        merged["operators"] = {**before, **{name: one.over(before.get(name, one)) for name, one in own.items()}}
    return Options(**merged)


def environment_layer(environment: Mapping[str, str]) -> dict[str, str]:
    """The options set as CUTLINE_… variables."""
    names = {f"{ENVIRONMENT_PREFIX}{name.upper()}": name for name in OPTION_NAMES}
    return {names[key]: value for key, value in environment.items() if key in names}


def file_layer(path: Path) -> dict[str, Any]:
    """The options in a ``cutline.toml``: in its top level, and those of single operators in ``[operators.<name>]``."""
    try:
        loaded = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path.name} is not there", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}", path=path) from error
    return loaded
