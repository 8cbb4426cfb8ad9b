"""A flow with a remote tier, on real storage without Spark: copies, loss of the host, faults of the store."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from cutline.base.crashpoints import POINTS, REMOTE_POINTS
from cutline.base.retry import Retry
from cutline.channels import entry_files as codec
from cutline.errors import ConfigError, FencedError, NotDone, OutcomeUnknown, RecoveryError
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.objects import open_store
from cutline.tiers.checkpoint_files import content_paths, names_in
from tests.support.killing import is_killed_at
from tests.support.remote import Faults, copied, lose_host, remote, replica_of
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow


def test_the_newest_checkpoint_follows_to_the_remote_tier_and_only_what_is_new_is_sent(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(3)
        copied(flow, flow.checkpoint())
        first = flow.remote_status()
        flow.emit(1)
        copied(flow, flow.checkpoint())
        second = flow.remote_status()
        assert replica_of(flow, tmp_path).checkpoints.epochs() == [1, 2]
        assert (second.epoch, second.behind, second.problem) == (2, 0, "")
        assert 0 < second.files - first.files < first.files


@pytest.mark.parametrize("durable", ["local", "remote"])
def test_a_lost_host_comes_back_from_the_remote_tier(tmp_path: Path, durable: str) -> None:
    settings = {**remote(tmp_path), "durable": durable}
    with running(tmp_path, **settings) as flow:
        flow.emit(4)
        copied(flow, flow.checkpoint())
        flow.emit(2)
        flow.step(NUMBERS)
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 1)
        assert flow.run.status().recovery.counts == {"remote": 1}
        flow.emit(3)
        epoch = flow.checkpoint()
        assert epoch > 1000, "the lost host may have used numbers that nobody else has heard of"
        flow.drain()
        assert_each_once(flow.sink.rows())
        copied(flow, epoch)
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "resume"


def test_what_was_published_after_the_copy_is_taken_back_and_published_again(tmp_path: Path) -> None:
    settings = {**remote(tmp_path), "replicate_interval": "1h"}
    with running(tmp_path, **settings) as flow:
        flow.emit(3)
        copied(flow, flow.checkpoint())
        flow.emit(3)
        flow.checkpoint()
        assert len(flow.sink.rows()) == 6
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert len(flow.sink.rows()) == 3
        flow.emit(4)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 7


def test_what_is_in_flight_is_copied_too(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(2)
        for _ in range(3):
            flow.step(NUMBERS)  # nobody reads it
        future = flow.request()
        flow.wait(future.done)
        copied(flow, future.result())
        assert flow.checkpoints.load_manifest(Epoch(1)).channels[NUMBERS].in_flight[TOTALS].rows == 3
    lose_host(tmp_path)
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.path == "remote"
        flow.wait(lambda: flow.step(TOTALS))
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5


def test_damage_that_the_local_tier_cannot_make_good_is_made_good_from_the_remote_one(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(4)
        copied(flow, flow.checkpoint())
    root = tmp_path / "storage" / "counting"
    shutil.rmtree(root / "spark")
    for blob in root.glob("blobs/*/*"):
        blob.write_bytes(b"rotten")
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.path == "remote"
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_damaged_remote_checkpoint_is_skipped_and_an_older_one_taken(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        for _ in range(2):
            flow.emit(2)
            copied(flow, flow.checkpoint())
        newest = flow.checkpoints.load_record(flow.checkpoints.load_manifest(Epoch(2)), TOTALS)
        older = flow.checkpoints.load_record(flow.checkpoints.load_manifest(Epoch(1)), TOTALS)
        only = {file.sha256 for file in newest.files()} - {file.sha256 for file in older.files()}
    for digest in only:
        for blob in (tmp_path / "remote").glob(f"counting/blobs/*/{digest}*"):
            blob.write_bytes(b"rotten")
    lose_host(tmp_path)
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 1)
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_durable_there_first_nothing_is_complete_or_published_without_it(tmp_path: Path) -> None:
    faults = Faults()
    with faults.injected(), running(tmp_path, **remote(tmp_path), durable="remote", checkpoint_timeout="2s") as flow:
        flow.emit(2)
        faults.failing = lambda *_: NotDone("the bucket is away")
        future = flow.request()
        flow.wait(future.done)
        assert "the bucket is away" in str(future.exception())
        assert flow.sink.rows() == [] and flow.checkpoints.epochs() == []
        faults.failing = None
        flow.checkpoint()
        assert replica_of(flow, tmp_path).checkpoints.epochs() == flow.checkpoints.epochs() == [2]
        assert len(flow.sink.rows()) == 2


def test_a_seal_of_unknown_outcome_is_asked_for_until_it_is_known(tmp_path: Path) -> None:
    faults = Faults()
    with faults.injected(), running(tmp_path, **remote(tmp_path), durable="remote") as flow:
        flow.emit(2)
        times = iter(range(2))

        def vanish(operation: str, path: str) -> Exception | None:
            is_manifest = operation == "create" and path.endswith("manifest.json")
            return OutcomeUnknown("no answer") if is_manifest and next(times, None) is not None else None

        faults.failing_after = vanish
        flow.checkpoint()
        assert flow.checkpoints.epochs() == [1]
        assert_each_once(flow.sink.rows())


def test_in_hybrid_mode_a_remote_tier_that_is_away_holds_nothing_up(tmp_path: Path) -> None:
    faults = Faults()
    with faults.injected(), running(tmp_path, **remote(tmp_path)) as flow:
        faults.failing = lambda *_: NotDone("the bucket is away")
        for _ in range(3):
            flow.emit(1)
            flow.checkpoint()
        assert len(flow.sink.rows()) == 3
        flow.wait(lambda: flow.remote_status().problem != "")
        faults.failing = None
        copied(flow, 3)
        assert replica_of(flow, tmp_path).checkpoints.epochs()[-1] == 3


def test_a_host_that_was_thought_dead_stops_when_another_has_taken_over(tmp_path: Path) -> None:
    old = SparklessFlow(tmp_path, **remote(tmp_path))
    try:
        old.emit(2)
        copied(old, old.checkpoint())
        (tmp_path / "storage").rename(tmp_path / "other host")
        with running(tmp_path, **remote(tmp_path)) as new:
            assert new.recovered.path == "remote"
            new.emit(1)
            copied(new, new.checkpoint())
            before = replica_of(new, tmp_path).checkpoints.epochs()
            old.run._parts.background.replicator.completed(Epoch(99))  # type: ignore[union-attr]
            with pytest.raises(FencedError):
                replica_of(old, tmp_path).fence.check_fence(old.recovered.generation)
            assert replica_of(new, tmp_path).checkpoints.epochs() == before
    finally:
        old.stop()


def test_a_first_start_without_the_remote_tier_is_refused_rather_than_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.objects.waiting.STORE_RETRY", Retry(limit=1))
    faults = Faults()
    faults.failing = lambda *_: NotDone("the bucket is away")
    with faults.injected(), pytest.raises(RecoveryError, match="whether the remote tier has any is unknown"):
        SparklessFlow(tmp_path, **remote(tmp_path))


def test_a_bucket_that_is_away_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.objects.waiting.STORE_RETRY", Retry(deadline_s=60.0))
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(2)
        copied(flow, flow.checkpoint())
    lose_host(tmp_path)
    faults, times = Faults(), iter(range(40))
    faults.failing = lambda *_: NotDone("away") if next(times, None) is not None else None
    with faults.injected(), running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.path == "remote"


def test_old_checkpoints_and_what_only_they_need_leave_the_remote_tier(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path), remote_grace=0) as flow:
        for _ in range(5):
            flow.emit(2)
            copied(flow, flow.checkpoint())
        flow.wait(flow.coordinator.is_settled)
        flow.run._parts.background.replicator.collect()  # type: ignore[union-attr]
        replica = replica_of(flow, tmp_path)
        assert replica.checkpoints.epochs() == [4, 5]
        needed = {
            name
            for epoch in (4, 5)
            for name in names_in(replica.store, replica.checkpoints.load_manifest(Epoch(epoch)), flow.layout)
        }
        there = {info.path.removesuffix(".zst") for info in replica.store.walk()}
        assert needed <= there
        assert {name for name in there if name.startswith(("blobs/", "channels/"))} <= needed
    lose_host(tmp_path)
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.restored_epoch == 5


def test_what_is_young_is_not_collected(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(1)
        copied(flow, flow.checkpoint())
        store = open_store(str(tmp_path / "remote" / "counting"))
        store.replace("blobs/aa/unfinished", b"of a copy that is under way")
        flow.run._parts.background.replicator.collect()  # type: ignore[union-attr]
        assert store.find("blobs/aa/unfinished") is not None


def test_a_remote_tier_makes_no_sense_of_single_operators(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used on another host"):
        SparklessFlow(tmp_path, mode="per-operator", **remote(tmp_path))
    with pytest.raises(ConfigError, match="there is no remote tier"):
        SparklessFlow(tmp_path, durable="remote")


# ------------------------------------------------------------------------------------------- killed anywhere


def live(storage: Path, seed: int, durable: str) -> None:
    chance = random.Random(seed)
    flow = SparklessFlow(storage, **remote(storage), durable=durable, channel_capacity_entries=1_000)
    try:
        for _ in range(chance.randint(2, 8)):
            match chance.choice(["number", "count", "publish", "copy"]):
                case "number":
                    flow.step(NUMBERS)
                case "count":
                    flow.step(TOTALS)
                case "publish":
                    flow.checkpoint()
                case _:
                    copied(flow, flow.checkpoint())
    finally:
        flow.stop()


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_process_and_host_each_number_is_published_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    durable = chance.choice(["local", "remote"])
    for _ in range(chance.randint(2, 5)):
        point = f"{chance.choice([*POINTS, *REMOTE_POINTS, *REMOTE_POINTS])}#{chance.choice([1, 1, 2, 3])}"
        is_killed_at(point, partial(live, tmp_path, chance.randint(0, 10**6), durable))
        if chance.random() < 0.4 and (tmp_path / "remote").exists() and (tmp_path / "storage").exists():
            has_copy = any((tmp_path / "remote").glob("counting/checkpoints/*/manifest.json"))
            if has_copy or not any((tmp_path / "table").iterdir()):
                lose_host(tmp_path)
    with running(tmp_path, **remote(tmp_path), durable=durable) as flow:
        flow.wait(lambda: not flow.step(TOTALS))
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())


# ------------------------------------------------------------------------------------------- faults


def test_what_somebody_has_removed_from_the_bucket_is_sent_again(tmp_path: Path) -> None:
    """Content that no checkpoint there needed may be collected by anybody, and may be needed again."""
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(3)
        copied(flow, flow.checkpoint())
        flow.emit(1)
        copied(flow, flow.checkpoint())
        replica = flow.run._parts.background.replicator._tier  # type: ignore[union-attr]
        newest = flow.checkpoints.load_manifest(Epoch(2))
        orphan = next(content_paths(flow.checkpoints.load_manifest(Epoch(1)), flow.layout))
        content = set(content_paths(newest, flow.layout))
        assert not replica.uploader.present.has(orphan) or orphan in content
        assert all(replica.uploader.present.has(path) for path in content)
    lose_host(tmp_path)
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.restored_epoch == 2


# ------------------------------------------------------------------------------------------- what a review has found


@pytest.mark.parametrize("durable", ["local", "remote"])
def test_what_slow_sinks_have_yet_to_publish_survives_the_loss_of_the_host(tmp_path: Path, durable: str) -> None:
    settings = {**remote(tmp_path), "durable": durable}
    with running(tmp_path, **settings) as flow:
        flow.emit(2)
        copied(flow, flow.checkpoint())
        flow.sink.commit_failures = [OSError("slow")] * 1000
        for epoch in (2, 3):
            flow.emit(2)
            flow.request()
            copied(flow, epoch)
        assert len(flow.sink.rows()) == 2
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 3)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 7


def test_what_was_given_up_stays_so_when_the_host_is_lost_before_the_next_copy(tmp_path: Path) -> None:
    with running(tmp_path, **{**remote(tmp_path), "retain_checkpoints": 5}) as flow:
        for _ in range(3):
            flow.emit(2)
            copied(flow, flow.checkpoint())
    SparklessFlow(tmp_path, **{**remote(tmp_path), "retain_checkpoints": 5}, restore_to=1).stop()
    lose_host(tmp_path)
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.restored_epoch == 1
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5


@pytest.mark.parametrize("is_restored_regionally", [False, True])
def test_a_host_that_was_replaced_publishes_nothing_more(tmp_path: Path, is_restored_regionally: bool) -> None:
    """Durable there first: what it seals it may not publish, be it that its own generation has grown meanwhile."""
    settings = {**remote(tmp_path), "durable": "remote"}
    old = SparklessFlow(tmp_path, **settings)
    try:
        old.emit(2)
        copied(old, old.checkpoint())
        if is_restored_regionally:
            shutil.rmtree(old.layout.spark_dirs / TOTALS)
            old.fail(TOTALS)
        other = tmp_path / "other"
        other.mkdir()
        (other / "table").symlink_to(tmp_path / "table")
        with running(other, **settings) as new:
            assert new.recovered.path == "remote"
            old.step(NUMBERS)
            old.request()
            with pytest.raises(FencedError):
                old.run.await_termination(20)
            new.emit(3)
            new.drain()
            assert_each_once(new.sink.rows())
    finally:
        old.stop()


@pytest.mark.parametrize("is_published", [False, True])
def test_a_fetch_that_was_cut_short_is_taken_up_again(tmp_path: Path, is_published: bool) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        if is_published:
            flow.emit(2)
        else:
            flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        copied(flow, future.result())
    lose_host(tmp_path)
    replica = replica_of(flow, tmp_path)
    replica.downloader.download_records()
    flow.layout.manifest(Epoch(1)).unlink()  # as if it had been killed before the last of them
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.restored_epoch == 1


def test_killed_between_two_manifests_a_new_host_asks_the_remote_tier_again(tmp_path: Path) -> None:
    """Of the older checkpoint the records are here: it is no reason to refuse the start because of a sink."""
    settings = {**remote(tmp_path), "on_rollback": "fail"}
    with running(tmp_path, **settings) as flow:
        for _ in range(2):
            flow.emit(1)
            copied(flow, flow.checkpoint())
    lose_host(tmp_path)

    def start() -> None:
        faults = Faults()
        faults.failing = kill_before_the_newest
        with faults.injected():
            SparklessFlow(tmp_path, **settings)

    def kill_before_the_newest(operation: str, path: str) -> None:
        if operation == "read" and path == "checkpoints/000000000002/manifest.json":
            while not flow.layout.manifest(Epoch(1)).exists():  # they are downloaded in parallel
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    assert is_killed_at("remote-fetched-records", start)
    assert [epoch for epoch in (1, 2) if flow.layout.manifest(Epoch(epoch)).exists()] == [1]
    with running(tmp_path, **settings) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 2)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_sink_that_must_not_be_rewound_gets_its_epoch_from_the_remote_tier(tmp_path: Path) -> None:
    """The newest manifest here is rotten, and so are the records of the one before."""
    settings = {**remote(tmp_path), "on_rollback": "fail"}
    with running(tmp_path, **settings) as flow:
        for _ in range(2):
            flow.emit(2)
            copied(flow, flow.checkpoint())
        rows = flow.sink.rows()
    flow.layout.manifest(Epoch(2)).write_bytes(b"rotten")
    for path in flow.layout.checkpoint(Epoch(1)).glob("*.g*.json"):
        path.write_bytes(b"rotten")
    with running(tmp_path, **settings) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 2)
        assert flow.sink.rows() == rows


def test_a_person_may_ask_a_new_host_for_an_epoch(tmp_path: Path) -> None:
    with running(tmp_path, **remote(tmp_path)) as flow:
        for _ in range(2):
            flow.emit(2)
            copied(flow, flow.checkpoint())
    lose_host(tmp_path)
    flow = SparklessFlow(tmp_path, **remote(tmp_path), restore_to=1)
    try:
        assert flow.recovered.restored_epoch == 1
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
    finally:
        flow.stop()


def test_a_missing_file_holds_up_no_later_copy(tmp_path: Path) -> None:
    with running(tmp_path, **{**remote(tmp_path), "replicate_interval": "300ms"}) as flow:
        flow.emit(1)
        copied(flow, flow.checkpoint())
        flow.emit(1)
        flow.checkpoint()
        record = flow.checkpoints.load_record(flow.checkpoints.load_manifest(Epoch(2)), TOTALS)
        replica = flow.run._parts.background.replicator._tier  # type: ignore[union-attr]
        missing = next(f for f in record.files() if not replica.uploader.present.has(flow.layout.blob(f.sha256)))
        flow.layout.blob(missing.sha256).unlink()
        flow.wait(lambda: "epoch 2 was not copied" in flow.remote_status().problem)
        assert not flow.run.wait_remote(2, timeout=0.05)
        flow.emit(1)
        copied(flow, flow.checkpoint())


def test_while_the_bucket_is_away_no_old_checkpoint_is_held(tmp_path: Path) -> None:
    faults = Faults()
    with faults.injected(), running(tmp_path, **{**remote(tmp_path), "retain_checkpoints": 1}) as flow:
        faults.failing = lambda *_: NotDone("the bucket is away")
        for _ in range(5):
            flow.emit(2)
            flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [5])
        flow.wait(lambda: flow.recovered.channels[NUMBERS].start > 4)


def test_a_name_that_begins_like_a_generation_harms_no_rows_in_flight(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "flow")
    assert layout.name(codec.data_dir(layout.channel(OperatorId("gnumbers")))) == "channels/gnumbers/data"
    with running(tmp_path, **remote(tmp_path), remote_grace=0) as flow:
        for _ in range(2):
            flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        copied(flow, future.result())
        before = {info.path for info in replica_of(flow, tmp_path).store.walk("channels")}
        flow.run._parts.background.replicator.collect()  # type: ignore[union-attr]
        assert {info.path for info in replica_of(flow, tmp_path).store.walk("channels")} == before


def test_the_newest_checkpoint_of_either_tier_comes_before_an_older_one(tmp_path: Path) -> None:
    """Whose sink must not go back needs no backup of its disk: the bucket has what the disk has lost."""
    settings = {**remote(tmp_path), "on_rollback": "fail", "retain_checkpoints": 5}
    with running(tmp_path, **settings) as flow:
        for _ in range(3):
            flow.emit(1)
            copied(flow, flow.checkpoint())
        record = flow.checkpoints.load_record(flow.checkpoints.load_manifest(Epoch(3)), TOTALS)
        older = flow.checkpoints.load_record(flow.checkpoints.load_manifest(Epoch(2)), TOTALS)
        only = {file.sha256 for file in record.files()} - {file.sha256 for file in older.files()}
    for digest in only:
        flow.layout.blob(digest).write_bytes(b"rotten")
    shutil.rmtree(flow.layout.spark_dirs)
    with running(tmp_path, **settings) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 3)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize("point", ["remote-told", "restore-generation", "sink-rewind-half"])
def test_killed_while_it_goes_back_and_then_the_host_is_lost(tmp_path: Path, point: str) -> None:
    settings = {**remote(tmp_path), "retain_checkpoints": 5}
    with running(tmp_path, **settings) as flow:
        for _ in range(3):
            flow.emit(2)
            copied(flow, flow.checkpoint())
    assert is_killed_at(point, lambda: SparklessFlow(tmp_path, **settings, restore_to=1).stop())
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.restored_epoch == 1
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5


def test_killed_between_telling_and_going_back_it_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = {**remote(tmp_path), "retain_checkpoints": 5}
    with running(tmp_path, **settings) as flow:
        for _ in range(3):
            flow.emit(2)
            copied(flow, flow.checkpoint())
    assert is_killed_at("remote-told", lambda: SparklessFlow(tmp_path, **settings, restore_to=1).stop())
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        copied(flow, flow.checkpoint())
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.restored_epoch == 4
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 8


def test_a_rollback_that_the_remote_tier_cannot_be_told_of_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.objects.waiting.STORE_RETRY", Retry(limit=1))
    settings = {**remote(tmp_path), "retain_checkpoints": 5}
    with running(tmp_path, **settings) as flow:
        for _ in range(2):
            flow.emit(2)
            copied(flow, flow.checkpoint())
    faults = Faults()
    faults.failing = lambda *_: NotDone("the bucket is away")
    with faults.injected(), pytest.raises(RecoveryError, match="cannot be announced"):
        SparklessFlow(tmp_path, **settings, restore_to=1)
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "resume"
        assert len(flow.sink.rows()) == 4


def test_a_seal_that_is_followed_by_silence_may_have_happened(tmp_path: Path) -> None:
    """Sealed, and then nobody can say whether another host is there: the epoch must not be given up."""
    faults = Faults()
    with faults.injected(), running(tmp_path, **remote(tmp_path), durable="remote") as flow:
        flow.emit(2)
        silences: list[str] = []

        def silence(operation: str, path: str) -> Exception | None:
            if operation != "walk" or path != "generations" or len(silences) == 1:
                return None
            silences.append(path)
            return NotDone("away")

        def after_the_seal(operation: str, path: str) -> None:
            if operation == "create" and path.endswith("manifest.json"):
                faults.failing = silence

        faults.failing_after = after_the_seal
        flow.checkpoint()
        assert len(silences) == 1
        assert replica_of(flow, tmp_path).checkpoints.epochs() == flow.checkpoints.epochs() == [1]


def test_epochs_without_output_are_not_missed_on_another_host(tmp_path: Path) -> None:
    """A sink says nothing of an epoch that had nothing for it, and such an epoch need not be in the remote tier."""
    faults = Faults()
    with faults.injected(), running(tmp_path, **remote(tmp_path)) as flow:
        faults.failing = lambda *_: NotDone("away")
        for _ in range(3):
            flow.checkpoint()
        faults.failing = lambda *_: None
        copied(flow, flow.checkpoint())
        assert replica_of(flow, tmp_path).checkpoints.epochs() == [4]
    lose_host(tmp_path)
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 4)
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_table_from_a_backup_is_noticed_by_a_host_that_takes_an_older_checkpoint(tmp_path: Path) -> None:
    """When others are collected, an older checkpoint must not lose what it says about sinks."""
    with running(tmp_path, **remote(tmp_path)) as flow:
        for _ in range(4):
            flow.emit(1)
            copied(flow, flow.checkpoint())
        flow.wait(flow.coordinator.is_settled)
        flow.run._parts.background.replicator.collect()  # type: ignore[union-attr]
        assert replica_of(flow, tmp_path).checkpoints.epochs() == [3, 4]
    lose_host(tmp_path)
    (tmp_path / "remote/counting/checkpoints/000000000004/manifest.json").write_bytes(b"rotten")
    for epoch in (2, 3, 4):  # the backup has epoch 1
        (flow.sink.folder / f"{epoch:018d}.json").unlink()
    with pytest.raises(RecoveryError, match="it was restored from a backup"):
        SparklessFlow(tmp_path, **remote(tmp_path))


def test_what_was_noted_of_a_checkpoint_goes_with_it(tmp_path: Path) -> None:
    with running(tmp_path, **{**remote(tmp_path), "remote_grace": 0, "retain_checkpoints": 1}) as flow:
        for _ in range(3):
            flow.emit(1)
            copied(flow, flow.checkpoint())
        flow.wait(flow.coordinator.is_settled)
        flow.run._parts.background.replicator.collect()  # type: ignore[union-attr]
        there = replica_of(flow, tmp_path)
        noted = {info.path for info in there.store.walk("published")}
        assert noted <= {f"published/{epoch:012d}.json" for epoch in there.checkpoints.epochs()}
        assert noted
