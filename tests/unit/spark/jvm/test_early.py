"""A JVM that was started early is taken only if it is what would be started now."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.spark.jvm.early import EarlyJvm
from cutline.spark.jvm.gateway import end_jvm

#: PySpark does not close the pipe to a JVM that has not started.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

SETTINGS = {"spark.master": "local[1]"}


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is run in place of ``spark-submit``."""
    script = tmp_path / "bin" / "spark-submit"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho no Java >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    yield script
    end_jvm(str(script))  # not the session that other tests share


def test_one_that_could_not_be_started_is_not_taken_and_what_it_said_is_not_repeated(submit: Path) -> None:
    said = list[str]()
    early = EarlyJvm(SETTINGS, said.append)
    assert early.take(SETTINGS) is None
    assert said == []  # the JVM that is started in its place says it


@pytest.mark.parametrize("change", ["settings", "environment", "folder"])
def test_one_that_was_started_with_something_else_is_not_waited_for(
    submit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    submit.write_text("#!/bin/sh\nread line\n")
    early = EarlyJvm(SETTINGS, None)
    settings = SETTINGS
    if change == "settings":
        settings = {**SETTINGS, "spark.driver.memory": "1g"}
    elif change == "environment":
        monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-memory 1g pyspark-shell")
    else:
        monkeypatch.chdir(tmp_path)
    assert early.take(settings) is None
    assert not early._thread.is_alive(), "it is ended"


def test_a_jvm_is_ended_before_it_has_answered(submit: Path) -> None:
    # As Spark's own script, which has a class in its command line; another one than that of the session tests share.
    stuck = subprocess.Popen(["sh", "-c", "sleep 600", "org.apache.spark.deploy.Stuck"], start_new_session=True)
    other = subprocess.Popen(["sleep", "600"])
    try:
        end_jvm("org.apache.spark.deploy.Stuck")
        assert stuck.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        os.killpg(stuck.pid, signal.SIGKILL) if stuck.poll() is None else None
