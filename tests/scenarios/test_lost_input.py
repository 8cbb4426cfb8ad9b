"""Input that is gone, on the way back: refused with what is missing, or given up and written down."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from cutline.errors import LostInputError, NotDone
from cutline.model.generation import LostInput
from cutline.recovery import region
from cutline.recovery.sinks import abort_invisible
from cutline.storage.generations import LocalGenerationStore
from cutline.storage.query_dir import LocalQueryDir
from tests.support.sparkless import NUMBERS, SparklessFlow

LOST = LostInput(operator=NUMBERS, what="stream ORDERS: sequences 120 to 340", why="dropped", parts=221)


def checkpointed(storage: Path) -> int:
    flow = SparklessFlow(storage, retain_checkpoints=5)
    flow.emit(3)
    epoch = flow.checkpoint()
    flow.emit(2)
    flow.drain()
    flow.stop()
    return epoch


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose positions were moved."""
    found: list[str] = []

    def skip(self: LocalQueryDir, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        found.append(spark_checkpoint_dir.parent.name)

    monkeypatch.setattr(LocalQueryDir, "skip_lost_input", skip)
    return found


def answer(monkeypatch: pytest.MonkeyPatch, method: str, result: Any) -> None:
    def lost(_: LocalQueryDir, asked: Any, *__: object) -> Any:
        if isinstance(result, Exception):
            raise result
        return result if getattr(asked, "operator", asked) == NUMBERS else []

    monkeypatch.setattr(LocalQueryDir, method, lost)


def test_the_range_that_is_missing_is_in_the_error_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    epoch = checkpointed(tmp_path)
    answer(monkeypatch, "lost_input", [LOST])
    with pytest.raises(LostInputError, match="stream ORDERS: sequences 120 to 340") as refused:
        SparklessFlow(tmp_path, restore_to=epoch)
    assert f"epoch {epoch}" in str(refused.value) and "missing_input" in str(refused.value)
    assert skipped == []


def test_a_server_that_cannot_be_asked_is_not_taken_for_a_good_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    epoch = checkpointed(tmp_path)
    answer(monkeypatch, "lost_input", NotDone("the NATS server cannot be reached"))
    for policy in ("fail", "continue"):
        with pytest.raises(LostInputError, match=r"is unknown: the NATS server cannot be reached"):
            SparklessFlow(tmp_path, restore_to=epoch, missing_input=policy)


def test_a_person_may_give_it_up_and_it_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    epoch = checkpointed(tmp_path)
    answer(monkeypatch, "lost_input", [LOST])
    flow = SparklessFlow(tmp_path, restore_to=epoch, missing_input="continue", retain_checkpoints=5)
    assert skipped == [NUMBERS], "only of sources"
    (shown,) = flow.run.status().recovery.lost_input
    assert shown == LostInput(operator=NUMBERS, what=LOST.what, why="dropped", parts=221)
    assert b'cutline_lost_input_total{flow="counting",operator="numbers"} 221.0' in generate_latest(
        flow.run.metrics.registry
    )
    assert flow.generations.load_all()[-1].lost_input == [LOST]
    flow.stop()
    answer(monkeypatch, "lost_input", [])
    flow = SparklessFlow(tmp_path)
    assert flow.run.status().recovery.lost_input == [], "said once, by the generation that it happened to"
    flow.stop()


def test_a_region_that_goes_back_while_the_flow_runs_gives_it_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    flow = SparklessFlow(tmp_path, missing_input="continue")
    flow.emit(2)
    flow.checkpoint()
    answer(monkeypatch, "lost_input", [LOST])
    flow.fail(NUMBERS)
    assert skipped == [NUMBERS]
    assert [one.what for one in flow.run.status().recovery.lost_input] == [LOST.what]
    assert flow.generations.load_all()[-1].lost_input == [LOST]
    assert b'operator="numbers"} 221.0' in generate_latest(flow.run.metrics.registry)
    flow.stop()


def test_a_region_that_is_restored_in_several_tries_says_once_what_it_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    flow = SparklessFlow(tmp_path, missing_input="continue")
    flow.emit(2)
    flow.checkpoint()
    answer(monkeypatch, "lost_input", [LOST])
    full = [OSError(errno.ENOSPC, "No space left on device")] * 2

    def fails_twice(*args: Any) -> None:
        if full:
            raise full.pop()
        abort_invisible(*args)

    monkeypatch.setattr(region, "abort_invisible", fails_twice)
    flow.fail(NUMBERS)
    assert [one.what for one in flow.run.status().recovery.lost_input] == [LOST.what]
    assert b'operator="numbers"} 221.0' in generate_latest(flow.run.metrics.registry)
    flow.stop()


def test_what_was_dropped_before_it_was_read_is_missed_by_a_flow_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    checkpointed(tmp_path)
    answer(monkeypatch, "lost_ahead", [LOST])
    with pytest.raises(LostInputError, match="was not read yet is gone: stream ORDERS: sequences 120 to 340"):
        SparklessFlow(tmp_path)
    flow = SparklessFlow(tmp_path, missing_input="continue")
    recovery = flow.run.status().recovery
    assert (recovery.path, skipped) == ("resume", [NUMBERS]) and len(recovery.lost_input) == 1
    flow.stop()
    answer(monkeypatch, "lost_ahead", NotDone("the NATS server cannot be reached"))
    flow = SparklessFlow(tmp_path)
    assert "cannot be reached" in flow.run.status().recovery.problems[0], "its query waits for the server"
    flow.stop()


def test_a_start_that_dies_before_it_is_written_down_does_not_forget_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed(tmp_path)
    is_moved = [False]

    def lost_ahead(_: LocalQueryDir, operator: str, __: Path) -> list[LostInput]:
        return [LOST] if operator == NUMBERS and not is_moved[0] else []

    def skip(*_: object) -> None:
        is_moved[0] = True

    def die(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalQueryDir, "lost_ahead", lost_ahead)
    monkeypatch.setattr(LocalQueryDir, "skip_lost_input", skip)
    with monkeypatch.context() as patch:
        patch.setattr(LocalGenerationStore, "create", die)
        with pytest.raises(KeyboardInterrupt):
            SparklessFlow(tmp_path, missing_input="continue")
    flow = SparklessFlow(tmp_path, missing_input="continue")
    assert is_moved[0] and flow.generations.load_all()[-1].lost_input == [LOST]
    flow.stop()
