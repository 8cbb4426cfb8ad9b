"""What a person means by ``--at``: a moment in the past. Pure.

A time without a zone is local time. Where clocks change, a local time may not exist, or may have been twice: both are
refused, because a restore to the wrong hour is worse than a second try.
"""

from __future__ import annotations

import datetime
import re

from cutline.cli.failures import UsageError

EXAMPLES = '02:00, "yesterday 14:00", "10m ago", 2026-11-16T02:00, 2026-11-16T02:00Z'

_CLOCK = re.compile(r"(?:(today|yesterday)\s+)?(\d{1,2}):(\d{2})(?::(\d{2}))?", re.IGNORECASE)
_IN_UTC = re.compile(r"(.*\d)\s*(?:UTC|Z)(?:\s+\(also local time\))?", re.IGNORECASE)
_AGO = re.compile(r"((?:\d+\s*[a-z]+\s*)+)ago", re.IGNORECASE)
_PART = re.compile(r"(\d{1,9})\s*([a-z]+)", re.IGNORECASE)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_DAY = datetime.timedelta(days=1)


def parse_moment(text: str, *, now: datetime.datetime, zone: datetime.tzinfo | None = None) -> datetime.datetime:
    """The moment, in UTC. ``zone``: the local one; None: the machine's. Raises UsageError."""
    words = text.strip()
    try:
        moment = _moment(words, now, zone)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--at: {text!r} is not a time", next_step=f"write {EXAMPLES}") from error
    if moment > now:
        raise UsageError(
            f"--at: {shown_moment(moment, zone)} is in the future; it is {shown_moment(now, zone)}",
            next_step="name a moment in the past",
        )
    return moment


def shown_moment(moment: datetime.datetime, zone: datetime.tzinfo | None = None) -> str:
    """The moment in local time and in UTC, each with its zone."""
    local, utc = moment.astimezone(zone), moment.astimezone(datetime.UTC)
    name = local.tzname() or f"{local:%z}"
    if name == "UTC":
        return f"{local:%Y-%m-%d %H:%M:%S} UTC (also local time)"
    return f"{local:%Y-%m-%d %H:%M:%S} {name} ({utc:%Y-%m-%d %H:%M:%S} UTC)"


def _moment(words: str, now: datetime.datetime, zone: datetime.tzinfo | None) -> datetime.datetime:
    if words.lower() == "now":
        return now.astimezone(datetime.UTC)
    if found := _IN_UTC.fullmatch(words):  # as commands print it
        words, zone = found[1], datetime.UTC
    if found := _AGO.fullmatch(words):
        return now.astimezone(datetime.UTC) - _ago(found[1])
    if found := _CLOCK.fullmatch(words):
        return _clock(found, now, zone)
    if "-" not in words:
        raise ValueError("neither a time of day nor a date")
    written = datetime.datetime.fromisoformat(words)
    return _of_local(written, now, zone) if written.tzinfo is None else written.astimezone(datetime.UTC)


def _ago(words: str) -> datetime.timedelta:
    parts = [(int(number), unit.lower()) for number, unit in _PART.findall(words)]
    if any(unit not in _SECONDS for _, unit in parts):
        raise ValueError("not a unit of time")
    return datetime.timedelta(seconds=sum(number * _SECONDS[unit] for number, unit in parts))


def _clock(found: re.Match[str], now: datetime.datetime, zone: datetime.tzinfo | None) -> datetime.datetime:
    """A time of day: on the day that was named, or the most recent one."""
    at = datetime.time(int(found[2]), int(found[3]), int(found[4] or 0))
    today = now.astimezone(zone).date()
    if found[1]:
        return _of_local(datetime.datetime.combine(today - _DAY * (found[1].lower() == "yesterday"), at), now, zone)
    naive = datetime.datetime.combine(today, at)
    is_to_come = naive > now.astimezone(zone).replace(tzinfo=None)
    if is_to_come and not _readings(naive, zone):  # clocks are about to be put forward over it
        return _of_local(naive - _DAY, now, zone)
    moment = _of_local(naive, now, zone)
    return moment if moment <= now else _of_local(naive - _DAY, now, zone)


def _of_local(naive: datetime.datetime, now: datetime.datetime, zone: datetime.tzinfo | None) -> datetime.datetime:
    """The moment at which clocks here showed this time."""
    moments = _readings(naive, zone)
    if not moments:
        raise UsageError(
            f"--at: {naive:%Y-%m-%d %H:%M:%S} did not exist here: clocks were put forward over it",
            next_step="name another time, or write it with its zone: 2026-11-16T02:00Z",
        )
    past = [one for one in moments if one <= now]
    if len(past) > 1:
        offsets = " or ".join(one.astimezone(zone).isoformat() for one in past)
        raise UsageError(
            f"--at: {naive:%Y-%m-%d %H:%M:%S} was twice here, because clocks were put back",
            next_step=f"write {offsets}",
        )
    return past[0] if past else moments[0]


def _readings(naive: datetime.datetime, zone: datetime.tzinfo | None) -> list[datetime.datetime]:
    """Every moment at which clocks here show this time, ascending: one, two, or none."""
    readings = {_reading(naive, zone, fold) for fold in (0, 1)}
    return sorted(one for one in readings if one.astimezone(zone).replace(tzinfo=None) == naive.replace(fold=0))


def _reading(naive: datetime.datetime, zone: datetime.tzinfo | None, fold: int) -> datetime.datetime:
    here = naive.replace(fold=fold) if zone is None else naive.replace(fold=fold, tzinfo=zone)
    return here.astimezone(datetime.UTC)
