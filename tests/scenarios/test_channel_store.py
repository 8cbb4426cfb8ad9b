"""Rows between operators in an object store: found by executors anywhere, copied, moved, let go of, never lost."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cutline.base.clock import now_ms
from cutline.base.retry import Retry
from cutline.channels.segment_store import PLACE_FILE, SegmentStore, whereabouts
from cutline.errors import ConfigError, NotDone, OutcomeUnknown, RecoveryError
from cutline.maintenance.gc_live import LiveCollection
from cutline.model.ids import Epoch, Position
from cutline.objects import open_store
from tests.support.killing import is_killed_at
from tests.support.remote import Faults, copied, lose_host, remote
from tests.support.running import assert_each_once, running
from tests.support.spark_dirs import content_of
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow


def stored(tmp_path: Path) -> dict[str, Any]:
    return {"channel_store": (tmp_path / "bucket").as_uri(), "retain_checkpoints": 3}


def home(flow: SparklessFlow) -> Path:
    return Path(whereabouts(flow.layout.channels).place.url.removeprefix("file://"))


def segments_here(flow: SparklessFlow) -> list[str]:
    return [path.name for path in (flow.layout.channel(NUMBERS) / "data").iterdir()]


def segments_there(flow: SparklessFlow) -> set[str]:
    return {path.name for path in (home(flow) / NUMBERS).glob("*.arrow")}


def named(flow: SparklessFlow) -> set[str]:
    log = flow.operators[NUMBERS].channel
    return {segment.name for entry in log.data_entries() for segment in entry.segments}


def test_rows_are_written_there_and_read_from_there_and_go_with_their_entries(tmp_path: Path) -> None:
    with running(tmp_path, **{**stored(tmp_path), "retain_checkpoints": 1}) as flow:
        flow.emit(5)
        assert segments_here(flow) == []
        assert segments_there(flow) == named(flow) != set()
        flow.drain()
        flow.emit(1)
        flow.drain()
        flow.wait(lambda: segments_there(flow) == named(flow) and len(named(flow)) < 5)
        assert_each_once(flow.sink.rows())
    with running(tmp_path, **stored(tmp_path)) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        flow.drain()
        assert len(flow.sink.rows()) == 7
        assert_each_once(flow.sink.rows())


def test_a_flow_moves_its_rows_when_the_place_is_changed(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"retain_checkpoints": 3},
        stored(tmp_path),
        {**stored(tmp_path), "channel_store": (tmp_path / "other").as_uri()},
        {"retain_checkpoints": 3},
    ]
    homes = []
    for setting in settings:
        with running(tmp_path, **setting) as flow:
            flow.emit(1)
            flow.checkpoint()
            for _ in range(2):
                flow.step(NUMBERS)
            homes.append(home(flow))
            assert not whereabouts(flow.layout.channels).before
    assert not [path for place in homes if place.name for path in place.rglob("*.arrow")]
    with running(tmp_path, **settings[-1]) as flow:
        assert flow.recovered.path == "resume"
        flow.drain()
        assert len(flow.sink.rows()) == 12
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize("point", ["restore-generation", "after-append", "after-stage"])
def test_killed_while_rows_are_moved(tmp_path: Path, point: str) -> None:
    with running(tmp_path, retain_checkpoints=3) as flow:
        flow.emit(2)
        flow.checkpoint()
        for _ in range(3):
            flow.step(NUMBERS)

    def go_on() -> None:
        with running(tmp_path, **stored(tmp_path)) as flow:
            flow.emit(1)

    assert is_killed_at(point, go_on)
    with running(tmp_path, **stored(tmp_path)) as flow:
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert segments_there(flow) == named(flow)


def test_a_lost_host_gets_a_place_of_its_own(tmp_path: Path) -> None:
    """Whoever was replaced and does not know it deletes only what is its own."""
    settings = {**stored(tmp_path), **remote(tmp_path)}
    with running(tmp_path, **settings) as flow:
        flow.emit(2)
        for _ in range(3):
            flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        copied(flow, future.result())
        old = home(flow)
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "remote"
        assert home(flow) != old
        shutil.rmtree(old)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5


def test_a_savepoint_holds_the_rows_itself(tmp_path: Path) -> None:
    with running(tmp_path, **stored(tmp_path)) as flow:
        flow.emit(2)
        for _ in range(3):
            flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        epoch = future.result()
        flow.run._parts.stores.savepoints.create("keep", flow.checkpoints.load_manifest(epoch), is_drained=False)
        flow.emit(2)
        for _ in range(4):
            flow.checkpoint()
        flow.wait(lambda: flow.operators[NUMBERS].channel.start > Position(4))
    with running(tmp_path, **stored(tmp_path), restore_to="keep") as flow:
        assert flow.recovered.restored_epoch == epoch
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5


@pytest.mark.parametrize("harm", ["delete", "cut", "flip"])
def test_damaged_rows_are_found_and_never_restored(tmp_path: Path, harm: str) -> None:
    settings = {**stored(tmp_path), **remote(tmp_path), "retain_checkpoints": 3}
    with running(tmp_path, **settings) as flow:
        flow.emit(2)
        for _ in range(3):
            flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        copied(flow, future.result())
        shutil.rmtree(flow.layout.channel(NUMBERS) / "data")
        segment = flow.operators[NUMBERS].channel.data_entries()[-1].segments[0]
        store = SegmentStore.of(flow.layout.channel(NUMBERS))
        assert store.problem(segment, deep=True) is None
        path = home(flow) / NUMBERS / segment.name
        content = path.read_bytes()
        path.unlink()
        if harm != "delete":
            path.write_bytes(content[:-1] if harm == "cut" else content[:-1] + b"?")
        assert store.problem(segment, deep=True) is not None
    shutil.rmtree(flow.layout.spark_checkpoint_dir(TOTALS, flow.recovered.spark_dirs[TOTALS]))
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "remote"
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5


def test_a_store_that_is_away_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.objects.waiting.STORE_RETRY", Retry(deadline_s=60.0))
    with running(tmp_path, **stored(tmp_path)) as flow:
        flow.emit(2)
        for _ in range(2):
            flow.step(NUMBERS)
    tries: list[str] = []

    def fail(operation: str, path: str) -> Exception | None:
        tries.append(operation)
        return NotDone("away") if len(tries) < 4 else None

    faults = Faults()
    with faults.injected("cutline.channels.segment_store.open_store"):
        faults.failing = fail
        with running(tmp_path, **stored(tmp_path)) as flow:
            assert flow.recovered.path == "resume"
            flow.drain()
            assert_each_once(flow.sink.rows())
    assert len(tries) >= 4


def with_rows_in_flight(tmp_path: Path, **settings: Any) -> Epoch:
    """Two checkpoints; the newest has rows in flight, which a restore reads. Spark's directories are lost."""
    with running(tmp_path, **settings) as flow:
        flow.emit(2)
        flow.checkpoint()
        for _ in range(3):
            flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
    shutil.rmtree(flow.layout.spark_dirs)
    return future.result()


