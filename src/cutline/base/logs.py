"""Structured logging through Python's own ``logging``: the application decides where lines go and which it wants.

A line reads ``checkpoint_completed flow=payments epoch=12 ms=48``; the fields travel along for formatters that want
them (``record.fields``).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import structlog

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
    fields = dict(event)
    # Several lines (an error shown whole) stand after the line, not inside its fields.
    long = [str(fields[key]) for key in fields if "\n" in str(fields[key])]
    short = {key: value for key, value in fields.items() if "\n" not in str(value)}
    line = f"{what} {_LOGFMT(logger, name, short)}".rstrip()
    text = "\n".join([line, *long])
    return (text.replace("%", "%%"),), {**keywords, "extra": {"fields": {"event": what, **fields}}}


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {"event": record.getMessage()})
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return json.dumps({"time": stamp, "level": record.levelname.lower(), **fields}, default=str)


def configure_logging(*, as_json: bool, level: int) -> None:
    """For our own commands: lines on standard error, as text or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_JsonFormatter() if as_json else text)
    logger = logging.getLogger("cutline")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
