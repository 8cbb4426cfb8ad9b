"""Every option of a run, each declared once: its type, its notation, its range, and its meaning. Pure.

Parsing, the names in the environment, the checks of ``cutline.toml``, the command line's help and the table in
``docs/guide.md`` are all derived from the annotations of ``Options``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from cutline.config.values import Choice, Count, Duration, Kind, Ladder, Place, Size, TextTable
from cutline.errors import ConfigError

OnFailure = Literal["end", "stay"]
Mode = Literal["auto", "aligned", "unaligned", "per-operator"]
Tier = Literal["local", "remote"]
StateBackend = Literal["rocksdb-changelog", "rocksdb", "heap"]
MissingInput = Literal["fail", "continue"]

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
#: All checkpoints for ten minutes, then one a minute for two hours, one an hour for two days, one a day for a week.
WEEK = ((10 * _MINUTE, 0), (2 * _HOUR, _MINUTE), (2 * _DAY, _HOUR), (7 * _DAY, _DAY))


@dataclass(frozen=True, slots=True)
class Doc:
    """What an option means, as printed in the guide and in the command line's help."""

    text: str


@dataclass(frozen=True, slots=True)
class PerOperator:
    """A single operator may have its own value, from ``Flow.operator`` or from ``[operators.<name>]``."""


class OperatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``Options`` that are marked PerOperator, for one operator; None: as for the flow."""

    mode: Mode | None = None
    alignment_timeout_ms: int | None = None
    #: Per-operator mode only.
    checkpoint_interval_ms: int | None = None
    #: How long the operator may take to acknowledge an epoch before it fails it.
    checkpoint_timeout_ms: int | None = None
    replicate_interval_ms: int | None = None

    def sets_alignment(self) -> bool:
        return self.mode is not None or self.alignment_timeout_ms is not None

    def alignment_limit_ms(self, flow: Options) -> int | None:
        """How long this operator may wait for alignment: None means without limit."""
        timeout_ms = flow.alignment_timeout_ms if self.alignment_timeout_ms is None else self.alignment_timeout_ms
        return _LIMITS_MS.get(self.mode or flow.mode, timeout_ms)

    def over(self, other: OperatorOptions) -> OperatorOptions:
        """These options; where unset, the other ones."""
        mine = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **mine)


#: Modes whose limit is fixed; "auto" waits for the alignment timeout.
_LIMITS_MS: dict[Mode, int | None] = {"aligned": None, "unaligned": 0, "per-operator": 0}


class _OperatorTables:
    """The value of ``operators``: a table of options for each operator that has its own."""

    def parse(self, option: str, value: Any) -> dict[str, OperatorOptions]:
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{option}: {value!r} is not a table", next_step="write [operators.<name>] in cutline.toml"
            )
        for name, settings in value.items():
            if not isinstance(settings, Mapping):
                raise ConfigError(
                    f"{option}.{name}: {settings!r} is not a table", next_step=f"write [operators.{name}]"
                )
        return {name: operator_options(settings, where=f"{option}.{name}") for name, settings in value.items()}

    def show(self, value: Any) -> str:
        return ""

    def allowed(self) -> str:
        return "tables `[operators.<name>]`"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that may be set for a run; the same names in ``cutline.toml``, as CUTLINE_… and as flags.

    A duration's field ends in ``_ms``; users write its name without that.
    """

    storage: Annotated[
        str,
        Place("cutline-data", is_needed=True),
        Doc("Folder for everything Cutline stores; each flow has a sub-folder of its name."),
    ] = "cutline-data"

    # ------------------------------------------------------------------ when checkpoints are taken

    checkpoint_interval_ms: Annotated[
        int,
        Duration(),
        PerOperator(),
        Doc(
            "Time between automatic checkpoints, and so the time that rows wait to be published. The first one of a "
            "new flow begins as soon as every operator with a sink has made rows. 0: checkpoints are taken only on "
            "request."
        ),
    ] = 10_000
    checkpoint_every_batches: Annotated[
        int, Count(), Doc("A checkpoint also begins after this many batches of the sources. 0: never.")
    ] = 0
    checkpoint_every_rows: Annotated[
        int, Count(), Doc("A checkpoint also begins after this many rows of the sources. 0: never.")
    ] = 0
    checkpoint_event_time_ms: Annotated[
        int,
        Duration(),
        Doc("A checkpoint also begins when all watermarks have passed another multiple of this. 0: never."),
    ] = 0
    checkpoint_interval_backlog_ms: Annotated[
        int, Duration(), Doc("The interval while a channel is full, if it is longer than checkpoint_interval.")
    ] = 0
    min_pause_ms: Annotated[
        int, Duration(), Doc("Least time between the end of one checkpoint and the start of the next automatic one.")
    ] = 0
    max_concurrent_checkpoints: Annotated[int, Count(1), Doc("Most checkpoints in progress at the same time.")] = 1

    # ------------------------------------------------------------------ when a checkpoint fails

    checkpoint_timeout_ms: Annotated[
        int,
        Duration(never_zero="no checkpoint could ever complete"),
        PerOperator(),
        Doc(
            "A checkpoint that is not complete after this long is aborted. The flow continues, and the next checkpoint "
            "covers its rows. For a single operator: how long it may take to acknowledge."
        ),
    ] = 60_000
    operator_timeout_ms: Annotated[
        int | None,
        Duration(never_zero="no operator could ever acknowledge"),
        Doc("A checkpoint is aborted if one operator takes longer than this to acknowledge it."),
    ] = None
    tolerable_failures: Annotated[
        int | None,
        Count(),
        Doc(
            "Consecutive aborted checkpoints tolerated before the flow counts as `unhealthy`, until one completes. "
            "Unset: any number."
        ),
    ] = None
    message_retry_ms: Annotated[
        int,
        Duration(never_zero="messages would be repeated without end"),
        Doc("Pause before an unanswered message between coordinator and operator is sent again; doubles each time."),
    ] = 500
    message_retry_limit: Annotated[int, Count(), Doc("How often such a message is sent again.")] = 8

    # ------------------------------------------------------------------ how operators cut

    mode: Annotated[
        Mode,
        Choice(get_args(Mode)),
        PerOperator(),
        Doc(
            "How an operator with several inputs cuts: `aligned` waits for all barriers, `unaligned` never waits, "
            "`auto` waits for alignment_timeout. `per-operator`: each operator is checkpointed by itself."
        ),
    ] = "auto"
    alignment_timeout_ms: Annotated[
        int, Duration(), PerOperator(), Doc("How long mode `auto` waits for alignment.")
    ] = 50

    # ------------------------------------------------------------------ what is kept

    retain_checkpoints: Annotated[int, Count(1), Doc("Complete checkpoints to keep.")] = 3
    retain_age_ms: Annotated[
        int | None, Duration(), Doc("Checkpoints younger than this are kept beyond that number. Unset: age keeps none.")
    ] = None
    retain: Annotated[
        tuple[tuple[int, int], ...],
        Ladder(),
        Doc(
            "Checkpoints to keep beyond that, ever more sparsely: `10min, 2h/1min` keeps all for ten minutes, then one "
            "a minute until they are two hours old. They need no logs. Empty: none. Not in `per-operator` mode."
        ),
    ] = WEEK

    auto_savepoints: Annotated[
        int,
        Count(),
        Doc(
            "Savepoints to keep of those that a start takes when the flow's code has changed. 0: none is taken, and "
            "none is removed."
        ),
    ] = 5

    # ------------------------------------------------------------------ channels and queries

    channel_capacity_entries: Annotated[
        int, Count(1), Doc("A channel with this many unread entries blocks its producer.")
    ] = 64
    channel_capacity_bytes: Annotated[
        int, Size(1), Doc("A channel with this much unread data blocks its producer.")
    ] = 512 << 20
    max_batch_bytes: Annotated[
        int, Size(1), Doc("Most bytes that one batch reads from one channel; at least one entry is always read.")
    ] = 128 << 20
    restart_limit: Annotated[
        int,
        Count(),
        Doc(
            "How often in a row a query is restarted that fails without finishing a batch. Then its region is "
            "restored; if it finishes no further batch then, the flow ends."
        ),
    ] = 5
    restart_backoff_ms: Annotated[
        int, Duration(), Doc("Pause before a failed query is restarted; doubles each time.")
    ] = 500
    on_failure: Annotated[
        OnFailure,
        Choice(get_args(OnFailure)),
        Doc(
            "When the flow cannot continue: `end` ends it with the error; `stay` stops all work and keeps the process, "
            "with state `failed` and the error in its status, until it is stopped."
        ),
    ] = "end"
    state_backend: Annotated[
        StateBackend,
        Choice(get_args(StateBackend)),
        Doc("Where Spark keeps state; choose before the first run. transformWithState needs RocksDB."),
    ] = "rocksdb-changelog"
    missing_input: Annotated[
        MissingInput,
        Choice(get_args(MissingInput)),
        Doc(
            "When a source cannot read again what a restore needs: `fail` refuses the restore, `continue` reads on "
            "from the earliest input that is left and records what is lost; see [sources.md](sources.md)."
        ),
    ] = "fail"

    # ------------------------------------------------------------------ the remote tier, several machines

    remote: Annotated[
        str,
        Place("s3://bucket/prefix"),
        Doc(
            "A second place for checkpoints: a bucket (`s3://`, `gs://`, `az://`), or a folder on another disk; see "
            "[storage.md](storage.md)."
        ),
    ] = ""
    remote_options: Annotated[
        dict[str, str],
        TextTable("remote_options"),
        Doc("What the object store's client needs beside the environment: endpoint, region … Never put secrets here."),
    ] = {}
    durable: Annotated[
        Tier, Choice(get_args(Tier)), Doc("A checkpoint is complete when it is stored in this tier.")
    ] = "local"
    replicate_interval_ms: Annotated[
        int,
        Duration(),
        PerOperator(),
        Doc(
            "Least time between two uploads to the remote tier; the newest checkpoint is uploaded. 0: every "
            "checkpoint, or the newest one if they come faster. See [storage.md](storage.md)."
        ),
    ] = 0
    source_check_interval_ms: Annotated[
        int,
        Duration(),
        Doc(
            "How often the servers of sources are asked how far behind the flow is, and until when they keep what the "
            "oldest checkpoint needs, for the status and metrics. 0: never."
        ),
    ] = 10_000
    remote_grace_ms: Annotated[
        int, Duration(), Doc("Files that no checkpoint needs are collected from the remote tier after this long.")
    ] = 3_600_000
    executor_transfer_bytes: Annotated[
        int | None,
        Size(),
        Doc(
            "From this much on, uploads and downloads run on the executors, in Spark jobs of their own. 0: never. "
            "Unset: 64MB if executors run on other machines than the driver, otherwise never."
        ),
    ] = None
    channel_store: Annotated[
        str,
        Place("s3://bucket/prefix"),
        Doc(
            "Where the rows between operators are stored, for executors on several machines. Unset: in `storage`. See "
            "[storage.md](storage.md#several-machines)."
        ),
    ] = ""
    spark_dirs: Annotated[
        str,
        Place("hdfs://host/path"),
        Doc(
            "Where Spark's own directories are, for executors on several machines: a URL that your Spark can open. "
            "Unset: in `storage`."
        ),
    ] = ""
    operators: Annotated[
        dict[str, OperatorOptions],
        _OperatorTables(),
        Doc("Options of single operators, by name; they win over what the code says."),
    ] = {}

    def alignment_limit_ms(self) -> int | None:
        """How long an operator may wait for alignment: None means without limit."""
        return _LIMITS_MS.get(self.mode, self.alignment_timeout_ms)

    @property
    def is_per_operator(self) -> bool:
        return self.mode == "per-operator"

    def of_operator(self, name: str, declared: OperatorOptions) -> OperatorOptions:
        """An operator's own options: configuration wins over ``declared``, those in code."""
        return self.operators.get(name, OperatorOptions()).over(declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One option as its annotation declares it."""

    #: As users write it.
    name: str
    #: The field of Options.
    field: str
    kind: Kind
    default: Any
    is_per_operator: bool
    doc: str

    @property
    def environment_name(self) -> str:
        return f"{ENVIRONMENT_PREFIX}{self.name.upper()}"

    def shown_default(self) -> str:
        """As a user would write it; empty: not set."""
        return "" if self.default is None else self.kind.show(self.default)


ENVIRONMENT_PREFIX = "CUTLINE_"


@cache
def declarations() -> dict[str, Declaration]:
    """All options by the names that users write."""
    hints = get_type_hints(Options, include_extras=True)
    found = [_declaration(field, hints[field.name]) for field in msgspec.structs.fields(Options)]
    return {one.name: one for one in found}


def _declaration(field: msgspec.structs.FieldInfo, hint: Any) -> Declaration:
    marks = hint.__metadata__
    (doc,) = (mark.text for mark in marks if isinstance(mark, Doc))
    (kind,) = (mark for mark in marks if hasattr(mark, "parse"))
    return Declaration(
        name=field.name.removesuffix("_ms") if isinstance(kind, Duration) else field.name,
        field=field.name,
        kind=kind,
        default=field.default if field.default is not msgspec.NODEFAULT else field.default_factory(),
        is_per_operator=any(isinstance(mark, PerOperator) for mark in marks),
        doc=doc,
    )


#: The names a user writes, in every place where options can be set.
OPTION_NAMES: tuple[str, ...] = tuple(declarations())
#: The options that an operator may have for itself.
OPERATOR_OPTION_NAMES: tuple[str, ...] = tuple(one.name for one in declarations().values() if one.is_per_operator)


def doc_of(name: str) -> str:
    """What the option means, without Markdown, for the command line's help."""
    return declarations()[name].doc.replace("`", "")


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
            option = declarations()[name]
            try:
                fields[option.field] = option.kind.parse(name, value)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error.what}", next_step=error.next_step) from error
    if fields.get("mode") == "per-operator":
        raise ConfigError(
            f"{where}: an operator cannot be in per-operator mode by itself", next_step="set mode for the whole flow"
        )
    return OperatorOptions(**fields)


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


def _field(name: str, value: Any) -> tuple[str, Any]:
    option = declarations().get(name)
    if option is None:
        meant = difflib.get_close_matches(name, OPTION_NAMES)
        known = f"did you mean {' or '.join(meant)}?" if meant else f"options are: {', '.join(OPTION_NAMES)}"
        raise ConfigError(f"unknown option {name!r}", next_step=known)
    return option.field, option.kind.parse(name, value)
