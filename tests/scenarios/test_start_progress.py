"""What a start tells a person who waits for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from cutline.cli.steps import Steps
from cutline.ports.progress import Step
from tests.support.sparkless import SparklessFlow


def started(tmp_path: Path, **options: Any) -> tuple[SparklessFlow, str]:
    """The flow, and the last of the lines that its start has told."""
    said = list[str]()
    with Steps("starting", list(Step), console=None, say=said.append) as steps:
        flow = SparklessFlow(tmp_path, progress=steps, **options)
    assert said[:2] == ["starting: recovery", "starting: queries"]
    return flow, said[-1]


def test_a_start_tells_its_recovery_path_the_epoch_and_the_bytes(tmp_path: Path) -> None:
    remote = {"remote": f"file://{tmp_path}/remote"}
    flow, told = started(tmp_path, **remote)
    assert "recovery: fresh; queries: 2 started" in told
    flow.emit(3)
    epoch = flow.checkpoint()
    flow.wait(lambda: flow.remote_status().epoch == epoch)
    flow.stop()

    flow, told = started(tmp_path, **remote)
    flow.stop()
    assert "recovery: resume;" in told

    shutil.rmtree(tmp_path / "storage" / "counting" / "spark")
    flow, told = started(tmp_path, **remote)
    flow.stop()
    assert f"recovery: local, epoch {epoch}, " in told and " B;" in told.replace("kB;", " B;")

    shutil.rmtree(tmp_path / "storage")
    flow, told = started(tmp_path, **remote)
    flow.stop()
    assert f"recovery: remote, epoch {epoch}, " in told


def test_a_missing_directory_is_called_missing(tmp_path: Path) -> None:
    flow, _ = started(tmp_path)
    flow.emit(2)
    flow.checkpoint()
    flow.stop()
    shutil.rmtree(tmp_path / "storage" / "counting" / "spark" / "totals")
    flow, _ = started(tmp_path)
    status = flow.run.status()
    flow.stop()
    assert any(
        "the directory is missing or empty" in one for one in [status.recovery.reason, *status.recovery.problems]
    )
    assert "-1" not in f"{status.recovery.reason} {status.recovery.problems}"