def test_a_store_that_is_away_while_a_checkpoint_is_restored_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint must not be restored instead: sinks would be rewound for nothing."""
    monkeypatch.setattr("cutline.objects.waiting.STORE_RETRY", Retry(deadline_s=60.0))
    last = with_rows_in_flight(tmp_path, **stored(tmp_path))
    away = [NotDone("away"), OutcomeUnknown("no answer"), NotDone("away")]
    faults = Faults()
    faults.failing = lambda operation, _: away.pop() if operation == "read" and away else None
    with (
        faults.injected("cutline.channels.segment_store.open_store"),
        running(tmp_path, **stored(tmp_path)) as flow,
    ):
        assert not away
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("local", last)
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize("mode", ["unaligned", "per-operator"])
def test_a_store_that_stays_away_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Neither while a checkpoint is restored nor while the flow looks whether it can continue."""
    monkeypatch.setattr("cutline.objects.waiting.STORE_RETRY", Retry(limit=2))
    settings = {**stored(tmp_path), "mode": mode}
    with_rows_in_flight(tmp_path, **settings)
    rows = content_of(tmp_path / "table")
    faults = Faults()
    faults.failing = lambda operation, _: NotDone("away") if operation == "read" else None
    with (
        faults.injected("cutline.channels.segment_store.open_store"),
        pytest.raises(RecoveryError, match=r"unknown.*make the channel store reachable; nothing has been changed"),
    ):
        SparklessFlow(tmp_path, **settings)
    assert content_of(tmp_path / "table") == rows
    with running(tmp_path, **settings) as flow:
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_rows_that_no_entry_names_are_collected(tmp_path: Path) -> None:
    with running(tmp_path, **stored(tmp_path)) as flow:
        flow.emit(2)
        orphan = home(flow) / NUMBERS / "orphan.arrow"
        orphan.write_bytes(b"of a task that died")
        os.utime(orphan, (time.time() - 10, time.time() - 10))  # the process counts time by another clock than the disk
        collection = LiveCollection(
            flow.layout,
            flow.run._parts.background.janitor,
            None,
            metadata=flow.metadata,
            generations=flow.generations,
            started_ms=now_ms(),
            channels=flow.recovered.channels,
            live_needs=list,
        )
        found = collection.collect(0)["findings"]
        orphans = [one["path"] for one in found if one["tier"] == "channel store"]
        assert orphans == ["channels/numbers/data/orphan.arrow"]
        assert segments_there(flow) == named(flow)


@pytest.mark.parametrize("place", ["memory://rows", "some/folder", "ftp://host/rows"])
def test_a_place_that_executors_could_not_reach_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="channel_store"):
        SparklessFlow(tmp_path, channel_store=place)


def test_secrets_are_not_written_down(tmp_path: Path) -> None:
    options = {"endpoint": "http://127.0.0.1:1", "secret_access_key": "tell nobody"}
    with pytest.raises(ConfigError, match="environment") as refused:
        SparklessFlow(tmp_path, channel_store="s3://bucket/rows", remote_options=options)
    assert "tell nobody" not in str(refused.value)


def test_without_the_option_there_is_no_file(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        assert not (flow.layout.channels / PLACE_FILE).exists()
        assert open_store(str(flow.layout.channel(NUMBERS) / "data")).find(next(iter(named(flow)))) is not None
