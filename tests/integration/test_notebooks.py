"""A flow in a notebook: a real Jupyter kernel, functions defined in its cells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from tests.support.submitted_flow import DEFINITION

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SESSION = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
"""
START = 'run = flow.start(spark=spark, storage="storage", checkpoint_interval=0)\nrun.process_all_available()'
AGAIN = """
run.stop()
(FOLDER / "in" / "2.json").write_text('{"id": 10}')
run = flow.start(spark=spark, storage="storage", checkpoint_interval=0)
run.process_all_available()
run.status().recovery.path, spark.read.parquet(str(FOLDER / "out" / "orders")).count()
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    manager, client = start_new_kernel(cwd=str(tmp_path), startup_timeout=60)
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def run_cell(client: Any, code: str) -> str:
    """What the cell returns, as its text."""
    shown: list[str] = []

    def note(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "error":
            shown.append("\n".join(content["traceback"]))
        elif message["msg_type"] == "execute_result":
            shown.append(content["data"]["text/plain"])

    answer = client.execute_interactive(code, output_hook=note, timeout=120)
    assert answer["content"]["status"] == "ok", shown
    return "".join(shown)


def test_a_flow_runs_in_a_notebook_stops_and_runs_again(kernel: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text("\n".join(json.dumps({"id": number}) for number in range(10)))
    run_cell(kernel, SESSION)
    run_cell(kernel, DEFINITION.format(name="orders", folder=tmp_path))
    run_cell(kernel, START)
    assert run_cell(kernel, 'run.status().sinks["placed"].published_epoch') == "1"
    assert run_cell(kernel, AGAIN) == "('resume', 11)"
    run_cell(kernel, "run.stop()")
    assert run_cell(kernel, "spark.range(3).count()") == "3"
