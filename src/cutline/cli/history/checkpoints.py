"""``cutline checkpoints``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cutline.cli.flows_here import flow_here
from cutline.cli.options import Config, FlowName, Json, Storage
from cutline.cli.words import counted, local, local_short, number, requested, size, span, start_words, utc

if TYPE_CHECKING:
    from rich.console import Console

    from cutline.cli.history.past import Past, PastEpoch

#: From this width on, every column is shown.
_WIDE = 120
#: With --wide, lines may be longer than the terminal.
_ROOMY = 180
_CODE_SHOWN = 8
_CODE_SHOWN_NARROW = 6
_RANGES_SHOWN = 8


def checkpoints(
    flow: FlowName = None,
    storage: Storage = None,
    config: Config = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show every column, however wide the terminal is.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not ask sources and sinks how far back they reach.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the checkpoints a flow can be restored to, and until when. Reads only, also while it runs.

    Each one can be restored until retention releases it, if its sources can still read their input again and its sinks
    can be rewound that far.
    """
    import msgspec
    from rich.console import Console

    from cutline.cli.history.past import past_of

    past = past_of(flow_here(flow, storage, config), asks=not offline)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(past)))
        return
    console = Console()
    is_wide = wide or console.width >= _WIDE
    _print(Console(width=max(console.width, _ROOMY)) if wide else console, past, is_wide=is_wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    name: str
    text: Callable[[PastEpoch], str]
    is_right: bool = False
    #: Left out where there is no room.
    is_wide: bool = False


def _columns(now_ms: int, *, is_wide: bool) -> tuple[_Column, ...]:
    digits = _CODE_SHOWN if is_wide else _CODE_SHOWN_NARROW
    return (
        _Column(name="epoch", text=lambda one: str(one.epoch), is_right=True),
        _Column(name="UTC", text=lambda one: utc(one.completed_ms)[5:], is_wide=True),
        _Column(name="local time", text=lambda one: local_short(one.completed_ms, now_ms)),
        _Column(name="age", text=lambda one: span(one.age_ms), is_right=True),
        _Column(name="size", text=lambda one: size(one.size_bytes), is_right=True),
        _Column(name="new", text=lambda one: size(one.new_bytes), is_right=True),
        _Column(name="in flight", text=_in_flight, is_right=True, is_wide=True),
        _Column(name="rows", text=lambda one: number(one.published_rows), is_right=True),
        _Column(name="code", text=lambda one: one.code[:digits]),
        _Column(name="pinned", text=lambda one: "pinned" if one.is_pinned else "", is_wide=True),
        _Column(name="savepoints", text=lambda one: ", ".join(one.savepoints), is_wide=True),
        _Column(name="restorable\nuntil", text=lambda one: _until(one, now_ms)),
        _Column(name="limited by", text=lambda one: _limits(one, now_ms), is_wide=True),
    )


def _in_flight(one: PastEpoch) -> str:
    return f"{number(one.in_flight_rows)}{' + ?' if one.in_flight_unmeasured else ''}"


def _limits(one: PastEpoch, now_ms: int) -> str:
    if one.why_not:
        return "; ".join(one.why_not)
    is_later = one.until_ms is not None and one.until_ms > now_ms
    return f"{one.limited_by} until {_until(one, now_ms)}" if is_later else one.limited_by


def _until(one: PastEpoch, now_ms: int) -> str:
    if one.why_not:
        return "no"
    if one.until_ms is None:
        return "pinned" if one.is_pinned else "it is replaced"
    if one.until_ms <= now_ms:
        return "any moment"
    return local_short(one.until_ms, now_ms)


def _print(console: Console, past: Past, *, is_wide: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from cutline.base.clock import now_ms

    if not past.epochs:
        console.print(
            Text(f"flow {past.flow} has no complete checkpoint {'that can be read' if past.damaged else 'yet'}")
        )
        for note in past.notes:
            console.print(Text(f"note: {note}"), soft_wrap=True)
        return
    at_ms = now_ms()
    columns = [one for one in _columns(at_ms, is_wide=is_wide) if is_wide or not one.is_wide]
    table = Table(box=None, pad_edge=False, padding=(0, 1 if is_wide else 2), collapse_padding=True, header_style="dim")
    for column in columns:
        folds = column.name == "limited by"
        table.add_column(
            column.name, justify="right" if column.is_right else "left", no_wrap=not folds, vertical="bottom"
        )
    for one in reversed(past.epochs):
        table.add_row(*map(Text, (column.text(one) for column in columns)), style="dim" if one.why_not else "")
    console.print(table)
    newest = past.epochs[-1]
    zone = local(newest.completed_ms).rpartition(" ")[2]
    summary = f"{counted(len(past.epochs), 'checkpoint')} of flow {past.flow}, newest first; local time is {zone}"
    lines = [summary, *_refusals(past.epochs)]
    if past.restore_requested:
        lines.append(requested(past.flow, past.restore_requested))
    if not is_wide and (named := [one for one in past.epochs if one.savepoints]):
        lines.append("savepoints: " + "; ".join(f"{', '.join(one.savepoints)} of epoch {one.epoch}" for one in named))
    if past.starting is not None:
        restores = f"; it restores {past.starting.restores}" if past.starting.restores else ""
        lines.append(f"the flow is {start_words(past.starting, at_ms)}{restores}: the times hold from now on")
    elif not past.is_running:
        lines.append("the flow is stopped: nothing is released until it runs; the times hold if it starts now")
    for text in (*lines, *(f"note: {note}" for note in past.notes)):
        console.print(Text(text), soft_wrap=False)


def _refusals(epochs: Iterable[PastEpoch]) -> list[str]:
    """Each reason once, with its epochs."""
    found: dict[str, list[int]] = {}
    for one in epochs:
        for why in one.why_not:
            found.setdefault(why, []).append(one.epoch)
    return [
        f"{'epoch' if len(numbers) == 1 else 'epochs'} {_ranges(numbers)} cannot be restored: {why}"
        for why, numbers in found.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, those that follow one another as a range."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    few = shown if len(shown) <= _RANGES_SHOWN else [*shown[: _RANGES_SHOWN - 1], f"… {numbers[-1]}"]
    return f"{', '.join(few)} ({len(numbers)} in all)" if few is not shown else ", ".join(few)
