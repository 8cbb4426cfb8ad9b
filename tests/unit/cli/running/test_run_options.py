"""What the options of a run mean."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutline.cli.running.run_options import LoggedStream, Logging, SparkLines
from cutline.errors import ConfigError, StorageError
from cutline.model.ids import FlowName

FLOWS = [FlowName("a"), FlowName("b")]
TRACE = """26/11/18 06:22:40 WARN TaskSetManager: Lost task 0.0
java.lang.IllegalStateException: no
\tat org.apache.spark.Here.run(Here.scala:1)
Caused by: java.io.IOException: away
Using Spark's default log4j profile
26/11/18 06:22:41 ERROR Executor: gone

26/11/18 06:22:42 DEBUG Executor: quiet"""


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("cutline", "cutline.spark_output", "py4j", "pyspark")]
    before = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in set(one.handlers) - set(handlers):
            handler.close()
        one.handlers[:], one.level, one.propagate = handlers, level, propagate


def options(**given: Any) -> Logging:
    defaults = {"format": None, "file": None, "size": "1MB", "keep": 1, "as_json": False, "show_view": False}
    return Logging(**{**defaults, **given})


def test_lines_of_spark_have_the_level_that_spark_gave_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cutline")
    write = SparkLines()
    for line in TRACE.splitlines():
        write(line)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "WARNING", "WARNING", "WARNING", "INFO", "ERROR"]
    assert caplog.records[1].fields["line"] == "java.lang.IllegalStateException: no"  # type: ignore[attr-defined]


def test_what_libraries_print_is_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cutline")
    with contextlib.redirect_stderr(LoggedStream(sys.stderr)):
        for text in ("Traceback (most recent", " call last)\n\n  File x\n", "begun"):
            sys.stderr.write(text)
    lines = [record.fields["line"] for record in caplog.records]  # type: ignore[attr-defined]
    assert lines == ["Traceback (most recent call last)", "  File x"]


def test_beside_a_live_view_the_log_is_in_the_folder_of_the_flow(tmp_path: Path) -> None:
    settings = {"storage": str(tmp_path)}
    assert options(show_view=True).configure(FLOWS, settings, None) == [tmp_path / "a" / "traces" / "run.log"]
    assert list(tmp_path.iterdir()) == []  # the flow itself makes its folder
    assert options(show_view=True, file=str(tmp_path / "x" / "{flow}.log")).configure(FLOWS, settings, None) == [
        tmp_path / "x" / f"{name}.log" for name in ("a", "b", "spark")
    ]
    assert options().configure(FLOWS, settings, None) == []


@pytest.mark.parametrize(
    ("given", "is_read", "level"),
    [
        ({}, True, "WARN"),
        ({"format": "json"}, True, "ERROR"),
        ({"as_json": True}, True, "ERROR"),
        ({"file": "run.log"}, True, "WARN"),
        ({"show_view": True}, True, "WARN"),
    ],
)
def test_what_spark_prints_is_read_and_logged(given: dict[str, Any], is_read: bool, level: str) -> None:
    start = options(**given).spark_start({"spark.x": "1"})
    assert (start.on_line is not None, start.log_level, start.settings) == (is_read, level, {"spark.x": "1"})


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        options(file=str(tmp_path / "file" / "run.log")).configure(FLOWS, {}, None)
    with pytest.raises(ConfigError, match="--log-format xml"):
        options(format="xml")
    with pytest.raises(ConfigError, match="--log-size"):
        options(size="large")  # also without a file


def test_beside_lines_on_standard_error_spark_has_a_file_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    assert options().configure(FLOWS, {"storage": str(tmp_path)}, None) == []
    path = tmp_path / "a" / "traces" / "spark.log"
    for line in TRACE.splitlines():
        SparkLines()(line)
    logging.getLogger("py4j").warning("of py4j")
    logging.getLogger("cutline.coordinator").info("of ours")
    told = capsys.readouterr().err
    assert told.splitlines()[0] == f"starting: what Spark prints is in {path}"
    assert "of ours" in told and "Lost task" not in told and "of py4j" not in told
    written = path.read_text()
    assert "Lost task" in written and "of py4j" in written and "of ours" not in written
    for handler in logging.getLogger("cutline.spark_output").handlers:
        handler.close()
    # A later run in the same process logs as it was told to.
    options(format="json").configure(FLOWS, {"storage": str(tmp_path)}, None)
    SparkLines()("26/11/18 06:22:41 ERROR Executor: gone")
    assert "gone" in capsys.readouterr().err and "gone" not in path.read_text().partition("quiet")[2]
