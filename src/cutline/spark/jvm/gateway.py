"""The JVM of a session that Cutline creates: how it is started, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from cutline.errors import ConfigError

#: In the command line of the JVM, and of the script that becomes it.
_SUBMIT = "org.apache.spark.deploy.SparkSubmit"
#: How long to wait for the last lines of a JVM that has ended.
_LAST_LINES_SECONDS = 2.0
_MOST_LINES = 50
#: Before what a shell script says of itself.
_SCRIPT = re.compile(r"^\S*/(spark-class|spark-submit): line \d+: ")
_NO_REASON = re.compile(r"^\s*$|^(WARNING|Picked up|Using Spark|NOTE)\b", re.IGNORECASE)


def launch_jvm(settings: Mapping[str, str], on_line: Callable[[str], None] | None) -> Any:
    """Start the JVM as PySpark would, with a reader of what it and its Python workers write to standard error.

    Raises ConfigError if Java cannot be started, or ends at once.
    """
    conf = SparkConf(loadDefaults=False)
    for key, value in settings.items():
        conf.set(key, value)
    if on_line is None:
        try:
            return launch_gateway(conf)
        except PySparkRuntimeError as error:
            raise _not_started(()) from error
    told = on_line
    heard: list[str] = []

    def hear(line: str) -> None:
        if len(heard) < _MOST_LINES:
            heard.append(line)
        told(line)

    reading, writing = os.pipe()
    reader = threading.Thread(target=_read, args=(reading, hear), name="cutline-spark-output", daemon=True)
    reader.start()
    failed: PySparkRuntimeError | None = None
    try:
        return launch_gateway(conf, popen_kwargs={"stderr": writing})
    except PySparkRuntimeError as error:
        failed = error
    finally:
        os.close(writing)
    reader.join(_LAST_LINES_SECONDS)
    raise _not_started(heard) from failed


def _not_started(lines: Iterable[str]) -> ConfigError:
    """``lines``: what was said, by Java or by the script that starts it. The first one names the cause."""
    why = next((_SCRIPT.sub("", line).strip() for line in lines if not _NO_REASON.match(line)), "")
    return ConfigError(
        f"Java cannot be started{f': {why}' if why else ''}",
        next_step="see what is missing: cutline doctor",
        JAVA_HOME=os.environ.get("JAVA_HOME"),
    )


def _read(handle: int, on_line: Callable[[str], None]) -> None:
    with open(handle, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            on_line(line.rstrip("\n"))


def end_jvm(mark: str = _SUBMIT) -> None:
    """Kill the JVM that this process has started, if any. ``mark``: stands in its command line.

    PySpark knows it only when it has answered, so it is looked for among the child processes.
    """
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
