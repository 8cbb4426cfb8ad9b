"""Whether a flow runs, starts or is stopped."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from cutline.model.layout import Layout
from cutline.model.status import FlowStatus
from cutline.ports.progress import NoProgress, Step
from cutline.runtime.lock import FlowLock
from cutline.runtime.process.state import noted_start, state_of
from tests.support.statuses import WRITTEN

#: Larger than any process id.
NO_PROCESS = 1 << 30


def status(**changes: object) -> FlowStatus:
    return msgspec.convert({**WRITTEN, **changes}, FlowStatus, strict=False)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    (tmp_path / "counting").mkdir()
    return Layout(tmp_path, "counting")


def test_the_lock_and_the_status_decide(layout: Layout) -> None:
    lock = FlowLock(layout.lock, "counting")
    assert state_of(layout, None).state == "new"
    lock.acquire()
    assert state_of(layout, None).state == "starting", "also of a version that writes no note"
    assert state_of(layout, status(pid=NO_PROCESS)).state == "starting", "the status is of a process before"
    running = state_of(layout, status(pid=os.getpid()))
    assert (running.state, running.pid, running.is_up) == ("running", os.getpid(), True)
    lock.release()
    assert state_of(layout, status(pid=NO_PROCESS)).state == "ended"
    assert state_of(layout, status(pid=os.getpid())).state == "ended", "the process lives, but does not run the flow"
    assert state_of(layout, status(state="failed")).state == "failed"


def test_a_process_that_starts_its_flow_again_is_starting(layout: Layout) -> None:
    lock = FlowLock(layout.lock, "counting")
    lock.acquire()
    with noted_start(layout, NoProgress()) as note:
        note.begin(Step.RECOVERY)
        found = state_of(layout, status(pid=os.getpid(), state="stopped"))
        assert found.starting is not None
        assert (found.state, found.is_up, found.starting.step) == ("starting", False, "recovery")
    assert not layout.starting.exists()
    lock.release()


@pytest.mark.parametrize("change", [{"begun": "1"}, {"folder": "/elsewhere"}])
def test_the_note_of_another_process_or_folder_does_not_count(layout: Layout, change: dict[str, str]) -> None:
    with noted_start(layout, NoProgress()):
        assert state_of(layout, status(state="stopped")).state == "starting"
        written = json.loads(layout.starting.read_bytes())
        layout.starting.write_text(json.dumps({**written, **change}))
        assert state_of(layout, status(state="stopped")).state == "stopped"
        layout.starting.write_text("{")
        assert state_of(layout, status(state="stopped")).state == "stopped"


def test_a_start_leaves_the_note_of_another_process(layout: Layout) -> None:
    with noted_start(layout, NoProgress()):
        written = json.loads(layout.starting.read_bytes())
        written["start"]["pid"] = NO_PROCESS
        layout.starting.write_text(json.dumps(written))
    assert layout.starting.exists()


def test_a_start_goes_on_if_it_cannot_be_noted(layout: Layout) -> None:
    shutil.rmtree(layout.root)
    with noted_start(layout, NoProgress()) as note:
        note.begin(Step.JAVA)
