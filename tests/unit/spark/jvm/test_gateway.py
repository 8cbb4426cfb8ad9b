"""A JVM that does not start is an error of the machine, not of Cutline."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.errors import ConfigError
from cutline.spark.jvm.gateway import launch_jvm

#: PySpark does not close the pipe to a JVM that has not started.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _ends_what_pyspark_leaves() -> Iterator[None]:
    """Here, and not in a later test."""
    yield
    gc.collect()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("/opt/spark/bin/spark-class: line 71: /none/bin/java: No such file or directory", ": /none/bin/java: No such"),
        ("WARNING: Using incubator modules\nInvalid maximum heap size: -Xmx1x", ": Invalid maximum heap size: -Xmx1x"),
        ("", ""),
    ],
)
def test_java_that_does_not_start_is_an_error_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], said: str, why: str
) -> None:
    script = tmp_path / "bin" / "spark-submit"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\ncat >&2 <<END\n{said}\nEND\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    heard: list[str] = []
    with pytest.raises(ConfigError, match="Java cannot be started") as refused:
        launch_jvm({"spark.master": "local[1]"}, heard.append)
    assert refused.value.what.startswith(f"Java cannot be started{why}")
    assert "cutline doctor" in refused.value.next_step
    assert heard == said.splitlines() or heard == [""]
    assert capfd.readouterr().err == "", "all that it says goes to the log"
