"""Structured logging through Python's own ``logging``: the application chooses the handlers and levels.

A line reads ``checkpoint_completed flow=payments epoch=12 ms=48``; formatters find the fields in ``record.fields``. Our
own commands render them with structlog's renderers, as text or as JSON.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

from cutline.base.redaction import without_secrets

_LOGFMT = structlog.processors.LogfmtRenderer(bool_as_flag=False)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[structlog.stdlib.filter_by_level, _to_logging],
    )
    return logger


def _to_logging(logger: Any, name: str, event: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    what = str(event.pop("event"))
    keywords = {key: event.pop(key) for key in ("exc_info", "stack_info") if key in event}
    event = {key: without_secrets(value) if isinstance(value, str) else value for key, value in event.items()}
    # A value of several lines (the text of an error) comes last, and for plain formatters after the line.
    long = {key: value for key, value in event.items() if "\n" in str(value)}
    short = {key: value for key, value in event.items() if key not in long}
    line = f"{what} {_LOGFMT(logger, name, dict(short))}".rstrip()
    text = "\n".join([line, *map(str, long.values())])
    fields = {"event": what, **short, **long}
    return (text,), {**keywords, "extra": {"fields": fields}}


def _with_fields(logger: Any, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Turn our own log record back into its event; a record of another library keeps its message."""
    event.update(getattr(event["_record"], "fields", {}))
    return event


def make_formatter(*, as_json: bool, in_colour: bool = False) -> logging.Formatter:
    """JSON: one object per line, with ``time``, ``level`` and ``event``. Otherwise text for a terminal or a file."""
    stamp = structlog.processors.TimeStamper("%Y-%m-%dT%H:%M:%SZ", utc=True, key="time" if as_json else "timestamp")
    render: list[Any] = [structlog.dev.ConsoleRenderer(colors=in_colour, sort_keys=False, exception_formatter=_plain)]
    if as_json:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[stamp, structlog.stdlib.add_log_level, _with_fields],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )


#: Not rich's: it prints local variables, which may hold secrets.
_plain = structlog.dev.plain_traceback


def configure_logging(*, as_json: bool, level: int, stream: TextIO | None = None) -> None:
    """For our own commands: lines on standard error, as text or as JSON."""
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    handler.setFormatter(make_formatter(as_json=as_json, in_colour=target.isatty()))
    logger = logging.getLogger("cutline")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
