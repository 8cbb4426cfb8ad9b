"""Structured logging through Python's own ``logging``: the application chooses the handlers and levels.

A line reads ``checkpoint_completed flow=payments epoch=12 ms=48``; formatters find the fields in ``record.fields``. Our
own commands render them with structlog's renderers, as text or as JSON.
"""

from __future__ import annotations

import functools
import logging
import logging.handlers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cutline.base.redaction import without_secrets

if TYPE_CHECKING:
    import structlog


class Logger:
    """Logs an event with its fields. Light: what renders lines is imported with the first one."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: Any) -> None:
        self.log(logging.DEBUG, event, **fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self.log(logging.INFO, event, **fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self.log(logging.WARNING, event, **fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self.log(logging.ERROR, event, **fields)

    def log(self, level: int, event: str, /, *, exc_info: Any = None, stack_info: bool = False, **fields: Any) -> None:
        """``exc_info``, ``stack_info``: as in Python's ``logging``."""
        if self._logger.isEnabledFor(level):
            text, extra = _rendered(event, fields)
            self._logger.log(level, text, exc_info=exc_info, stack_info=stack_info, extra=extra, stacklevel=3)


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)


def _rendered(what: str, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The line for plain formatters, and what ours find in the record."""
    fields = {key: without_secrets(value) if isinstance(value, str) else value for key, value in fields.items()}
    # A value of several lines (the text of an error) comes last, and for plain formatters after the line.
    long = {key: value for key, value in fields.items() if "\n" in str(value)}
    short = {key: value for key, value in fields.items() if key not in long}
    line = f"{what} {_logfmt()(None, '', dict(short))}".rstrip()
    text = "\n".join([line, *map(str, long.values())])
    return text, {"fields": {"event": what, **short, **long}}


@functools.cache
def _logfmt() -> Any:
    import structlog

    return structlog.processors.LogfmtRenderer(bool_as_flag=False)


def _with_fields(logger: Any, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Turn our own log record back into its event; a record of another library keeps its message."""
    event.update(getattr(event["_record"], "fields", {}))
    return event


def make_formatter(*, as_json: bool, in_colour: bool = False) -> logging.Formatter:
    """JSON: one object per line, with ``time``, ``level`` and ``event``. Otherwise text for a terminal or a file."""
    import structlog

    stamp = structlog.processors.TimeStamper("%Y-%m-%dT%H:%M:%SZ", utc=True, key="time" if as_json else "timestamp")
    plain = structlog.dev.plain_traceback  # not rich's: it prints local variables, which may hold secrets
    render: list[Any] = [structlog.dev.ConsoleRenderer(colors=in_colour, sort_keys=False, exception_formatter=plain)]
    if as_json:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[stamp, structlog.stdlib.add_log_level, _with_fields],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file for log lines."""

    path: Path
    #: A new file begins at this size; 0: another program moves the file away, and it is opened again.
    size_bytes: int
    #: How many full files are kept.
    keep: int
    #: Only lines of this flow; "": only those of no flow; None: all.
    flow: str | None = None


#: What Spark's processes print.
SPARK_OUTPUT = "cutline.spark_output"


def configure_logging(
    *,
    as_json: bool,
    level: int,
    stream: TextIO | None = None,
    files: Sequence[LogFile] = (),
    spark_file: LogFile | None = None,
) -> None:
    """For our own commands: lines on a stream (without files: standard error) and in files, as text or as JSON.

    The same files take what Spark's Python side logs. Without a file that is left out: py4j writes whole traces when
    the JVM is lost, which Cutline itself reports. ``spark_file``: takes all that Spark prints and logs, and nothing
    else does.
    """
    handlers: list[logging.Handler] = []
    if stream is not None or not files:
        target = stream or sys.stderr
        shown = logging.StreamHandler(target)
        shown.setFormatter(make_formatter(as_json=as_json, in_colour=target.isatty()))
        shown.addFilter(_is_not_of_py4j)
        handlers.append(shown)
    handlers += [_kept_in(file, as_json=as_json) for file in files]
    _direct("cutline", handlers, level)
    apart = logging.getLogger(SPARK_OUTPUT)
    apart.handlers[:], apart.propagate = [], True
    if spark_file is not None:
        handlers = [_kept_in(spark_file, as_json=as_json)]
        _direct(SPARK_OUTPUT, handlers, level)
    has_file = bool(files) or spark_file is not None
    for name in ("py4j", "pyspark"):
        _direct(name, handlers, logging.WARNING if has_file else logging.CRITICAL)
    if not logging.getLogger().handlers:  # py4j logs there too; the user's own settings stay
        logging.getLogger().handlers[:] = handlers


def _kept_in(file: LogFile, *, as_json: bool) -> logging.Handler:
    handler = _file_handler(file)
    handler.setFormatter(make_formatter(as_json=as_json))
    return handler


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return "/py4j/" not in record.pathname


def _direct(name: str, handlers: Sequence[logging.Handler], level: int) -> None:
    logger = logging.getLogger(name)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = False


def _file_handler(file: LogFile) -> logging.Handler:
    path = str(file.path)
    handler: logging.Handler
    if file.size_bytes:
        handler = _RotatedFile(path, "a", file.size_bytes, file.keep, "utf-8", delay=True, errors="backslashreplace")
    else:
        handler = _WatchedFile(path, "a", "utf-8", delay=True, errors="backslashreplace")
    if file.flow is not None:
        handler.addFilter(lambda record: str(getattr(record, "fields", {}).get("flow", "")) == file.flow)
    return handler


class _Quiet(logging.FileHandler):
    """A full disk or a missing folder must not disturb the flow, nor print a trace for every line."""

    def _open(self) -> Any:
        # Its own folder only: those above it, in a flow's storage, are made where they are synced.
        Path(self.baseFilename).parent.mkdir(exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass


class _RotatedFile(_Quiet, logging.handlers.RotatingFileHandler):
    pass


class _WatchedFile(_Quiet, logging.handlers.WatchedFileHandler):
    pass
