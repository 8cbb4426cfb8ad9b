"""``cutline status`` reads the file that the running flow writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.errors import DamagedRecordError
from cutline.runtime.lock import FlowLock
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
    assert json.loads(told.stdout)["state"].startswith("not running (its process has ended")
    assert "not running" in CliRunner().invoke(app, command).stdout


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
    assert json.loads(told.stdout)["state"].startswith("not running (this folder is a copy")
