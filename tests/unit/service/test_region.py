"""A region goes back while the rest of the flow goes on; and the whole flow, when a person asks. Without Spark."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cutline.errors import CutlineError, FlowFailedError, RecoveryError
from cutline.ids import Epoch
from tests.support.killing import is_killed_at
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow
from tests.unit.service.test_running import assert_each_once, running


def lose(flow: SparklessFlow, operator: str) -> None:
    shutil.rmtree(flow.layout.spark_dirs / operator)


def test_a_failed_operator_goes_back_alone_and_upstream_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(4)
        epoch = flow.checkpoint()
        flow.emit(3)
        lose(flow, TOTALS)
        upstream = flow.operators[NUMBERS]
        flow.fail(TOTALS)
        assert flow.operators[NUMBERS] is upstream
        assert flow.operators[TOTALS].channel.last_batch == 3, "back at the checkpoint"
        assert flow.snapshots.generations()[-1].restored_epoch == epoch
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 9
        assert flow.run.status()["recovery"]["counts"] == {"fresh": 1, "regional": 1}
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        flow.drain()
        assert len(flow.sink.rows()) == 10
        assert_each_once(flow.sink.rows())


def test_what_is_pending_is_given_up_and_checkpoints_go_on_afterwards(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.step(NUMBERS)
        pending = flow.request(aligned=True)  # waits for ``totals``, which does not read
        flow.wait(lambda: flow.coordinator.view()["pending"] != {})
        lose(flow, TOTALS)
        flow.fail(TOTALS)
        with pytest.raises(CutlineError, match="had to go back"):
            pending.result(10)
        flow.checkpoint()
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_the_producer_waits_again_for_a_consumer_that_went_back(tmp_path: Path) -> None:
    with running(tmp_path, channel_capacity_entries=2) as flow:
        flow.emit(1)
        flow.checkpoint()
        flow.emit(2)
        assert flow.operators[NUMBERS].credits.has_room()
        lose(flow, TOTALS)
        flow.fail(TOTALS)
        assert not flow.operators[NUMBERS].credits.has_room()
        flow.wait(lambda: flow.step(TOTALS))
        assert flow.operators[NUMBERS].credits.has_room()


@pytest.mark.parametrize("point", ["restore-dirs-built", "restore-generation"])
def test_killed_while_a_region_goes_back_each_number_is_published_once(tmp_path: Path, point: str) -> None:
    def life() -> None:
        with running(tmp_path) as flow:
            flow.emit(4)
            flow.checkpoint()
            flow.emit(3)
            lose(flow, TOTALS)
            flow.fail(TOTALS)

    assert is_killed_at(f"{point}:{TOTALS}", life)  # a start passes these points too, of no operator
    with running(tmp_path) as flow:
        assert flow.recovered.path == ("regional" if point == "restore-dirs-built" else "resume")
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 8


def test_going_back_that_does_not_help_ends_the_flow(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.checkpoint()
    flow.fail(TOTALS)
    flow.fail(TOTALS)
    with pytest.raises(FlowFailedError, match="it fails"):
        flow.run.await_termination(20)


def test_without_a_checkpoint_the_flow_ends_with_both_reasons(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.fail(TOTALS)
    with pytest.raises(FlowFailedError, match="there is no checkpoint to go back to"):
        flow.run.await_termination(20)


def test_a_person_takes_the_whole_flow_back_and_sinks_follow(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
        assert len(flow.sink.rows()) == 6
    with pytest.raises(RecoveryError, match="choose one of those kept: 1, 2, 3"):
        SparklessFlow(tmp_path, restore_to=Epoch(9))
    flow = SparklessFlow(tmp_path, restore_to=Epoch(1), retain_checkpoints=5)
    try:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("local", 1)
        assert len(flow.sink.rows()) == 2, "what was published since is taken back"
        flow.emit(1)
        epoch = flow.checkpoint()
        assert epoch == 4, "epochs that were given up are never used again"
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3
    finally:
        flow.stop()
