"""A whole flow on real storage without Spark, killed at every crash point: each number is published once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cutline.base.crashpoints import POINTS
from cutline.errors import CheckpointFailedError, FencedError, RecoveryError
from cutline.model.ids import Epoch
from cutline.storage.metadata.sqlite import SqliteMetadata
from tests.support.channels import append_barrier
from tests.support.killing import is_killed_at
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

#: These lie on the way back from a checkpoint; they have tests of their own.
RESTORING = {"sink-rewind-half", "restore-dirs-built", "restore-generation"}


@contextmanager
def running(storage: Path, **settings: Any) -> Iterator[SparklessFlow]:
    flow = SparklessFlow(storage, **settings)
    try:
        yield flow
    finally:
        flow.stop()


def work(storage: Path) -> None:
    """Eight numbers in four checkpoints, the last batch of each in flight."""
    with running(storage) as flow:
        for _ in range(4):
            flow.emit(2)
            flow.step(NUMBERS)
            flow.checkpoint()


def finish(storage: Path) -> list[list[int]]:
    """Start again, emit some more, publish everything; returns what readers of the sink see."""
    with running(storage) as flow:
        flow.emit(2)
        flow.drain()
        return flow.sink.rows()


def assert_each_once(rows: list[list[int]]) -> None:
    """Every number, in order, with its count: nothing lost, nothing twice, and the state fits."""
    assert rows == [[number, number + 1] for number in range(len(rows))]


# ------------------------------------------------------------------------------------------------- without faults


def test_every_number_is_published_once(tmp_path: Path) -> None:
    work(tmp_path)
    rows = finish(tmp_path)
    assert_each_once(rows)
    assert len(rows) == 14


def test_a_checkpoint_is_complete_and_published_when_it_is_answered(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        assert flow.checkpoint() == 1
        assert flow.checkpoints.epochs() == [1]
        assert flow.sink.rows() == [[0, 1], [1, 2], [2, 3]]
        manifest = flow.checkpoints.load_manifest(Epoch(1))
        assert {name: cut.batch for name, cut in manifest.operators.items()} == {NUMBERS: 2, TOTALS: 2}
        assert flow.metadata.published() == {"table": 1}
        (outcome,) = flow.metadata.history(10)
        assert (outcome.epoch, outcome.outcome) == (1, "completed")


def test_rows_in_flight_at_an_unaligned_cut_belong_to_the_next_epoch(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        flow.step(NUMBERS)
        flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        manifest = flow.checkpoints.load_manifest(Epoch(1))
        in_flight = manifest.channels[NUMBERS].in_flight[TOTALS]
        assert (in_flight.entries, in_flight.rows, manifest.operators[TOTALS].mode) == (2, 2, "unaligned")
        assert flow.sink.rows() == [[0, 1]]
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_an_aligned_cut_waits_for_the_rows_before_the_barrier(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        flow.step(NUMBERS)
        future = flow.request(aligned=True)
        flow.wait(lambda: bool(flow.operators[TOTALS].aligning()))
        flow.step(NUMBERS)
        assert not future.done()
        flow.step(TOTALS)
        flow.wait(future.done)
        manifest = flow.checkpoints.load_manifest(Epoch(1))
        assert manifest.operators[TOTALS].mode == "aligned"
        assert manifest.channels[NUMBERS].in_flight[TOTALS].entries == 0
        assert flow.sink.rows() == [[0, 1], [1, 2]]


def test_alignment_switches_when_it_takes_too_long(tmp_path: Path) -> None:
    with running(tmp_path, mode="auto", alignment_timeout="20ms") as flow:
        flow.step(NUMBERS)
        future = flow.coordinator.request_checkpoint(None)
        flow.wait(future.done)
        assert flow.checkpoints.load_manifest(Epoch(1)).operators[TOTALS].mode == "unaligned"


def test_a_checkpoint_before_the_first_batch_can_be_restored(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.step(NUMBERS)
        flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        shutil.rmtree(flow.spark_dir(NUMBERS))
    with running(tmp_path) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("local", 1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 2


def test_only_the_newest_checkpoint_is_kept_and_logs_are_truncated(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [3])
        flow.wait(lambda: flow.recovered.channels[NUMBERS].start == 8)


def test_an_idle_flow_whose_coordinator_records_are_lost_goes_on(tmp_path: Path) -> None:
    """Epochs without rows leave no trace in the sink, and all but the last are collected."""
    with running(tmp_path) as flow:
        flow.emit(2)
        for _ in range(4):
            flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [4])
        assert flow.sink.published() == 1
    for path in (tmp_path / "storage" / "counting").glob("coordinator.sqlite*"):
        path.unlink()
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3


def test_a_flow_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    for start in range(3):
        with running(tmp_path) as flow:
            assert flow.recovered.path == ("resume" if start else "fresh")
            flow.emit(2)
    with running(tmp_path) as flow:
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 6


# ------------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", [point for point in POINTS if point not in RESTORING])
def test_killed_at_any_point_each_number_is_published_once(tmp_path: Path, point: str, nth: int) -> None:
    assert is_killed_at(f"{point}#{nth}", lambda: work(tmp_path)), "the point is on the way"
    rows = finish(tmp_path)
    assert_each_once(rows)
    assert len(rows) >= 2


@pytest.mark.parametrize(
    "second", ["after-append", "after-barrier", "before-manifest", "after-manifest", "mid-collect"]
)
@pytest.mark.parametrize(
    "first", ["after-stage", "after-barrier", "after-record", "after-manifest", "sink-commit-done"]
)
def test_killed_again_after_coming_back_each_number_is_published_once(tmp_path: Path, first: str, second: str) -> None:
    for point in (f"{first}#2", second):
        is_killed_at(point, lambda: work(tmp_path))
    assert_each_once(finish(tmp_path))


@pytest.mark.parametrize("point", ["after-append#9", "after-manifest#2", "sink-commit-begun#2", "mid-truncate#2"])
@pytest.mark.parametrize("lost", [NUMBERS, TOTALS])
def test_killed_and_a_directory_lost_each_number_is_published_once(tmp_path: Path, point: str, lost: str) -> None:
    assert is_killed_at(point, lambda: work(tmp_path))
    shutil.rmtree(tmp_path / "storage" / "counting" / "spark" / lost)
    with running(tmp_path) as flow:
        assert flow.recovered.path == ("local" if lost == NUMBERS else "regional")
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize("lost", [NUMBERS, TOTALS])
@pytest.mark.parametrize("point", ["restore-dirs-built", "restore-generation"])
def test_killed_while_restoring_each_number_is_published_once(tmp_path: Path, point: str, lost: str) -> None:
    work(tmp_path)
    shutil.rmtree(tmp_path / "storage" / "counting" / "spark" / lost)
    assert is_killed_at(point, lambda: finish(tmp_path))
    rows = finish(tmp_path)
    assert_each_once(rows)
    assert len(rows) == 14


@pytest.mark.parametrize("point", ["", "restore-dirs-built", "restore-generation", "sink-rewind-half"])
def test_a_restore_behind_what_was_published_takes_it_back_and_publishes_it_again(tmp_path: Path, point: str) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
        for epoch in (2, 3):
            flow.layout.manifest(Epoch(epoch)).write_bytes(b"{")
        shutil.rmtree(flow.spark_dir(TOTALS))
    if point:
        assert is_killed_at(point, lambda: finish(tmp_path))
    with running(tmp_path) as flow:
        assert [manifest.epoch for manifest in flow.recovered.manifests] == [1]
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert max(flow.checkpoints.epochs()) > 3, "an epoch is never used twice"


def test_a_sink_with_rows_is_never_emptied_by_a_wiped_storage(tmp_path: Path) -> None:
    work(tmp_path)
    shutil.rmtree(tmp_path / "storage")
    with pytest.raises(RecoveryError):
        SparklessFlow(tmp_path)
    assert list((tmp_path / "table").glob("*.json"))


# ------------------------------------------------------------------------------------------------- pending epochs


def test_an_epoch_that_was_pending_is_finished_after_the_restart(tmp_path: Path) -> None:
    def be_killed() -> None:
        with running(tmp_path) as flow:
            flow.emit(3)
            flow.checkpoint()

    assert is_killed_at("after-barrier:totals", be_killed)
    with running(tmp_path) as flow:
        flow.wait(lambda: flow.checkpoints.epochs() == [1])
        flow.wait(flow.coordinator.is_settled)
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3
        assert flow.checkpoint() == 2


def test_an_epoch_cut_before_the_first_batch_keeps_its_rows_in_flight_over_a_restart(tmp_path: Path) -> None:
    """The barrier of totals is in its log, no batch is: after the restart it must still claim all rows before it."""

    def be_killed() -> None:
        with running(tmp_path) as flow:
            flow.step(NUMBERS)
            flow.step(NUMBERS)
            future = flow.request()
            flow.wait(future.done)

    assert is_killed_at("after-barrier:totals", be_killed)
    with running(tmp_path) as flow:
        flow.wait(lambda: flow.checkpoints.epochs() == [1])
        assert flow.checkpoints.load_manifest(Epoch(1)).channels[NUMBERS].in_flight[TOTALS].rows == 2
        flow.wait(flow.coordinator.is_settled)
        shutil.rmtree(flow.spark_dir(NUMBERS))
    with running(tmp_path) as flow:
        assert flow.recovered.restored_epoch == 1
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 2


def test_an_epoch_pending_before_a_restore_is_aborted(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()

    def be_killed() -> None:
        with running(tmp_path) as flow:
            flow.emit(1)
            flow.checkpoint()

    assert is_killed_at("after-barrier:totals", be_killed)
    shutil.rmtree(tmp_path / "storage" / "counting" / "spark" / "totals")
    with running(tmp_path) as flow:
        flow.wait(lambda: not flow.metadata.pending())
        newest = flow.metadata.history(1)[0]
        assert (newest.epoch, newest.outcome) == (2, "aborted")
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_an_epoch_that_takes_too_long_is_aborted_and_the_next_one_covers_it(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_timeout="50ms") as flow:
        flow.emit(1)
        flow.step(NUMBERS)
        flow.wait(lambda: flow.step(TOTALS, commit=False))
        future = flow.request()
        flow.wait(future.done)
        with pytest.raises(CheckpointFailedError, match="waiting for totals"):
            future.result(0)
        flow.wait(lambda: not flow.layout.checkpoint(Epoch(1)).exists())
    with running(tmp_path) as flow:
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 2


def test_a_failed_snapshot_fails_the_checkpoint_and_not_the_flow(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.sink.prepare_failures.append(ValueError("cannot"))
        with pytest.raises(CheckpointFailedError, match="snapshot of totals failed: ValueError: cannot"):
            flow.checkpoint()
        assert flow.checkpoint() == 2
        assert_each_once(flow.sink.rows())


def test_a_failed_commit_is_tried_again(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.sink.commit_failures.append(OSError("no network"))
        assert flow.checkpoint() == 1
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 2


def test_nobody_waits_for_a_flow_that_stops(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.step(NUMBERS)
        waiting = flow.request(aligned=True)
        flow.wait(lambda: bool(flow.operators[TOTALS].aligning()))
    assert waiting.cancelled()


# ------------------------------------------------------------------------------------------------- fenced


def test_a_coordinator_that_was_overtaken_ends_the_flow(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        other = SqliteMetadata(flow.layout.metadata)
        other.next_generation(flow.recovered.generation)
        other.close()
        flow.request()
        with pytest.raises(FencedError):
            flow.wait(lambda: False)
        assert flow.checkpoints.epochs() == []


def test_an_operator_whose_log_was_written_by_another_ends_the_flow(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        log = flow.operators[NUMBERS].channel
        rival = type(log).open(log.operator, log.folder, log.lineage)
        append_barrier(rival, 99)
        flow.request()
        with pytest.raises(FencedError):
            flow.wait(lambda: False)
