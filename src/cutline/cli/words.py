"""Numbers, sizes and moments as people read them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutline.model.status import CloneOrigin, FlowStatus, StartStatus

_SECOND_MS, _MINUTE_MS, _HOUR_MS, _DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
_UNITS = ("kB", "MB", "GB", "TB")


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 checkpoint", "2 checkpoints"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def number(count: int) -> str:
    """ "9,999", "12.3 k", "4.5 M": at most seven characters."""
    if count < 10_000:
        return f"{count:,}"
    amount, unit = count / 1000, "k"
    for larger in ("M", "G"):
        if amount < 999.95:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.1f} {unit}"


def rate(rows_per_second: float) -> str:
    """Of a slow one a decimal is shown: an operator that aggregates writes few rows, which are not none."""
    return f"{rows_per_second:.1f}" if 0 < rows_per_second < 10 else number(round(rows_per_second))


def size(size_bytes: int) -> str:
    """ "512 B", "1.2 MB"."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    amount, unit = size_bytes / 1000, _UNITS[0]
    for larger in _UNITS[1:]:
        if amount < 999.95:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.1f} {unit}"


def span(duration_ms: int) -> str:
    """ "4 s", "12 min", "3 h", "2 d": short, for tables."""
    duration_ms = max(duration_ms, 0)
    if duration_ms < 2 * _MINUTE_MS:
        return f"{duration_ms // _SECOND_MS} s"
    if duration_ms < 2 * _HOUR_MS:
        return f"{duration_ms // _MINUTE_MS} min"
    if duration_ms < 2 * _DAY_MS:
        return f"{duration_ms // _HOUR_MS} h"
    return f"{duration_ms // _DAY_MS} d"


def start_words(start: StartStatus, at_ms: int) -> str:
    """Of a start that is under way: "starting (pid 4711, Spark, 12 s)"."""
    took = span(at_ms - start.since_ms) if start.since_ms else ""
    return f"starting ({', '.join(filter(None, (f'pid {start.pid}', start.step, took)))})"


def state_words(status: FlowStatus, at_ms: int = 0) -> str:
    """What the flow does now, for a person."""
    if status.starting is not None:
        return start_words(status.starting, at_ms)
    words = {
        "ended": "not running (its process has ended; start it again to resume)",
        "new": "not started yet",
        "copy": "not running (this folder is a copy; the status is the original's)",
    }
    told = words.get(status.state, status.state)
    return told if status.cloned_from is None else f"{told}: {clone_words(status.flow, status.cloned_from)}"


def clone_words(flow: str, origin: CloneOrigin) -> str:
    """Of a cloned flow that was never started."""
    return f'cloned from {origin.flow}, epoch {origin.epoch}; run it with Flow("{flow}")'


def requested(flow: str, to: str) -> str:
    """Of a restore request that waits."""
    return f"a restore to {to} waits for the next start; cutline restore {flow} --cancel withdraws it"


def utc(moment_ms: int) -> str:
    return f"{_moment(moment_ms):%Y-%m-%d %H:%M:%S}"


def local(moment_ms: int) -> str:
    """With the zone, which depends on the moment where clocks change."""
    moment = _moment(moment_ms).astimezone()
    return f"{moment:%Y-%m-%d %H:%M:%S} {moment.tzname()}"


def local_short(moment_ms: int, now_ms: int) -> str:
    """The local time, with the date unless it is today."""
    moment, now = _moment(moment_ms).astimezone(), _moment(now_ms).astimezone()
    return f"{moment:%H:%M:%S}" if moment.date() == now.date() else f"{moment:%m-%d %H:%M}"


def iso(moment_ms: int) -> str:
    return _moment(moment_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(moment_ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(moment_ms / 1000, tz=datetime.UTC)
