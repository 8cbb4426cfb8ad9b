"""Per-operator mode: every operator is checkpointed by itself and comes back by itself. Without Spark."""

from __future__ import annotations

import os
import random
import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.base.crashpoints import POINTS
from cutline.config.options import ENVIRONMENT_PREFIX
from cutline.errors import ConfigError, DamagedRecordError, FlowFailedError, RecoveryError
from cutline.model.ids import NO_BATCH, Epoch, OperatorId, Position
from cutline.storage.checkpoints import LocalCheckpointStore
from tests.support.killing import is_killed_at
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

MODE: dict[str, Any] = {"mode": "per-operator"}
STORIES = range(int(os.environ.get(f"{ENVIRONMENT_PREFIX}EXPLORE", "12")))


def lose(flow: SparklessFlow, *operators: str) -> None:
    for operator in operators:
        shutil.rmtree(flow.layout.spark_dirs / operator)


def epochs_of(flow: SparklessFlow, operator: str) -> list[int]:
    found = []
    for epoch in flow.checkpoints.epochs():
        with suppress(DamagedRecordError):  # let go of since it was listed
            found.append(flow.checkpoints.load_manifest(epoch))
    return [manifest.epoch for manifest in found if set(manifest.operators) == {operator}]


def test_a_request_takes_a_checkpoint_of_every_operator(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(3)
        assert flow.checkpoint() == 2
        assert [*epochs_of(flow, NUMBERS), *epochs_of(flow, TOTALS)] == [1, 2]
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3


def test_every_operator_has_its_own_interval(tmp_path: Path) -> None:
    own: dict[Any, dict[str, Any]] = {NUMBERS: {"checkpoint_interval": "20ms"}}
    with running(tmp_path, own=own, retain_checkpoints=100, **MODE) as flow:
        flow.emit(2)
        flow.wait(lambda: len(epochs_of(flow, NUMBERS)) >= 3)
        assert epochs_of(flow, TOTALS) == [], "without an interval of its own, as the flow: none"


@pytest.mark.parametrize("lost", [(NUMBERS,), (TOTALS,), (NUMBERS, TOTALS)])
def test_what_has_lost_its_directory_goes_back_alone_and_catches_up(
    tmp_path: Path, lost: tuple[OperatorId, ...]
) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(4)
        flow.checkpoint()
        flow.emit(5)
        ends = {name: flow.operators[name].channel.end for name in (NUMBERS, TOTALS)}
        lose(flow, *lost)
    with running(tmp_path, **MODE) as flow:
        assert flow.recovered.path == "alone"
        assert {name: flow.operators[name].channel.end for name in ends} == ends, "no log goes back"
        for name in lost:
            while flow.query_dirs.last_committed(flow.spark_dir(name)) < flow.operators[name].channel.last_batch:
                assert flow.step(name)
            assert flow.operators[name].replay.repeated_total >= 4
        assert {name: flow.operators[name].channel.end for name in ends} == ends, "what is repeated is dropped"
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 11


@pytest.mark.parametrize("loss", ["truncated", "lost segment"])
@pytest.mark.parametrize("is_running", [False, True])
def test_an_operator_whose_input_is_gone_does_not_go_back_alone(tmp_path: Path, loss: str, is_running: bool) -> None:
    """It would have to read again what it has read since its checkpoint."""
    said = "log begins at" if loss == "truncated" else r"g\d+-b5\.arrow"
    with running(tmp_path, **MODE) as flow:
        flow.emit(4)
        flow.checkpoint()
        flow.emit(3)
        channel = flow.operators[NUMBERS].channel
        entry = channel.data_entries()[-2]
        if loss == "truncated":
            channel.truncate(Position(entry.seq + 1))
        else:
            (Path(channel.segments.place.url) / entry.segments[0].name).unlink()
        published = flow.sink.rows()
        if is_running:
            flow.fail(TOTALS)
            failure = flow.run._lifecycle.failure
            assert failure is not None and re.search(said, str(failure)), failure
        else:
            lose(flow, TOTALS)
    if not is_running:
        with pytest.raises(RecoveryError, match=said):
            SparklessFlow(tmp_path, **MODE)
    assert flow.sink.rows() == published


def test_before_the_first_checkpoint_everything_is_run_again_from_the_beginning(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(3)
        lose(flow, NUMBERS, TOTALS)
    with running(tmp_path, **MODE) as flow:
        assert flow.recovered.path == "alone"
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_batch_of_the_log_is_repeated_as_it_was_planned_then(tmp_path: Path) -> None:
    """Spark would now read in one batch what it had read in three."""
    with running(tmp_path, **MODE) as flow:
        flow.emit(1)
        flow.checkpoint()
        flow.emit(3)
        positions = [entry.positions for entry in flow.operators[TOTALS].channel.data_entries()]
        lose(flow, TOTALS)
    with running(tmp_path, **MODE) as flow:
        for _ in range(3):
            flow.step(TOTALS)
        spark = flow.spark_dir(TOTALS)
        planned = [flow.query_dirs.plan_of(spark, entry.batch) for entry in _repeated(flow)]
        assert planned == [entry.plan for entry in _repeated(flow)]
        assert [entry.positions for entry in _repeated(flow)] == positions[-3:]


def _repeated(flow: SparklessFlow) -> Any:
    return flow.operators[TOTALS].channel.data_entries()[-3:]


def test_a_failed_operator_goes_back_alone_while_all_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(2)
        lose(flow, NUMBERS)
        downstream = flow.operators[TOTALS]
        flow.fail(NUMBERS)
        assert flow.operators[TOTALS] is downstream
        assert flow.operators[NUMBERS].channel is flow.recovered.channels[NUMBERS]
        _catch_up(flow)
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 8
        assert flow.run.status().recovery.counts == {"alone": 1, "fresh": 1}
        assert flow.operators[NUMBERS].credits.is_drained(), "its consumer reports to the new service"
        before = len(flow.sink.rows())
    with running(tmp_path, **MODE) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        flow.drain()
        assert len(flow.sink.rows()) == before + 1
        assert_each_once(flow.sink.rows())


def test_going_back_alone_that_does_not_help_ends_the_flow(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path, **MODE)
    flow.emit(2)
    flow.checkpoint()
    flow.fail(TOTALS)
    flow.fail(TOTALS)
    with pytest.raises(FlowFailedError, match="it fails"):
        flow.run.await_termination(20)


@pytest.mark.parametrize("point", ["restore-dirs-built", "restore-generation"])
def test_killed_while_an_operator_goes_back_alone(tmp_path: Path, point: str) -> None:
    def life() -> None:
        with running(tmp_path, **MODE) as flow:
            flow.emit(4)
            flow.checkpoint()
            flow.emit(3)
            lose(flow, TOTALS)
            flow.fail(TOTALS)

    assert is_killed_at(f"{point}:{TOTALS}", life)
    with running(tmp_path, **MODE) as flow:
        assert flow.recovered.path == ("alone" if point == "restore-dirs-built" else "resume")
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_log_is_truncated_only_when_all_who_touch_it_have_a_snapshot(tmp_path: Path) -> None:
    own: dict[Any, dict[str, Any]] = {NUMBERS: {"checkpoint_interval": "10ms"}}
    with running(tmp_path, own=own, **MODE) as flow:
        for _ in range(6):
            flow.emit(1)
            newest = max(epochs_of(flow, NUMBERS), default=0)
            flow.wait(lambda newest=newest: max(epochs_of(flow, NUMBERS), default=0) > newest)  # type: ignore[misc]
        assert flow.operators[NUMBERS].channel.start == 0
        flow.checkpoint()
        flow.wait(lambda: flow.operators[NUMBERS].channel.start > 0)


def test_records_of_a_pending_epoch_survive_the_collection_of_a_later_one(tmp_path: Path) -> None:
    own: dict[Any, dict[str, Any]] = {NUMBERS: {"checkpoint_interval": "10ms"}}
    with running(tmp_path, own=own, **MODE) as flow:
        flow.step(NUMBERS)
        flow.wait(lambda: flow.step(TOTALS, commit=False))
        pending = flow.request()  # of totals: waits until its batch is committed
        for _ in range(5):
            newest = max(epochs_of(flow, NUMBERS), default=0)
            flow.wait(lambda newest=newest: max(epochs_of(flow, NUMBERS), default=0) > newest)  # type: ignore[misc]
        assert not pending.done()
        flow.step(TOTALS)
        flow.wait(pending.done)
        (epoch,) = epochs_of(flow, TOTALS)
        assert epoch < max(epochs_of(flow, NUMBERS))
        flow.checkpoints.load_record(flow.checkpoints.load_manifest(Epoch(epoch)), TOTALS)


def test_the_way_of_checkpointing_cannot_change(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(1)
    with pytest.raises(RecoveryError, match="per-operator mode, and cannot go on in coordinated mode"):
        SparklessFlow(tmp_path)
    with running(tmp_path / "other") as flow:
        flow.emit(1)
    with pytest.raises(RecoveryError, match="coordinated mode, and cannot go on in per-operator mode"):
        SparklessFlow(tmp_path / "other", **MODE)


def test_there_is_no_epoch_to_take_the_flow_back_to(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(1)
        flow.checkpoint()
    with pytest.raises(RecoveryError, match="no checkpoint covers the whole flow"):
        SparklessFlow(tmp_path, restore_to=Epoch(1), **MODE)


def test_a_damaged_log_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(4)
        flow.checkpoint()
        flow.emit(1)
        newest = max((flow.layout.channel(NUMBERS)).glob("g*/*.json"))
    kept = newest.read_bytes()
    newest.write_bytes(kept[:-3])
    with pytest.raises(RecoveryError, match="the logs and the newest checkpoints must be whole"):
        SparklessFlow(tmp_path, **MODE)
    newest.write_bytes(kept)
    with running(tmp_path, **MODE) as flow:
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_checkpoint_that_cannot_be_read_is_refused_if_it_may_be_the_newest(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(2)
        flow.checkpoint()
        path = flow.layout.manifest(Epoch(2))
    path.write_bytes(b"{}")
    with pytest.raises(RecoveryError, match="epoch 2"):
        SparklessFlow(tmp_path, **MODE)


@pytest.mark.parametrize(
    ("settings", "own", "message"),
    [
        (MODE, {TOTALS: {"mode": "aligned"}}, "have no meaning in per-operator mode"),
        ({}, {TOTALS: {"checkpoint_interval": "1s"}}, "checkpoint_interval of an operator is for per-operator mode"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path: Path, settings: Any, own: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparklessFlow(tmp_path, own=own, **settings)


def test_a_checkpoint_of_another_mode_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow, pytest.raises(ConfigError, match="does not go with"):
        flow.run.trigger_checkpoint(mode="aligned")


# ------------------------------------------------------------------------------------------- what a review has found


def test_input_stays_for_one_who_repeats_from_further_back_than_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, retain_checkpoints=2, **MODE) as flow:
        flow.emit(4)
        flow.checkpoint()
        flow.emit(3)
        lose(flow, TOTALS)
    own: dict[Any, dict[str, Any]] = {NUMBERS: {"checkpoint_interval": "10ms"}}
    rotten = {2: ["rotten"]}  # the one checkpoint of ``totals``
    monkeypatch.setattr(LocalCheckpointStore, "damage", lambda _, record: rotten.get(record.epoch, []))
    for batches in (2, 7):
        with running(tmp_path, own=own, retain_checkpoints=2, **MODE) as flow:
            assert flow.recovered.path == ("alone" if batches == 2 else "resume")
            newest = max(epochs_of(flow, NUMBERS), default=0)
            flow.wait(lambda newest=newest: min(epochs_of(flow, NUMBERS), default=0) > newest)  # type: ignore[misc]
            while flow.query_dirs.last_committed(flow.spark_dir(TOTALS)) < batches - 1:
                assert flow.step(TOTALS)
    with running(tmp_path, **MODE) as flow:
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_an_idle_operator_that_has_caught_up_holds_no_entries(tmp_path: Path) -> None:
    """It was stopped between append and commit, runs that batch again, and then its input is idle."""
    flow = SparklessFlow(tmp_path, retain_checkpoints=1, **MODE)
    flow.emit(3)
    flow.checkpoint()
    flow.step(NUMBERS)
    flow.wait(lambda: flow.step(TOTALS, commit=False))
    flow.stop()
    with running(tmp_path, retain_checkpoints=1, **MODE) as flow:
        channel = flow.operators[TOTALS].channel
        assert flow.query_dirs.last_committed(flow.spark_dir(TOTALS)) == channel.last_batch, "it has caught up"
        flow.checkpoint()
        flow.checkpoint()
        flow.wait(lambda: channel.start == channel.end - 1)


def test_what_was_repeated_is_not_repeated_again_after_a_stop(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(6)
        lose(flow, TOTALS)
    with running(tmp_path, **MODE) as flow:
        while flow.query_dirs.last_committed(flow.spark_dir(TOTALS)) < 6:
            assert flow.step(TOTALS)
    with running(tmp_path, **MODE) as flow:
        assert flow.recovered.path == "resume"
        assert flow.query_dirs.last_committed(flow.spark_dir(TOTALS)) >= 6
        _catch_up(flow)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_manifest_of_another_history_decides_nothing(tmp_path: Path) -> None:
    """A life that was thought dead has completed an epoch in its own logs."""
    with running(tmp_path, retain_checkpoints=3, **MODE) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(4)
        manifest = flow.checkpoints.load_manifest(Epoch(2))
        cut, last = manifest.operators[TOTALS], flow.operators[TOTALS].channel.last_batch
        foreign = msgspec.structs.replace(
            manifest,
            epoch=Epoch(30),
            operators={TOTALS: msgspec.structs.replace(cut, batch=last, barrier=Position(cut.barrier + 50))},
            channels={TOTALS: msgspec.structs.replace(manifest.channels[TOTALS], barrier=Position(cut.barrier + 50))},
        )
        records = flow.layout.checkpoint(Epoch(2))
        shutil.copytree(records, flow.layout.checkpoint(Epoch(30)), ignore=shutil.ignore_patterns("manifest.json"))
    with running(tmp_path, retain_checkpoints=3, **MODE) as flow:
        flow.checkpoints.store_manifest(foreign)
        lose(flow, TOTALS)
        flow.fail(TOTALS)
        _catch_up(flow)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 8


def test_a_damaged_checkpoint_that_nobody_needs_bars_nothing(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=3, **MODE) as flow:
        for _ in range(2):
            flow.emit(1)
            flow.checkpoint()
        flow.layout.manifest(Epoch(1)).write_bytes(b"{}")
    with running(tmp_path, retain_checkpoints=3, **MODE) as flow:
        lose(flow, TOTALS)
        flow.fail(TOTALS)
        _catch_up(flow)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_batches_of_each_operator_count_towards_its_own_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_every_batches=3, **MODE) as flow:
        flow.emit(4)
        flow.wait(lambda: bool(epochs_of(flow, NUMBERS)) and bool(epochs_of(flow, TOTALS)))


def test_one_that_caught_up_and_fails_again_may_go_back_again_but_not_for_ever(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path, **MODE)
    flow.emit(2)
    flow.checkpoint()
    flow.emit(3)
    for _ in range(4):
        lose(flow, TOTALS)
        flow.fail(TOTALS)
        _catch_up(flow)
    lose(flow, TOTALS)
    flow.fail(TOTALS)
    with pytest.raises(FlowFailedError, match="it fails"):
        flow.run.await_termination(20)


def test_services_that_are_gone_listen_no_more(tmp_path: Path) -> None:
    with running(tmp_path, **MODE) as flow:
        flow.emit(2)
        flow.checkpoint()
        before = len(flow.operators[NUMBERS].channel._listeners)
        flow.emit(1)
        lose(flow, NUMBERS)
        flow.fail(NUMBERS)
        assert len(flow.operators[NUMBERS].channel._listeners) == before


# ------------------------------------------------------------------------------------------- random lives


def live(storage: Path, seed: int) -> None:
    """One life: a random run, cut short by the kill or ending by itself."""
    chance = random.Random(seed)
    settings: dict[str, Any] = {
        "retain_checkpoints": chance.choice([1, 2]),
        "max_concurrent_checkpoints": chance.choice([1, 2]),
    }
    flow = SparklessFlow(storage, channel_capacity_entries=1_000, **settings, **MODE)
    try:
        for _ in range(chance.randint(3, 25)):
            match chance.choice(["number", "number", "count", "count", "publish", "fail"]):
                case "number":
                    flow.step(NUMBERS)
                case "count":
                    flow.step(TOTALS)
                case "publish":
                    _catch_up(flow)
                    flow.checkpoint()
                case _:
                    operator = chance.choice([NUMBERS, TOTALS])
                    if flow.operators[operator].batches_total:
                        shutil.rmtree(flow.spark_dir(operator))
                        flow.fail(operator)
    finally:
        flow.stop()


def _catch_up(flow: SparklessFlow) -> None:
    """What went back alone has repeated its log."""
    for name in (NUMBERS, TOTALS):
        while flow.query_dirs.last_committed(flow.spark_dir(name)) < flow.operators[name].channel.last_batch:
            assert flow.step(name)


@pytest.mark.parametrize("seed", STORIES)
def test_whatever_happens_each_number_is_published_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 5)):
        point = f"{chance.choice(POINTS)}#{chance.choice([1, 1, 2, 3, 5])}"
        is_killed_at(point, partial(live, tmp_path, chance.randint(0, 10**6)))
        lost = chance.choice([(), (), ("numbers",), ("totals",), ("numbers", "totals")])
        for operator in lost:
            shutil.rmtree(tmp_path / "storage/counting/spark" / operator, ignore_errors=True)
    with running(tmp_path, **MODE) as flow:
        _catch_up(flow)
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert flow.operators[NUMBERS].channel.last_batch > NO_BATCH
