"""The JVM of a session that Cutline creates: how it is started, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

#: In the command line of the JVM, and of the script that becomes it.
_SUBMIT = "org.apache.spark.deploy.SparkSubmit"


def launch_jvm(settings: Mapping[str, str], on_line: Callable[[str], None] | None) -> Any:
    """Start the JVM as PySpark would, with a reader of what it and its Python workers write to standard error."""
    conf = SparkConf(loadDefaults=False)
    for key, value in settings.items():
        conf.set(key, value)
    if on_line is None:
        return launch_gateway(conf)
    reading, writing = os.pipe()
    threading.Thread(target=_read, args=(reading, on_line), name="cutline-spark-output", daemon=True).start()
    try:
        return launch_gateway(conf, popen_kwargs={"stderr": writing})
    finally:
        os.close(writing)


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
