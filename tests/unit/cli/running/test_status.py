"""``cutline status`` reads the file that the running flow writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutline.base import records
from cutline.cli.main import app
from cutline.errors import DamagedRecordError
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest
from cutline.ports.progress import NoProgress, Step
from cutline.runtime.lock import FlowLock
from cutline.runtime.process.state import noted_start
from cutline.storage.restore_requests import store_request
from tests.support.statuses import AS_NOW, WRITTEN

#: Larger than any process id.
NO_PROCESS = 1 << 30


def store(folder: Path, content: str) -> list[str]:
    path = folder / "counting" / "status.json"
    path.parent.mkdir()
    path.write_text(content)
    return ["status", "counting", "--storage", str(folder)]


def test_json_has_the_keys_and_values_of_the_stored_status(tmp_path: Path) -> None:
    written = {**WRITTEN, "pid": os.getpid()}
    told = CliRunner().invoke(app, [*store(tmp_path, json.dumps(written)), "--json"])
    assert json.loads(told.stdout) == {**AS_NOW, "pid": os.getpid()}


def test_a_process_that_is_gone_is_reported(tmp_path: Path) -> None:
    command = store(tmp_path, json.dumps({**WRITTEN, "pid": NO_PROCESS}))
    told = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(told.stdout)["state"] == "ended"
    assert "not running (its process has ended" in CliRunner().invoke(app, command).stdout


def test_a_file_that_is_no_status_is_refused(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, store(tmp_path, '{"flow": "counting"}'))
    assert isinstance(told.exception, DamagedRecordError)
    with pytest.raises(DamagedRecordError, match="the status cannot be read"):
        raise told.exception


def test_the_status_in_a_copied_folder_is_not_that_of_a_running_flow(tmp_path: Path) -> None:
    command = store(tmp_path, json.dumps({**WRITTEN, "pid": os.getpid()}))
    original = FlowLock(tmp_path / "lock", "counting")
    original.acquire()
    shutil.copy2(tmp_path / "lock", tmp_path / "counting" / "lock")
    original.release()
    told = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(told.stdout)["state"] == "copy"
    assert "this folder is a copy" in CliRunner().invoke(app, command).stdout


def told_by(command: str, storage: Path) -> tuple[str, dict[str, Any]]:
    """What a command tells a person, and a program."""
    line = [command, "--storage", str(storage)]
    told, as_json = CliRunner().invoke(app, line), CliRunner().invoke(app, [*line, "--json"])
    assert (told.exit_code, as_json.exit_code) == (0, 0), told.output + as_json.output
    return " ".join(told.stdout.split()), json.loads(as_json.stdout)


def test_a_flow_that_starts_for_the_first_time_is_shown(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "counting")
    layout.root.mkdir()
    lock = FlowLock(layout.lock, "counting")
    lock.acquire()
    with noted_start(layout, NoProgress()) as note:
        note.begin(Step.SPARK)
        text, status = told_by("status", tmp_path)
        listed, flows = told_by("flows", tmp_path)
    lock.release()
    assert f"counting starting (pid {os.getpid()}, Spark, 0 s)" in text and "checkpoint" not in text
    assert (status["state"], status["pid"], status["operators"]) == ("starting", os.getpid(), {})
    assert f"starting (pid {os.getpid()}, Spark, 0 s)" in listed
    (one,) = flows["flows"]
    assert (one["state"], one["pid"], one["problems"]) == ("starting", os.getpid(), [])
    assert one["starting"] == status["starting"]


def test_a_flow_that_starts_again_after_a_kill_is_not_called_dead(tmp_path: Path) -> None:
    store(tmp_path, json.dumps({**WRITTEN, "pid": NO_PROCESS}))
    layout = Layout(tmp_path, "counting")
    layout.identity.write_bytes(records.encode("flow", {"name": "counting", "created_ms": 1}))
    lock = FlowLock(layout.lock, "counting")
    lock.acquire()
    with noted_start(layout, NoProgress()) as note:
        note.begin(Step.JAVA)
        told = {name: told_by(name, tmp_path) for name in ("status", "flows", "checkpoints")}
    assert not any("ended" in text or "not running" in text for text, _ in told.values())
    assert told["status"][1]["state"] == told["flows"][1]["flows"][0]["state"] == "starting"
    past = told["checkpoints"][1]
    assert (past["state"], past["starting"]["step"], past["is_running"]) == ("starting", "Java", False)
    lock.release()
    assert told_by("status", tmp_path)[1]["state"] == "ended"
    assert told_by("flows", tmp_path)[1]["flows"][0]["state"] == "ended"


def test_a_request_that_is_being_carried_out_is_not_offered_for_withdrawal(tmp_path: Path) -> None:
    store(tmp_path, json.dumps({**WRITTEN, "state": "stopped"}))
    layout = Layout(tmp_path, "counting")
    store_request(layout, RestoreRequest(to="auto-1"))
    assert "--cancel withdraws it" in told_by("status", tmp_path)[0]
    with noted_start(layout, NoProgress(), restores="auto-1"):
        text, status = told_by("status", tmp_path)
    assert "it restores auto-1, as requested" in text and "--cancel" not in text
    assert (status["state"], status["restore_requested"]) == ("starting", "")
    assert status["starting"]["restores"] == "auto-1"


@pytest.mark.parametrize("state", ["unhealthy", "stopped"])
def test_why_an_operator_fails_is_told_once(tmp_path: Path, state: str) -> None:
    problem = "ValueError: the key is null"
    operator = {**WRITTEN["operators"]["numbers"], "failures": 4, "problem": problem, "trace": "/traces/1.txt"}
    health = {"healthy": False, "failures": 0, "reason": f"numbers has failed 4 times: {problem}"}
    written = {**WRITTEN, "state": state, "operators": {"numbers": operator}, "health": health, "pid": os.getpid()}
    store(tmp_path, json.dumps(written))
    text, _ = told_by("status", tmp_path)
    assert text.count("the key is null") == 1 and "whole trace: /traces/1.txt" in text
    listed, flows = told_by("flows", tmp_path)
    assert "the key is null" in listed
    assert len(flows["flows"][0]["problems"]) == 1
