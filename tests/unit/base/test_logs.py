"""What a line of the log looks like: for plain logging, on a console, as JSON."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.base.logs import LogFile, configure_logging, get_logger, make_formatter

NAME = "cutline.test_logs"


@pytest.fixture
def restored() -> Iterator[None]:
    """What a command configures ends with the test."""
    logger = logging.getLogger("cutline")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def written(*, as_json: bool, level: int = logging.INFO) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(as_json=as_json, level=level, stream=stream)
    return stream


# ------------------------------------------------------------------------------------------------- plain logging


def test_an_application_with_plain_logging_reads_event_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    get_logger(NAME).warning("store_failed", flow="orders", epoch=12, is_late=False, reason="100% away")
    (record,) = caplog.records
    assert record.getMessage() == 'store_failed flow=orders epoch=12 is_late=false reason="100% away"'
    assert record.fields == {  # type: ignore[attr-defined]
        "event": "store_failed",
        "flow": "orders",
        "epoch": 12,
        "is_late": False,
        "reason": "100% away",
    }


def test_a_value_of_several_lines_stands_after_the_line(caplog: pytest.LogCaptureFixture) -> None:
    get_logger(NAME).error("query_failed", error="first\nsecond", operator="totals")
    assert caplog.records[0].getMessage() == "query_failed operator=totals\nfirst\nsecond"


def test_what_the_level_shuts_out_is_not_rendered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cutline")
    get_logger(NAME).info("checkpoint_completed", flow="orders")
    assert caplog.records == []


# ------------------------------------------------------------------------------------------------- JSON


@pytest.mark.usefixtures("restored")
def test_as_json_each_line_is_one_object_with_the_fields_as_they_are() -> None:
    stream = written(as_json=True)
    get_logger(NAME).info("checkpoint_completed", flow="orders", epoch=12, reason="first\nsecond")
    get_logger(NAME).warning("path_given", path=NAME.encode())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    stamps = [line.pop("time") for line in lines]
    assert all(len(stamp) == len("2026-01-01T00:00:00Z") and stamp.endswith("Z") for stamp in stamps)
    assert lines == [
        {
            "level": "info",
            "event": "checkpoint_completed",
            "flow": "orders",
            "epoch": 12,
            "reason": "first\nsecond",
        },
        {"level": "warning", "event": "path_given", "path": str(NAME.encode())},
    ]


@pytest.mark.usefixtures("restored")
def test_as_json_an_exception_is_a_field() -> None:
    stream = written(as_json=True)
    try:
        raise ValueError("away")
    except ValueError:
        get_logger(NAME).error("store_failed", flow="orders", exc_info=True)
    line = json.loads(stream.getvalue())
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("ValueError: away")
    assert (line["event"], line["flow"]) == ("store_failed", "orders") and "exc_info" not in line


@pytest.mark.usefixtures("restored")
def test_as_json_a_line_of_plain_logging_has_its_message_as_event() -> None:
    stream = written(as_json=True)
    logging.getLogger(NAME).warning("by %s", "hand")
    assert json.loads(stream.getvalue())["event"] == "by hand"


# ------------------------------------------------------------------------------------------------- console


@pytest.mark.usefixtures("restored")
def test_on_a_console_a_line_has_time_level_event_and_fields() -> None:
    stream = written(as_json=False)
    get_logger(NAME).info("checkpoint_completed", flow="orders", epoch=12)
    stamp, rest = stream.getvalue().split(" ", 1)
    assert stamp.endswith("Z") and "T" in stamp
    assert rest.split() == ["[info", "]", "checkpoint_completed", "flow=orders", "epoch=12"]


@pytest.mark.usefixtures("restored")
def test_on_a_console_a_traceback_follows_and_holds_no_local_variables() -> None:
    stream = written(as_json=False)
    secret = "do not print me"
    try:
        raise ValueError("away")
    except ValueError:
        get_logger(NAME).error("store_failed", exc_info=True)
    line, *traceback = stream.getvalue().splitlines()
    assert "store_failed" in line and traceback[-1] == "ValueError: away"
    assert f"'{secret}'" not in stream.getvalue()


@pytest.mark.usefixtures("restored")
def test_only_a_terminal_gets_colours() -> None:
    assert "\x1b[" not in make_formatter(as_json=False).format(_record())
    assert "\x1b[" in make_formatter(as_json=False, in_colour=True).format(_record())


@pytest.mark.usefixtures("restored")
def test_the_level_holds() -> None:
    stream = written(as_json=False, level=logging.WARNING)
    get_logger(NAME).info("checkpoint_completed")
    assert stream.getvalue() == ""


def _record() -> logging.LogRecord:
    return logging.LogRecord(NAME, logging.INFO, __file__, 1, "hello", (), None)


# ------------------------------------------------------------------------------------------------- files


@pytest.fixture
def other_loggers_restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("py4j", "pyspark")]
    before = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in set(one.handlers) - set(handlers):
            handler.close()
        one.handlers[:], one.level, one.propagate = handlers, level, propagate


def files_in(folder: Path, name: str) -> dict[str, list[dict[str, object]]]:
    paths = sorted(folder.glob(f"{name}*"))
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in paths}


@pytest.mark.usefixtures("restored", "other_loggers_restored")
def test_a_full_log_file_gives_way_to_a_new_one_and_few_are_kept(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "made" / "run.log", 400, 2)
    configure_logging(as_json=True, level=logging.INFO, files=[file])
    for number in range(40):
        get_logger(NAME).info("counted", flow="orders", number=number)
    kept = files_in(tmp_path / "made", "run.log")
    assert list(kept) == ["run.log", "run.log.1", "run.log.2"]
    numbers = [line["number"] for name in reversed(kept) for line in kept[name]]
    assert numbers == list(range(40 - len(numbers), 40))
    assert all(path.stat().st_size <= 400 for path in (tmp_path / "made").iterdir())


@pytest.mark.usefixtures("restored", "other_loggers_restored")
def test_a_log_file_that_another_program_has_moved_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    configure_logging(as_json=True, level=logging.INFO, files=[LogFile(path, 0, 1)])
    get_logger(NAME).info("before")
    path.rename(tmp_path / "moved")
    get_logger(NAME).info("after")
    assert [line["event"] for line in files_in(tmp_path, "run.log")["run.log"]] == ["after"]


@pytest.mark.usefixtures("restored", "other_loggers_restored")
def test_each_flow_has_its_own_file_and_spark_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [LogFile(tmp_path / f"{name or 'spark'}.log", 1000, 1, flow=name) for name in ("a", "b", "")]
    configure_logging(as_json=True, level=logging.INFO, files=files)
    get_logger(NAME).info("one", flow="a")
    get_logger(NAME).info("two", flow="b")
    logging.getLogger("py4j.clientserver").error("the JVM is lost")
    events = {name: [line["event"] for line in lines] for name, lines in files_in(tmp_path, "").items()}
    assert events == {"a.log": ["one"], "b.log": ["two"], "spark.log": ["the JVM is lost"]}
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("restored", "other_loggers_restored")
def test_a_log_file_that_cannot_be_written_disturbs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    configure_logging(as_json=False, level=logging.INFO, files=[LogFile(tmp_path / "file" / "run.log", 1000, 1)])
    get_logger(NAME).info("lost")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_file", [False, True])
def test_traces_of_py4j_reach_the_file_and_not_the_terminal(tmp_path: Path, has_file: bool) -> None:
    """It logs them at the root, where a program of its own has no handler."""
    script = """
import logging, sys
from pathlib import Path
from cutline.base.logs import LogFile, configure_logging
files = [LogFile(Path(name), 0, 1) for name in sys.argv[1:]]
configure_logging(as_json=False, level=logging.INFO, files=files, stream=sys.stderr)
for path in ("/lib/py4j/clientserver.py", "/home/me/flow.py"):
    logging.getLogger().handle(logging.LogRecord("root", logging.ERROR, path, 1, f"from {path}", None, None))
"""
    log = tmp_path / "log"
    command = [sys.executable, "-c", script, *([str(log)] if has_file else [])]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "from /home/me/flow.py" in told.stderr and "py4j" not in told.stderr
    if has_file:
        assert "py4j" in log.read_text()
