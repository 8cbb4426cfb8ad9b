"""A live view of a running flow in the terminal, drawn from its status.

It fits 80 columns and uses more if there are more. docs/live-view.md explains every column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cutline.base.clock import now_ms
from cutline.cli.running.columns import Column, fitted
from cutline.cli.words import counted, number, rate, requested, size, span, state_words
from cutline.model.ids import NO_BATCH, NO_EPOCH
from cutline.model.status import EpochOutcome, FlowStatus, OperatorStatus, SinkStatus

#: From this width on there is room for everything.
_WIDE = 120
_SHOWN, _SHOWN_WIDE = 4, 8
#: Rows and checkpoints that wait longer than this are shown as trouble.
_LATE_MS, _VERY_LATE_MS = 30_000, 300_000
#: A checkpoint that is older than so many intervals is late.
_LATE_INTERVALS = 3
#: Input that is kept no longer than this is about to be lost.
_SHORT_MS = 3_600_000
_NOTHING = "–"
_NOT_UP = ("stopped", "failed", "starting", "ended", "copy", "new")
_STATE_STYLES = {
    "running": "green",
    "stopped": "dim",
    "paused": "yellow",
    "waiting": "yellow",
    "starting": "yellow",
    "new": "dim",
}

_OPERATOR_COLUMNS = (
    Column("operator"),
    Column("reads", rank=10),
    Column("rows/s", rank=1, is_number=True),
    Column("backlog", rank=2, is_number=True),
    Column("lag", rank=3, is_number=True),
    Column("state", rank=5, is_number=True),
    Column("batch", rank=8, is_number=True),
    Column("took", rank=7, is_number=True),
    Column("rows", rank=9, is_number=True),
    Column("restarts", rank=6, is_number=True),
    Column("query", rank=4, is_text=True),
)
_SINK_COLUMNS = (
    Column("sink"),
    Column("operator", rank=4),
    Column("published", rank=1),
    Column("lag", rank=2, is_number=True),
    Column("", rank=3, is_text=True),
)
_CHECKPOINT_COLUMNS = (
    Column("epoch", is_number=True),
    Column("outcome", rank=1),
    Column("ago", rank=2, is_number=True),
    Column("took", rank=3, is_number=True),
    Column("new", rank=4, is_number=True),
    Column("whole", rank=8, is_number=True),
    Column("in flight", rank=6, is_number=True),
    Column("code", rank=7),
    Column("", rank=5, is_text=True),
)


def flow_view(status: FlowStatus | None, note: str = "", *, at_ms: int | None = None) -> RenderableType:
    """Operators, channels, sinks and checkpoints at one glance; None: the flow has no status yet.

    ``at_ms``: the moment from which ages count; None: now.
    """
    if status is None:
        return Text(f"starting Spark …  {note}", style="yellow")
    return _FlowView(status, note, now_ms() if at_ms is None else at_ms)


class _FlowView:
    """Draws itself when it knows the width of the terminal."""

    def __init__(self, status: FlowStatus, note: str, at_ms: int) -> None:
        self._status = status
        self._note = note
        self._now_ms = at_ms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, status = options.max_width, self._status
        yield self._title(width)
        if status.generation:
            yield self._checkpoint_line()
        yield from self._trouble()
        yield from _code(status, width)
        if not status.operators:
            return
        yield Text()
        yield self._operators(width)
        if self._is_up:
            yield from self._sources()
        if status.sinks:
            yield Text()
            yield self._sinks(width)
        if status.history or status.checkpoints.pending:
            yield Text()
            yield self._checkpoints(width)

    # ------------------------------------------------------------------ the lines above

    def _title(self, width: int) -> RenderableType:
        status = self._status
        words = Text.assemble((status.flow, "bold"), "  ", (state_words(status, self._now_ms), _state_style(status)))
        if status.started_ms and self._is_up:
            words.append(f"  for {span(self._now_ms - status.started_ms)}")
        if status.generation and status.starting is None:
            words.append(f"  generation {status.generation}, recovery path: {_path(status)}", style="dim")
        if not self._note:
            return words
        if len(words) + len(self._note) + 2 > width:
            return Text.assemble(words, "  ", (self._note, "dim"))
        row = Table.grid(expand=True)
        row.add_column()
        row.add_column(justify="right")
        row.add_row(*map(Text.copy, (words, Text(self._note, style="dim"))))
        return row

    @property
    def _is_up(self) -> bool:
        return self._status.state not in _NOT_UP

    def _checkpoint_line(self) -> Text:
        status, checkpoints = self._status, self._status.checkpoints
        completed_ms = checkpoints.last_completed_ms
        if completed_ms is None:
            completed_ms = next((one.ended_ms for one in status.history if one.outcome == "completed"), None)
        if not checkpoints.complete or completed_ms is None:
            line = Text("no checkpoint yet")
        else:
            age_ms, late_ms = self._now_ms - completed_ms, _LATE_INTERVALS * checkpoints.interval_ms
            line = Text.assemble(
                f"checkpoint {checkpoints.complete[-1]} complete ",
                (f"{span(age_ms)} ago", "yellow" if self._is_up and 0 < late_ms < age_ms else ""),
            )
        if not self._is_up:
            return line
        for epoch, item in checkpoints.pending.items():
            line.append(f", {epoch} begun {span(item.since_ms)} ago", style="cyan")
        if checkpoints.next_ms is not None:
            line.append(f", next in {span(checkpoints.next_ms - self._now_ms)}")
        elif not checkpoints.pending:
            line.append(", next on request" if not checkpoints.interval_ms else ", next when its operators run")
        return line

    def _trouble(self) -> Iterator[Text]:
        """Everything that a person must look at, the worst first."""
        status, health = self._status, self._status.health
        reason = health.reason if not health.healthy else ""
        if status.failure:
            yield Text(status.failure, style="red")
        elif not health.healthy and health.reason:
            failed = f"{counted(health.failures, 'checkpoint')} in a row failed: " if health.failures else ""
            yield Text(failed + health.reason + self._trace(reason), style="red")
        for name, operator in status.operators.items():
            if operator.problem and not status.failure and operator.problem not in reason:
                trace = f"; whole trace: {operator.trace}" if operator.trace else ""
                yield Text(f"{name} failed: {operator.problem}{trace}", style="red")
        for name, sink in status.sinks.items():
            if sink.problem and sink.problem not in health.reason:
                yield Text(f"{name} cannot publish: {sink.problem}", style="red")
        for wait in status.waiting:
            if wait.problem not in health.reason:
                yield Text(f"{wait.part} waits for {wait.resource}: {wait.problem}", style="yellow")
        yield from self._remote()
        yield from (Text(f"recovery: {problem}", style="yellow") for problem in status.recovery.problems)
        yield from _unguarded(status)

    def _trace(self, reason: str) -> str:
        """Where the whole trace is of the failure that the reason tells."""
        operators = self._status.operators.values()
        traces = [one.trace for one in operators if one.trace and one.problem and one.problem in reason]
        return f"; whole trace: {traces[0]}" if traces else ""

    def _sources(self) -> Iterator[Text]:
        """How far behind sources are read, and how long they keep what the oldest checkpoint needs."""
        for name, operator in self._status.operators.items():
            for one in operator.source_lag:
                if one.problem:
                    yield Text(f"{name} reads {one.source}: {one.problem}", style="yellow")
                    continue
                line = Text(f"{name} reads {one.source}, {counted(one.lag, 'message')} behind", style="dim")
                if one.restorable_until_ms is not None:
                    left_ms = one.restorable_until_ms - self._now_ms
                    kept = f"for {span(left_ms)}" if left_ms > 0 else "no longer for certain"
                    style = "red" if left_ms <= 0 else "yellow" if left_ms < _SHORT_MS else "dim"
                    line.append(f"; epoch {one.oldest_epoch} restorable {kept} ({one.limited_by})", style=style)
                yield line

    def _remote(self) -> Iterator[Text]:
        remote = self._status.remote
        if remote is None:
            return
        if remote.problem:
            yield Text(f"remote tier: {remote.problem}", style="red")
        if remote.behind > 1:
            yield Text(f"remote tier: {counted(remote.behind, 'epoch')} behind, at epoch {remote.epoch}", "yellow")

    # ------------------------------------------------------------------ the tables

    def _operators(self, width: int) -> Table:
        operators = self._status.operators
        rows = [self._operator(name, operators[name]) for name in _in_graph_order(operators)]
        return fitted(_OPERATOR_COLUMNS, rows, width)

    def _operator(self, name: str, item: OperatorStatus) -> list[Text]:
        producers = [self._status.operators[one] for one in item.inputs if one in self._status.operators]
        backlog = sum(one.backlog_rows.get(name, 0) for one in producers)
        waited_ms = max((one.backlog_ms.get(name, 0) for one in producers), default=0)
        return [
            Text(name),
            Text(", ".join(item.inputs) or ", ".join(one.source for one in item.sources), style="dim"),
            Text(rate(item.rows_per_second)),
            Text(number(backlog) if item.inputs else _NOTHING),
            Text(span(waited_ms), style=_late(waited_ms)) if item.inputs else Text(_NOTHING),
            Text(_NOTHING if item.state_bytes is None else size(item.state_bytes)),
            Text(_NOTHING if item.batch == NO_BATCH else f"{item.batch:,}"),
            Text(_took(item.batch_ms) if item.batches else _NOTHING),
            Text(number(item.rows)),
            Text(str(item.restarts), style="yellow" if item.restarts else ""),
            self._query(item),
        ]

    def _query(self, item: OperatorStatus) -> Text:
        """What the operator's query does now."""
        if item.failures:
            return Text(f"failed {counted(item.failures, 'time')}", style="red")
        if not item.active:
            return Text("stopped", style="red" if self._is_up else "dim")
        if item.waiting_for_room and item.backlog_rows:
            slowest = max(item.backlog_rows, key=lambda one: item.backlog_rows[one])
            return Text(f"waits for {slowest}", style="yellow")
        for epoch, inputs in item.aligning.items():
            return Text(f"aligns {epoch} with {', '.join(inputs)}", style="cyan")
        return Text("runs" if item.batches or item.batch != NO_BATCH else "first batch")

    def _sinks(self, width: int) -> Table:
        rows = [self._sink(name, sink) for name, sink in self._status.sinks.items()]
        return fitted(_SINK_COLUMNS, rows, width)

    def _sink(self, name: str, sink: SinkStatus) -> list[Text]:
        published = f"epoch {sink.published_epoch}" if sink.published_epoch != NO_EPOCH else "nothing yet"
        if sink.published_epoch_ms is not None:
            published += f", {span(self._now_ms - sink.published_epoch_ms)} old"
        problem = f"failed {counted(sink.failures, 'time')}" if sink.failures else ""
        return [
            Text(name),
            Text(sink.operator, style="dim"),
            Text(published),
            Text(span(sink.lag_ms), style=_late(sink.lag_ms)),
            Text(problem, style="red"),
        ]

    def _checkpoints(self, width: int) -> Table:
        shown = _SHOWN_WIDE if width >= _WIDE else _SHOWN
        rows = [
            [
                Text(str(epoch)),
                Text(item.state, style="cyan"),
                Text(span(item.since_ms)),
                *map(Text, ("", "", "", "", "")),
                Text(f"waits for {', '.join(item.missing)}" if item.missing else "", style="cyan"),
            ]
            for epoch, item in self._status.checkpoints.pending.items()
        ]
        rows += [self._outcome(one) for one in self._status.history[:shown]]
        return fitted(_CHECKPOINT_COLUMNS, rows, width)

    def _outcome(self, outcome: EpochOutcome) -> list[Text]:
        details, is_complete = outcome.details, outcome.outcome == "completed"
        took_ms = details.get("duration_ms")
        return [
            Text(str(outcome.epoch)),
            Text(outcome.outcome, style="" if is_complete else "red"),
            Text(span(self._now_ms - outcome.ended_ms)),
            Text(_took(took_ms) if took_ms is not None else ""),
            Text(size(details.get("new_bytes", 0)) if is_complete else ""),
            Text(size(details.get("size_bytes", 0)) if is_complete else ""),
            Text(_in_flight(details) if is_complete else ""),
            Text(outcome.code, style="dim"),
            Text(outcome.reason),
        ]


