"""The options of ``cutline run``, and what the log options mean."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from cutline.base.logs import SPARK_OUTPUT, LogFile, configure_logging, get_logger
from cutline.base.storage_errors import in_words
from cutline.cli.failures import UsageError, as_wrong_use
from cutline.config.loading import load_options
from cutline.config.options import doc_of
from cutline.config.spark_settings import SparkStart
from cutline.config.values import parse_bytes
from cutline.model.ids import FlowName
from cutline.model.layout import Layout

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Python files that define a flow each; all run in one Spark session."),
]
OneFlow = Annotated[str | None, typer.Option("--flow", help="Which flow, if the file defines several.")]
CheckpointInterval = Annotated[str | None, typer.Option(help=doc_of("checkpoint_interval"))]
Mode = Annotated[str | None, typer.Option(help=doc_of("mode"))]
RestoreTo = Annotated[
    str | None,
    typer.Option(
        help="Restore the whole flow to this checkpoint or savepoint first, or to before-last-deploy; later work is "
        "discarded."
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(metavar="OLD=NEW", help="With --restore-to, old=new: an operator that was renamed since."),
]
AllowDropped = Annotated[
    bool, typer.Option("--allow-dropped", help="With --restore-to: leave behind operators that the flow no longer has.")
]
Rejoin = Annotated[
    bool,
    typer.Option(
        "--rejoin",
        help="If another host has taken the flow over: keep what this one did alone as a savepoint, and continue "
        "from the newest checkpoint of the remote tier.",
    ),
]
UntilDone = Annotated[bool, typer.Option("--until-done", help="Process the present input, publish it, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Log as JSON lines; end with the status as JSON.")]
Master = Annotated[str | None, typer.Option(help="Spark's master, for example spark://host:7077 or local[4].")]
Conf = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of Spark, as key=value; may be repeated.")
]
Http = Annotated[
    str | None, typer.Option(help="Serve /metrics and /healthz at HOST:PORT; without HOST on loopback only.")
]
LogFormat = Annotated[str | None, typer.Option(help="text or json: how log lines look. Default: text.")]
LogFileName = Annotated[
    str | None,
    typer.Option("--log-file", help="Log to this file, with Spark's own output; {flow} stands for the flow's name."),
]
LogSize = Annotated[str, typer.Option(help="Begin a new log file at this size; 0: never, another program rotates it.")]
LogKeep = Annotated[int, typer.Option(min=1, metavar="NUMBER", help="How many full log files to keep.")]

#: Of the log beside a live view: it stays small, because it lies in the flow's folder.
_OWN_LOG = "run.log"
#: Beside lines on standard error: what Spark prints would come between them.
_SPARK_LOG = "spark.log"
_OWN_SIZE, _OWN_KEEP = "5MB", 2
#: Where a log file is named after the flow, Spark's lines and others of no flow go to a file with this name.
_NO_FLOW = "spark"
#: How Spark begins a line of its log.
_LEVEL = re.compile(r"^\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?P<level>TRACE|DEBUG|INFO|WARN|ERROR|FATAL) ")
_LEVELS = {"WARN": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.ERROR, "INFO": logging.INFO}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """The log options of a run."""

    format: str | None
    file: str | None
    size: str
    keep: int
    as_json: bool
    show_view: bool

    def __post_init__(self) -> None:
        """Raise UsageError for a value that makes no sense, whether it is needed or not."""
        if self.format not in (None, "text", "json"):
            raise UsageError(f"--log-format {self.format}: not a format", next_step="write text or json")
        with as_wrong_use():
            parse_bytes(self.size, option="--log-size")

    @property
    def is_json(self) -> bool:
        return self.as_json if self.format is None else self.format == "json"

    def configure(self, flows: Sequence[FlowName], settings: dict[str, Any], config: Path | None) -> list[Path]:
        """Direct all log lines; returns the files. Beside a live view there is always one, in the flow's folder.

        Beside text on standard error there is one for what Spark prints.
        """
        own = Layout(Path(load_options(settings, config_file=config).storage).resolve(), flows[0]).traces
        file, size, keep = self.file, self.size, self.keep
        if file is None and self.show_view:
            file, size, keep = str(own / _OWN_LOG), _OWN_SIZE, _OWN_KEEP
        files = [] if file is None else _files(file, flows, parse_bytes(size, option="--log-size"), keep)
        if self.file is not None:
            for one in files:
                _check_writable(one.path)
        spark_file = None
        if self._has_spark_file:
            spark_file = LogFile(own / _SPARK_LOG, parse_bytes(_OWN_SIZE), _OWN_KEEP)
        stream = None if files else sys.stderr
        configure_logging(as_json=self.is_json, level=logging.INFO, stream=stream, files=files, spark_file=spark_file)
        if spark_file is not None:
            self.say(f"starting: what Spark prints is in {spark_file.path}")
        return [one.path for one in files]

    @property
    def _has_spark_file(self) -> bool:
        return self.file is None and not self.show_view and not self.is_json

    def say(self, line: str) -> None:
        """One line for a person who waits, or for the program that reads the log."""
        if self.as_json or self.is_json:
            get_logger("cutline.start").info("start", text=line)
        else:
            typer.echo(line, err=True)

    def spark_start(self, settings: Mapping[str, str]) -> SparkStart:
        """A session whose output goes to the log. In JSON on standard error, only its errors do."""
        has_file = self.file is not None or self.show_view or self._has_spark_file
        return SparkStart(settings=settings, on_line=SparkLines(), log_level="WARN" if has_file else "ERROR")


def _files(pattern: str, flows: Sequence[FlowName], size_bytes: int, keep: int) -> list[LogFile]:
    if "{flow}" not in pattern:
        return [LogFile(Path(pattern), size_bytes, keep)]
    names: list[FlowName | None] = [*flows, None]
    return [
        LogFile(Path(pattern.replace("{flow}", name or _NO_FLOW)), size_bytes, keep, flow=name or "") for name in names
    ]


def _check_writable(path: Path) -> None:
    with in_words(path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()


class LoggedStream(io.TextIOBase):
    """Takes what libraries print to standard error (threads of py4j and PySpark above all), and logs it."""

    def __init__(self, real: TextIO) -> None:
        self._real = real
        self._log = get_logger("cutline.stderr")
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._log.info("stderr", line=line)
        return len(text)

    def fileno(self) -> int:
        """For programs that are started with it."""
        return self._real.fileno()


class SparkLines:
    """Writes what Spark prints to the log, at the level that Spark gave it."""

    def __init__(self) -> None:
        self._log = get_logger(SPARK_OUTPUT)
        self._level = logging.INFO

    def __call__(self, line: str) -> None:
        found = _LEVEL.match(line)
        if found is not None:
            self._level = _LEVELS.get(found["level"], logging.DEBUG)
        elif not line.startswith((" ", "\t", "Caused by:", "java.", "org.", "py4j.")):
            self._level = logging.INFO  # not the trace of the line before
        if line.strip():
            self._log.log(self._level, "spark", line=line)
