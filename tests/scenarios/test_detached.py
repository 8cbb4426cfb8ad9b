"""Old checkpoints stay restorable though the logs have moved on, and a killed restore leaves no trace in the logs."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutline.channels.in_flight import entry_paths
from cutline.cli.flows_here import FlowHere
from cutline.cli.history.past import past_of
from cutline.config.options import build_options
from cutline.errors import ConfigError, RecoveryError
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.storage.detached import DetachedLogs
from tests.support.busy import damage_in, gc_in, run_gc
from tests.support.killing import is_killed_at
from tests.support.remote import copied, lose_host, replica_of
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

HISTORY: dict[str, Any] = {"retain": "1h", "retain_checkpoints": 1}


def checkpoint_with_rows_in_flight(flow: SparklessFlow) -> Epoch:
    """One row read and one in flight."""
    flow.step(NUMBERS)
    flow.step(TOTALS)
    flow.step(NUMBERS)
    flow.step(NUMBERS)
    future = flow.request()  # nobody reads on
    flow.wait(future.done)
    flow.wait(flow.coordinator.is_settled)
    return future.result(0)


def history(storage: Path, count: int = 4, **options: Any) -> list[Epoch]:
    """A flow that has run and stopped; its checkpoints, of which all but the newest are detached."""
    with running(storage, **{**HISTORY, **options}) as flow:
        epochs = [checkpoint_with_rows_in_flight(flow) for _ in range(count)]
        flow.drain()
        epochs.append(flow.checkpoint())
        detached = DetachedLogs(flow.layout)
        flow.wait(lambda: all(map(detached.has, epochs[:-1])))
        flow.wait(lambda: flow.run._parts.workers.operators[NUMBERS].channel.start > 3 * count - 3)
    return epochs


def has_more(flow: SparklessFlow, than: int) -> bool:
    return len(flow.checkpoints.epochs()) > than


def test_checkpoints_says_that_rows_in_flight_are_gone(tmp_path: Path) -> None:
    epochs = history(tmp_path)
    shutil.rmtree(flow_layout(tmp_path).detached_epoch(epochs[1]))
    here = FlowHere(layout=flow_layout(tmp_path), options=build_options({}, HISTORY))
    told = {one.epoch: one.why_not for one in past_of(here, asks=False).epochs}
    assert [epoch for epoch, why_not in told.items() if why_not] == [epochs[1]]
    assert "rows in flight" in told[epochs[1]][0]
    with pytest.raises(RecoveryError, match=f"epoch {epochs[1]} cannot be restored"):
        SparklessFlow(tmp_path, restore_to=epochs[1], **HISTORY)


def test_records_of_another_host_stay_only_until_they_are_published(tmp_path: Path) -> None:
    """Nothing can be restored from them, however long retention keeps what can."""
    settings = {**HISTORY, "remote": str(tmp_path / "remote"), "remote_grace": 0, "replicate_interval": 0}
    with running(tmp_path, **settings) as flow:
        flow.emit(1)
        flow.drain()
        flow.sink.commit_failures += [OSError("the table is away")] * 1_000
        for _ in range(2):
            flow.emit(1)
            flow.step(TOTALS)
            complete = len(flow.checkpoints.epochs())
            flow.request()
            flow.wait(partial(has_more, flow, complete))
            copied(flow, flow.checkpoints.epochs()[-1])
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "remote"
        records = [one.epoch for one in flow.recovered.manifests][:-1]
        assert records
        flow.emit(1)
        flow.drain()
        flow.checkpoint()
        assert_each_once(flow.sink.rows())
        flow.wait(lambda: not set(records) & set(flow.checkpoints.epochs()))
        assert damage_in(flow.layout) == []


def flow_layout(storage: Path) -> Layout:
    return Layout(storage / "storage", "counting")


def test_every_old_checkpoint_can_be_restored_though_the_logs_are_released(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    epochs = history(storage)
    assert damage_in(flow_layout(storage)) == []
    for number, epoch in enumerate(epochs[:-1]):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(storage, copy)
        with running(copy, restore_to=epoch, **HISTORY) as flow:
            assert flow.recovered.path == "local" and flow.recovered.restored_epoch == epoch
            flow.emit(1)
            flow.drain()
            flow.checkpoint()
            flow.wait(flow.coordinator.is_settled)
        assert_each_once(flow.sink.rows())
        with running(copy, **HISTORY) as flow:
            assert flow.recovered.path == "resume"


@pytest.mark.parametrize("point", [f"{point}{which}" for point in ("detached", "put-back") for which in ("", "#2")])
def test_killed_while_detaching_or_going_back(tmp_path: Path, point: str) -> None:
    storage = tmp_path / "storage"
    if point.startswith("detached"):
        assert is_killed_at(point, lambda: history(storage))
        with running(storage, **HISTORY) as flow:
            assert flow.recovered.path == "resume"
            flow.drain()
            assert_each_once(flow.sink.rows())
        return
    epochs = history(storage)
    assert is_killed_at(point, lambda: SparklessFlow(storage, restore_to=epochs[1], **HISTORY))
    with running(storage, **HISTORY) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(2)
        flow.drain()
        flow.checkpoint()
    assert_each_once(flow.sink.rows())
    assert damage_in(flow_layout(storage)) == []


def test_collecting_by_hand_keeps_what_detached_checkpoints_need(tmp_path: Path) -> None:
    epochs = history(tmp_path)
    run_gc(tmp_path)
    with running(tmp_path, restore_to=epochs[0], **HISTORY) as flow:
        assert flow.recovered.restored_epoch == epochs[0]
        flow.drain()
    assert_each_once(flow.sink.rows())


# ---------------------------------------------------------------------- savepoints and the remote tier


def saved(storage: Path) -> None:
    """A flow that has run on since a savepoint with rows in flight, and has stopped after its last checkpoint."""
    with running(storage) as flow:
        checkpoint_with_rows_in_flight(flow)
        flow.run.savepoint("before", drain=False)
        for _ in range(4):
            flow.emit(3)
            flow.checkpoint()
        flow.wait(lambda: flow.operators[NUMBERS].channel.start > 12)
        flow.emit(2)


@pytest.mark.parametrize("point", ["downloaded-aside", "put-back", "restore-dirs-built"])
def test_a_killed_restore_of_a_savepoint_leaves_the_logs_as_they_were(tmp_path: Path, point: str) -> None:
    saved(tmp_path)
    assert is_killed_at(point, lambda: SparklessFlow(tmp_path, restore_to="before"))
    for _ in range(2):
        with running(tmp_path) as flow:
            assert flow.recovered.path == "resume"
            flow.emit(1)
            flow.drain()
        assert_each_once(flow.sink.rows())
    assert damage_in(flow_layout(tmp_path)) == []
    with running(tmp_path, restore_to="before") as flow:
        flow.emit(1)
        flow.drain()
    assert_each_once(flow.sink.rows())


def test_a_killed_restore_of_a_savepoint_leaves_no_checkpoint_without_content(tmp_path: Path) -> None:
    saved(tmp_path)
    assert is_killed_at("downloaded-aside", lambda: SparklessFlow(tmp_path, restore_to="before"))
    with running(tmp_path, **HISTORY) as flow:
        flow.emit(1)
        flow.drain()
        assert 2 not in flow.coordinator.retained()
    assert damage_in(flow_layout(tmp_path)) == []


def test_a_refused_restore_of_a_savepoint_leaves_the_logs_as_they_were(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises((ConfigError, RecoveryError)):
        SparklessFlow(tmp_path, restore_to="before", on_rollback="fail")
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"


def test_a_restore_killed_after_it_was_entered_and_then_one_of_a_savepoint(tmp_path: Path) -> None:
    """What the first has put back belongs to the logs by then."""
    saved(tmp_path)
    assert is_killed_at("restore-generation", lambda: SparklessFlow(tmp_path, restore_to="before"))
    with pytest.raises((ConfigError, RecoveryError)):
        SparklessFlow(tmp_path, restore_to="before", on_rollback="fail")
    with running(tmp_path) as flow:
        assert flow.recovered.problems == ["sink table has published epoch 6, the newest readable checkpoint is 2"]
        flow.emit(1)
        flow.drain()
    assert_each_once(flow.sink.rows())


def in_both_tiers(storage: Path, count: int = 4) -> tuple[list[Epoch], dict[str, Any]]:
    settings = {**HISTORY, "remote": str(storage / "remote"), "remote_grace": 0, "replicate_interval": 0}
    with running(storage, **settings) as flow:
        epochs = []
        for _ in range(count):
            epochs.append(checkpoint_with_rows_in_flight(flow))
            copied(flow, epochs[-1])
        flow.drain()
        epochs.append(flow.checkpoint())
        copied(flow, epochs[-1])
        flow.wait(lambda: all(map(DetachedLogs(flow.layout).has, epochs[:-1])))
        flow.wait(lambda: flow.operators[NUMBERS].channel.start > 3 * count - 3)
        gc_in(flow)
        assert {*epochs} <= {*replica_of(flow, storage).checkpoints.epochs()}
    return epochs, settings


def test_a_host_that_takes_over_keeps_the_history_in_the_remote_tier(tmp_path: Path) -> None:
    epochs, settings = in_both_tiers(tmp_path)
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "remote"
        flow.emit(2)
        flow.drain()
        copied(flow, flow.checkpoint())
        gc_in(flow)
        assert {*epochs} <= {*replica_of(flow, tmp_path).checkpoints.epochs()}
    run_gc(tmp_path, retain=settings["retain"])
    lose_host(tmp_path)
    with running(tmp_path, restore_to=epochs[1], **settings) as flow:
        assert flow.recovered.restored_epoch == epochs[1]
        flow.emit(1)
        flow.drain()
    assert_each_once(flow.sink.rows())


def test_an_empty_host_that_goes_far_back_keeps_no_checkpoint_that_it_does_not_have(tmp_path: Path) -> None:
    epochs, settings = in_both_tiers(tmp_path)
    lose_host(tmp_path)
    with running(tmp_path, restore_to=epochs[2], **settings) as flow:
        assert flow.recovered.restored_epoch == epochs[2]
        for _ in range(3):
            flow.emit(2)
            flow.drain()
        assert not flow.coordinator.retained() & {*epochs[:2]}
        flow.wait(lambda: flow.operators[NUMBERS].channel.start > 3 * len(epochs))
    assert_each_once(flow.sink.rows())
    assert damage_in(flow_layout(tmp_path)) == []


@pytest.mark.parametrize("pattern", ["*.arrow", "*.json"])
def test_what_was_lost_of_an_old_checkpoint_is_downloaded(tmp_path: Path, pattern: str) -> None:
    epochs, settings = in_both_tiers(tmp_path)
    victim = sorted((flow_layout(tmp_path).detached_epoch(epochs[1]) / "channels" / NUMBERS).rglob(pattern))[0]
    victim.unlink()
    with running(tmp_path, restore_to=epochs[1], **settings) as flow:
        assert flow.recovered.restored_epoch == epochs[1]
        flow.emit(1)
        flow.drain()
    assert_each_once(flow.sink.rows())


def test_logs_are_not_kept_for_a_checkpoint_that_they_cannot_restore(tmp_path: Path) -> None:
    """The first entry that it had in flight is gone."""
    with running(tmp_path, **{**HISTORY, "retain_checkpoints": 9}) as flow:
        epochs = [checkpoint_with_rows_in_flight(flow) for _ in range(3)]
        in_flight = entry_paths(flow.checkpoints.load_manifest(epochs[0]), flow.layout, [NUMBERS])
        last = next(in_flight)
    for path in sorted(last.parent.iterdir()):
        if path <= last:
            path.unlink()
    with running(tmp_path, **HISTORY) as flow:
        flow.emit(2)
        flow.drain()
        assert not DetachedLogs(flow.layout).has(epochs[0])
        flow.wait(lambda: flow.operators[NUMBERS].channel.start > 9)
