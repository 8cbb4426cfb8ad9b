"""``cutline flows``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from cutline.base.clock import now_ms
from cutline.cli.flows_here import flows_in, nothing_in
from cutline.cli.options import Config, Json, Storage
from cutline.cli.running.columns import Column, fitted
from cutline.cli.words import counted, span, start_words, state_words
from cutline.config.loading import load_options
from cutline.errors import ConfigError, CutlineError
from cutline.model.layout import Layout
from cutline.model.status import StartStatus

if TYPE_CHECKING:
    from rich.console import Console

    from cutline.model.checkpoint import Manifest
    from cutline.model.status import FlowStatus

_COLUMNS = (
    Column("flow"),
    Column("state"),
    Column("last checkpoint", is_number=True),
    Column("backlog rows", rank=1, is_number=True),
    Column("sinks behind", rank=2, is_number=True),
    Column("remote behind", rank=3, is_number=True),  # only if a flow has a remote tier
)


class FlowSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One flow of a storage. Field names are the keys of ``--json``."""

    flow: str
    #: running, starting, paused, waiting, unhealthy, failed or stopped; ended: its process is gone without a word;
    #: copy: of a folder that is in use elsewhere.
    state: str
    #: The process that runs or starts it.
    pid: int | None
    last_epoch: int | None
    last_completed_ms: int | None
    age_ms: int | None
    #: Rows in channels that their consumers have not read yet; None: not known, because the flow does not run.
    backlog_rows: int | None
    #: Complete checkpoints that the slowest sink has yet to publish, and the remote tier to store.
    sinks_behind: int | None
    remote_behind: int | None
    problems: list[str]
    #: The start that is under way.
    starting: StartStatus | None = None


def flows(storage: Storage = None, config: Config = None, as_json: Json = False) -> None:
    """Show all flows of a storage: their state, last checkpoint, lag and problems. Only reads files."""
    from rich.console import Console

    options = load_options({"storage": storage}, config_file=config)
    if not Path(options.storage).exists():
        raise ConfigError(nothing_in(options), next_step="check --storage and the working folder")
    found = [summary(layout) for layout in flows_in(options)]
    if as_json:
        typer.echo(json.dumps({"storage": options.storage, "flows": msgspec.to_builtins(found)}))
    elif found:
        _print(Console(), found)
    else:
        typer.echo(nothing_in(options))


def summary(layout: Layout) -> FlowSummary:
    from cutline.cli.running.status import load_status
    from cutline.runtime.process.state import state_of

    problems: list[str] = []
    status, newest = None, None
    try:
        status = load_status(layout)
    except (CutlineError, OSError) as error:
        problems.append(str(error))
    try:
        newest = _newest(layout)
    except (CutlineError, OSError) as error:
        problems.append(str(error))
    now = state_of(layout, status)
    if status is not None:
        problems += _problems(status, is_up=now.is_up)
    return FlowSummary(
        flow=layout.flow,
        state=now.state,
        pid=now.pid,
        starting=status.starting if status is not None else now.starting,
        last_epoch=newest.epoch if newest is not None else None,
        last_completed_ms=newest.completed_ms if newest is not None else None,
        age_ms=max(now_ms() - newest.completed_ms, 0) if newest is not None else None,
        backlog_rows=_backlog(status) if status is not None and now.is_up else None,
        sinks_behind=_behind(status) if status is not None else None,
        remote_behind=status.remote.behind if status is not None and status.remote is not None else None,
        problems=problems,
    )


def _problems(status: FlowStatus, *, is_up: bool) -> Iterator[str]:
    if status.failure:
        yield status.failure
    if not is_up:
        if status.state == "ended":
            yield state_words(status)
        if status.starting is None and not status.failure and not status.health.healthy and status.health.reason:
            yield f"when it ended: {status.health.reason}"
        return
    if not status.health.healthy and status.health.reason:
        yield status.health.reason
    yield from (f"{one.part} waits for {one.resource}: {one.problem}" for one in status.waiting)
    if status.remote is not None and status.remote.problem:
        yield f"remote tier: {status.remote.problem}"


def _backlog(status: FlowStatus) -> int:
    return sum(rows for one in status.operators.values() for rows in one.backlog_rows.values())


def _behind(status: FlowStatus) -> int:
    published = [one.published_epoch for one in status.sinks.values()]
    return sum(epoch > min(published) for epoch in status.checkpoints.complete) if published else 0


def _newest(layout: Layout) -> Manifest | None:
    """The newest checkpoint of the present history."""
    from cutline.protocol.history.known_checkpoints import of_present_history
    from cutline.storage.local import LocalStore

    store = LocalStore.reading(layout)
    if not layout.checkpoints.is_dir():
        return None
    generations = store.generations.load_all()
    for epoch in reversed(store.checkpoints.epochs()):
        if found := of_present_history([store.checkpoints.load_manifest(epoch)], generations):
            return found[0]
    return None


def _print(console: Console, found: list[FlowSummary]) -> None:
    from rich.text import Text

    rows = []
    for one in found:
        cells = (
            one.flow,
            _state(one),
            f"{one.last_epoch} ({span(one.age_ms or 0)} ago)" if one.last_epoch is not None else "none",
            f"{one.backlog_rows:,}" if one.backlog_rows is not None else "–",
            _epochs(one.sinks_behind),
            _epochs(one.remote_behind) if one.remote_behind is not None else "",
        )
        rows.append([Text(cell, style="red" if one.problems else "") for cell in cells])
    console.print(fitted(_COLUMNS, rows, console.width))
    for one in found:
        for problem in one.problems:
            console.print(Text(f"{one.flow}: {problem}", style="red"))
    console.print(Text(counted(len(found), "flow")))


def _state(one: FlowSummary) -> str:
    if one.starting is not None:
        return start_words(one.starting, now_ms())
    return f"{one.state} ({one.pid})" if one.pid is not None else one.state


def _epochs(count: int | None) -> str:
    return "–" if count is None else counted(count, "epoch") if count else "0"
