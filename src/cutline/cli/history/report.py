"""The report of a restore, before or after it was requested: as JSON, and in lines for a person."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import msgspec

from cutline.cli.history.moments import shown_moment
from cutline.cli.words import counted, rate, size, span
from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId, SinkId
from cutline.model.status import OperatorFate

_SHORT_SECONDS = 120


class SinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one sink. Field names are the keys of ``--json``, as in all of these."""

    sink: SinkId
    operator: OperatorId
    #: nothing, rewind, keep (rows that are given up stay, and come again) or refuse.
    fate: str
    published: Epoch
    #: The oldest epoch that it can be rewound to; 0: any.
    oldest_rewind: Epoch
    #: Published epochs, and their rows, that are withdrawn; kept: that come again.
    epochs: int
    rows: int
    #: Of these epochs, those whose rows were not measured.
    unmeasured: int
    #: Why the start refuses because of it.
    why: str = ""
    #: Why it could not be asked.
    problem: str = ""


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one source reads again."""

    operator: OperatorId
    rows: int
    unmeasured: int
    batches: int
    #: Per source of the operator, as Spark records positions.
    positions_then: dict[str, str]
    positions_now: dict[str, str]
    #: Whether all its sources can be asked for their input.
    is_guarded: bool
    #: Why it is not known whether its input still exists, per source that is not guarded.
    unguarded: list[str]


class EstimateReport(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes until the flow is where it is now, beside the start itself."""

    seconds: float
    #: The operator that needs longest.
    operator: OperatorId
    rows: int
    rows_per_second: float


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a start that restores this epoch does, or would do."""

    flow: str
    #: An epoch, or the name of a savepoint.
    to: str
    epoch: Epoch
    #: The moment of --at in UTC, in local time, and the zone of that.
    at: str | None = None
    at_local: str | None = None
    zone: str | None = None
    completed: str
    completed_ms: int
    age_ms: int
    #: The code that made the checkpoint.
    code: str
    size_bytes: int
    #: Where its content is: local or remote; empty: the start would refuse.
    tier: str = ""
    is_running: bool
    is_dry_run: bool = False
    would_refuse: bool
    why: str = ""
    next_step: str = ""
    given_up: list[Epoch]
    sinks: list[SinkReport]
    sources: list[SourceReport]
    estimate: EstimateReport | None
    operators: list[OperatorFate] = []
    lost_input: list[LostInput] = []
    is_compared_with_code: bool
    notes: list[str]


def lines_of(report: RestoreReport) -> Iterator[str]:
    """The report without the table of operators."""
    if report.would_refuse:
        yield f"the start would refuse: {report.why}"
        yield f"Next: {report.next_step or 'choose another checkpoint: cutline checkpoints'}"
    would = "would restore" if report.is_dry_run else "restores"
    named = "" if report.to == str(report.epoch) else f" (savepoint {report.to}, code {report.code or 'unknown'})"
    running = "; it runs now" if report.is_running and report.is_dry_run else ""
    if report.would_refuse:
        yield f"asked for: epoch {report.epoch} of flow {report.flow}{named}{running}"
    else:
        yield f"the next start of flow {report.flow} {would} epoch {report.epoch}{named}{running}"
    moment = datetime.datetime.fromtimestamp(report.completed_ms / 1000, tz=datetime.UTC)
    yield f"  taken {shown_moment(moment)}, {span(report.age_ms)} ago; {size(report.size_bytes)}{_tier(report)}"
    if not report.would_refuse:
        yield f"given up: {_given_up(report.given_up)}"
    yield from (f"sink {one.sink}: {_sink(one, report)}" for one in report.sinks)
    yield from (f"source {one.operator}: {_source(one, report)}" for one in report.sources)
    yield from (f"lost input of {one.operator}: {one.what}: {one.why}" for one in report.lost_input)
    if report.estimate is not None and not report.would_refuse:
        yield _time(report.estimate)
    yield from (f"note: {note}" for note in report.notes)


def _tier(report: RestoreReport) -> str:
    return ", downloaded from the remote tier" if report.tier == "remote" else ""


def _given_up(epochs: list[Epoch]) -> str:
    if not epochs:
        return "all work since then; no later checkpoint is complete"
    numbers = str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"
    return f"{counted(len(epochs), 'checkpoint')} ({numbers}), and all work since then"


def _later(one: SinkReport, report: RestoreReport) -> str:
    """Why fewer epochs are withdrawn from the sink than are given up."""
    later = [epoch for epoch in report.given_up if epoch > one.published]
    if not later:
        return ""
    return f"; no rows of epoch {later[0]}{f' to {later[-1]}' if len(later) > 1 else ''} were published to it"


def _sink(one: SinkReport, report: RestoreReport) -> str:
    epoch = report.epoch
    what = f"{counted(one.epochs, 'epoch')}, {_rows(one.rows, one.unmeasured)}"
    so_far = f"; it can be rewound to epoch {one.oldest_rewind} or later" if one.oldest_rewind else ""
    match one.fate:
        case "rewind":
            return f"rewound from epoch {one.published} to {epoch}: {what} withdrawn{_later(one, report)}{so_far}"
        case "keep":
            return f"keeps what it has published since, up to epoch {one.published}, and gets it again: {what}"
        case "refuse":
            return f"has published epoch {one.published} ({what} since then) and {one.why}"
        case _:
            return "nothing that it has published is withdrawn"


def _source(one: SourceReport, report: RestoreReport) -> str:
    batches = f" ({counted(one.batches, 'batch', 'batches')})" if one.batches else ""
    is_there = one.is_guarded and not report.would_refuse and not report.lost_input
    checked = "; its input is still there" if is_there else ""
    unknown = f"; whether its input is still there is not known: {one.unguarded[0]}" if one.unguarded else checked
    return f"{_rows(one.rows, one.unmeasured)}{batches} read again{unknown}"


def _rows(rows: int, unmeasured: int) -> str:
    return f"at least {counted(rows, 'row')}" if unmeasured else counted(rows, "row")


def _time(one: EstimateReport) -> str:
    shown = f"{one.seconds:.0f} s" if one.seconds < _SHORT_SECONDS else span(round(one.seconds * 1000))
    about = f"about {shown}" if one.seconds >= 1 else "less than a second"
    return (
        f"time: {about} until it is where it is now, beside the start itself: "
        f"{one.operator} has processed {rate(one.rows_per_second)} rows/s"
    )