def _in_graph_order(operators: Mapping[str, OperatorStatus]) -> list[str]:
    """Producers before their consumers, otherwise as declared."""
    placed: list[str] = []
    waiting = list(operators)
    while waiting:
        ready = [one for one in waiting if not any(i in operators and i not in placed for i in operators[one].inputs)]
        placed += ready or waiting
        waiting = [one for one in waiting if one not in placed]
    return placed


def _state_style(status: FlowStatus) -> str:
    return _STATE_STYLES.get(status.state, "red")


def _path(status: FlowStatus) -> str:
    recovery = status.recovery
    return recovery.path if recovery.epoch is None else f"{recovery.path}, epoch {recovery.epoch}"


def _code(status: FlowStatus, width: int) -> Iterator[Text]:
    if status.restore_requested:
        yield Text(requested(status.flow, status.restore_requested), style="yellow")
    if status.starting is not None and status.starting.restores:
        yield Text(f"it restores {status.starting.restores}, as requested", style="yellow")
    code = status.code
    if code is None or status.starting is not None:
        return
    if code.restored is not None and code.given_up:
        kept = f"what was given up is kept as savepoint {code.given_up} (clone only)"
        yield Text(f"restored to epoch {code.restored}; {kept}", style="dim")
    elif code.restored is not None and code.change:
        yield Text(f"restored to epoch {code.restored}", style="dim")
    elif code.change:
        saved = f"; the state before it is savepoint {code.savepoint}" if code.savepoint else ""
        yield Text(code.change + saved, style="yellow")
    if width >= _WIDE:
        versions = f"Python {code.python}, PySpark {code.pyspark}, Cutline {code.cutline}"
        yield Text(f"code {code.hash}  {versions}", style="dim")


def _unguarded(status: FlowStatus) -> Iterator[Text]:
    found = [
        f"{one.source} of {name}"
        for name, operator in status.operators.items()
        for one in operator.sources
        if not one.guarded
    ]
    if found:
        yield Text(f"sources that are not guarded: {', '.join(found)}", style="yellow")


def _late(waited_ms: int) -> str:
    return "red" if waited_ms >= _VERY_LATE_MS else "yellow" if waited_ms >= _LATE_MS else ""


def _took(duration_ms: float) -> str:
    return f"{duration_ms:.0f} ms" if duration_ms < 1_000 else f"{duration_ms / 1000:.1f} s"


def _in_flight(details: Mapping[str, Any]) -> str:
    rest = " + ?" if details.get("in_flight_unmeasured") else ""
    return f"{number(details.get('in_flight_rows', 0))}{rest} rows"
