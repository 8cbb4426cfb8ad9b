"""What sinks say themselves against what was published to them: ahead, behind, emptied, and the ways out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.errors import RecoveryError
from tests.support.killing import is_killed_at
from tests.support.remote import copied, lose_host, remote
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TABLE, SparklessFlow


def publish(tmp_path: Path, epochs: int = 4, **settings: Any) -> SparklessFlow:
    with running(tmp_path, **{"retain_checkpoints": 5, **settings}) as flow:
        for _ in range(epochs):
            flow.emit(2)
            flow.checkpoint()
    return flow


def put_back(tmp_path: Path, to_epoch: int) -> None:
    """As if the sink's target had been restored from a backup of its own."""
    backup = tmp_path / "backup"
    shutil.copytree(tmp_path / "table", backup)
    for path in backup.iterdir():
        if path.stem.isdigit() and int(path.stem) > to_epoch:
            path.unlink()
    shutil.rmtree(tmp_path / "table")
    backup.rename(tmp_path / "table")


def test_a_sink_that_was_put_back_is_recognised_and_the_flow_goes_back_to_where_it_is(tmp_path: Path) -> None:
    publish(tmp_path)
    put_back(tmp_path, 2)
    with pytest.raises(RecoveryError, match=r"up to epoch 2, but epoch 4 was published") as refused:
        SparklessFlow(tmp_path, retain_checkpoints=5)
    assert "cutline restore --to 2" in str(refused.value)
    with pytest.raises(RecoveryError, match="epoch 4 was published"):
        SparklessFlow(tmp_path, retain_checkpoints=5, restore_to=3)
    with running(tmp_path, retain_checkpoints=5, restore_to=2) as flow:
        flow.emit(6)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 10
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert flow.recovered.path == "resume"


def test_a_sink_that_was_emptied_is_recognised_and_may_be_accepted(tmp_path: Path) -> None:
    publish(tmp_path)
    put_back(tmp_path, 0)
    with pytest.raises(RecoveryError, match="holds nothing of this flow") as refused:
        SparklessFlow(tmp_path, retain_checkpoints=5)
    assert "--accept table" in str(refused.value)
    asked = ["sinks", "--flow", "counting", "--storage", str(tmp_path / "storage")]
    answer = CliRunner().invoke(app, [*asked, "--accept", "table", "--json"])
    assert answer.exit_code == 0, answer.output
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        flow.drain()
        assert len(flow.sink.rows()) == 1
    assert CliRunner().invoke(app, [*asked, "--accept", "nobody"]).exit_code != 0


def test_epochs_without_rows_do_not_make_a_sink_look_put_back(tmp_path: Path) -> None:
    publish(tmp_path)
    with running(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.checkpoint()
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert flow.recovered.path == "resume"


@pytest.mark.parametrize("point", ["sink-rewind-half", "restore-generation"])
def test_killed_while_it_is_rewound_the_sink_does_not_look_put_back(tmp_path: Path, point: str) -> None:
    publish(tmp_path)
    assert is_killed_at(point, lambda: SparklessFlow(tmp_path, retain_checkpoints=5, restore_to=1).stop())
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert len(flow.sink.rows()) == 2
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_lost_host_recognises_it_too(tmp_path: Path) -> None:
    settings = {**remote(tmp_path), "retain_checkpoints": 5}
    with running(tmp_path, **settings) as flow:
        for _ in range(3):
            flow.emit(2)
            copied(flow, flow.checkpoint())
        flow.emit(1)
        flow.wait(lambda: flow.metadata.seen().get(TABLE) == 3)
        copied(flow, flow.checkpoint())
    lose_host(tmp_path)
    put_back(tmp_path, 1)
    with pytest.raises(RecoveryError, match="was published to it"):
        SparklessFlow(tmp_path, **settings)


def test_what_each_sink_has_published_waits_for_and_has_staged_is_shown(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.step(NUMBERS)
        flow.emit(2)
    answer = CliRunner().invoke(app, ["sinks", "--flow", "counting", "--storage", str(tmp_path / "storage"), "--json"])
    assert answer.exit_code == 0, answer.output
    (sink,) = json.loads(answer.output)["sinks"]
    assert (sink["sink"], sink["operator"], sink["published"], sink["with_rows"]) == ("table", "totals", 1, 1)
    assert (sink["waiting"], sink["staged_rows"]) == ([], 3)
    shown = CliRunner().invoke(app, ["sinks", "--flow", "counting", "--storage", str(tmp_path / "storage")])
    assert "table" in shown.output
    assert [line.split()[0] for line in shown.output.splitlines()] == ["sink", "table"]  # one line each at 80 columns
