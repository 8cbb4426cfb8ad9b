"""Operators whose content goes to the remote tier at a cadence of its own, and whatever may happen to it meanwhile."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutline.base.backoff import Backoff
from cutline.base.clock import now_ms
from cutline.base.crashpoints import REMOTE_POINTS
from cutline.errors import ConfigError, FencedError, NotDone
from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.model.remote import SinkProgress
from cutline.tiers.checkpoint_files import content_paths
from cutline.tiers.early_upload import protected
from cutline.tiers.remote_tier import RemoteTier
from tests.support.killing import is_killed_at
from tests.support.remote import Faults, copied, lose_host, remote, replica_of
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow


def own(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """``numbers`` is sent with every checkpoint; sealed is only once, at the start."""
    return {**remote(tmp_path), "operators": {"totals": {"replicate_interval": "1h"}}, **more}


def all_at_rest(tmp_path: Path) -> dict[str, Any]:
    """After the first seal the replicator does nothing by itself: the test does it in its place."""
    return {**remote(tmp_path), "replicate_interval": "1h"}


def replica_in(flow: SparklessFlow) -> RemoteTier:
    """The one that the flow itself uses."""
    assert flow.run._parts.background.replicator is not None
    return flow.run._parts.background.replicator._tier


def make_seal_due(flow: SparklessFlow, epoch: int) -> None:
    replicator = flow.run._parts.background.replicator
    assert replicator is not None
    replicator.schedule.began(float("-inf"))
    replicator.completed(Epoch(epoch))


def names(flow: SparklessFlow, manifest: Manifest, *operators: OperatorId) -> set[str]:
    paths = content_paths(manifest, flow.layout, operators or None)
    return {path.relative_to(flow.layout.root).as_posix() for path in paths}


def there(flow: SparklessFlow, tmp_path: Path) -> set[str]:
    return {info.path.removesuffix(".zst") for info in replica_of(flow, tmp_path).store.walk()}


def sealed_and_one_more(flow: SparklessFlow) -> Manifest:
    """Epoch 1 is in the remote tier; epoch 2 is complete here."""
    flow.emit(3)
    copied(flow, flow.checkpoint())
    flow.emit(2)
    return flow.checkpoints.load_manifest(Epoch(flow.checkpoint()))


def collected_elsewhere(flow: SparklessFlow, tmp_path: Path, *, later_ms: int = 0) -> None:
    """By another process that knows the bucket only, without any grace."""
    other = replica_of(flow, tmp_path)
    now = now_ms() + 1_000 + later_ms
    keep = set(other.checkpoints.epochs())
    other.collector.collect(keep, progress=SinkProgress(), now_ms=now, grace_ms=0, check_fence=lambda: None)


def comes_back(tmp_path: Path, epoch: int, **settings: Any) -> None:
    lose_host(tmp_path)
    with running(tmp_path, **settings) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", epoch)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_who_is_due_is_sent_ahead_and_what_is_still_needed_not_again_with_the_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.tiers.upload._YOUNG_SECONDS", 0.0)  # it was sent long ago
    with running(tmp_path, **own(tmp_path)) as flow:
        manifest = sealed_and_one_more(flow)
        ahead, rest = names(flow, manifest, NUMBERS), names(flow, manifest, TOTALS) - names(flow, manifest, NUMBERS)
        flow.wait(lambda: ahead <= there(flow, tmp_path))
        flow.wait(lambda: flow.remote_status().ahead_bytes > 0)
        assert not rest <= there(flow, tmp_path)
        assert replica_of(flow, tmp_path).checkpoints.epochs() == [1]
        before = flow.remote_status().files
        sent_with_seal = rest - there(flow, tmp_path)
        make_seal_due(flow, 2)
        copied(flow, 2)
        assert flow.remote_status().files - before == len(sent_with_seal)
    comes_back(tmp_path, 2, **own(tmp_path))


def test_without_intervals_of_their_own_nothing_is_sent_ahead(tmp_path: Path) -> None:
    with running(tmp_path, **all_at_rest(tmp_path)) as flow:
        sealed_and_one_more(flow)
        assert flow.remote_status().ahead_bytes == 0
        assert not any(name.startswith("ahead/") for name in there(flow, tmp_path))


def test_no_collector_takes_what_was_sent_ahead_however_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.tiers.upload._YOUNG_SECONDS", 0.0)
    with running(tmp_path, **all_at_rest(tmp_path)) as flow:
        manifest = sealed_and_one_more(flow)
        replica, generation = replica_in(flow), flow.recovered.generation
        replica.uploader.send_early(manifest, {NUMBERS}, generation)
        ahead = names(flow, manifest, NUMBERS)
        collected_elsewhere(flow, tmp_path)
        assert flow.run._parts.background.replicator is not None
        flow.run._parts.background.replicator.collect_now(grace_ms=0, is_dry_run=False)
        assert ahead <= there(flow, tmp_path)
        assert replica.uploader.send_early(manifest, {NUMBERS}, generation).files == 0
        replica.uploader.send(manifest, manifest.generation)
        replica.uploader.seal(manifest, generation)
        collected_elsewhere(flow, tmp_path)
    comes_back(tmp_path, 2, **remote(tmp_path))


def test_what_is_gone_nevertheless_is_sent_again_with_the_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.tiers.upload._YOUNG_SECONDS", 0.0)
    with running(tmp_path, **all_at_rest(tmp_path)) as flow:
        manifest = sealed_and_one_more(flow)
        replica, generation = replica_in(flow), flow.recovered.generation
        before = there(flow, tmp_path)
        replica.uploader.send_early(manifest, {NUMBERS, TOTALS}, generation)
        gone = sorted(there(flow, tmp_path) - before - {f"ahead/{generation:06d}.json"})[:2]
        replica.store.delete([name + suffix for name in gone for suffix in ("", ".zst")])
        assert replica.uploader.send(manifest, manifest.generation).files == len(gone) == 2
        replica.uploader.seal(manifest, generation)
    comes_back(tmp_path, 2, **remote(tmp_path))


def test_what_no_later_checkpoint_needs_is_let_go_of(tmp_path: Path) -> None:
    with running(tmp_path, **all_at_rest(tmp_path)) as flow:
        second = sealed_and_one_more(flow)
        replica, generation = replica_in(flow), flow.recovered.generation
        replica.uploader.send_early(second, {NUMBERS}, generation)
        only_second = names(flow, second, NUMBERS)
        flow.emit(1)
        third = flow.checkpoints.load_manifest(Epoch(flow.checkpoint()))
        replica.uploader.send_early(third, {NUMBERS}, generation)
        only_second -= names(flow, third)
        in_record = protected(replica.store, generation)
        assert only_second and not only_second & in_record
        assert names(flow, third, NUMBERS) - in_record <= there(flow, tmp_path)
        collected_elsewhere(flow, tmp_path)
        assert not only_second & there(flow, tmp_path)
        replica.uploader.send(third, third.generation)
        replica.uploader.seal(third, generation)
    comes_back(tmp_path, 3, **remote(tmp_path))


def test_a_collector_that_saw_no_seal_has_seen_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has listed the checkpoints; then one is sealed, and what it rests on leaves the record of what is held."""
    monkeypatch.setattr("cutline.tiers.upload._YOUNG_SECONDS", 0.0)
    with running(tmp_path, **all_at_rest(tmp_path)) as flow:
        second = sealed_and_one_more(flow)
        replica, generation = replica_in(flow), flow.recovered.generation
        replica.uploader.send_early(second, {NUMBERS, TOTALS}, generation)
        other = replica_of(flow, tmp_path)
        listed = other.collector.reached

        def meanwhile(epochs: Any) -> set[str]:
            reached = listed(epochs)
            replica.uploader.send(second, second.generation)
            replica.uploader.seal(second, generation)
            replica.uploader.early.announce([], ())
            return reached

        monkeypatch.setattr(other.collector, "reached", meanwhile)
        keep = set(other.checkpoints.epochs()) | {Epoch(2)}
        now = now_ms() + 1_000
        other.collector.collect(keep, progress=SinkProgress(), now_ms=now, grace_ms=0, check_fence=lambda: None)
        assert names(flow, second) <= there(flow, tmp_path)


def test_after_a_region_went_back_nothing_sent_before_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.tiers.upload._YOUNG_SECONDS", 0.0)
    with running(tmp_path, **all_at_rest(tmp_path)) as flow:
        manifest = sealed_and_one_more(flow)
        replica, generation = replica_in(flow), flow.recovered.generation
        replica.uploader.send_early(manifest, {NUMBERS}, generation)
        later = Generation(generation + 1)
        replica.uploader.send(manifest, manifest.generation)
        with pytest.raises(NotDone, match="earlier generation"):
            replica.uploader.seal(manifest, later)
        collected_elsewhere(flow, tmp_path)
        assert f"ahead/{generation:06d}.json" not in there(flow, tmp_path)
        assert replica.uploader.send(manifest, later).files > 0
        replica.uploader.seal(manifest, later)
        assert names(flow, manifest) <= there(flow, tmp_path)


def test_a_host_that_was_thought_dead_sends_nothing_ahead(tmp_path: Path) -> None:
    with running(tmp_path, **all_at_rest(tmp_path)) as flow:
        manifest = sealed_and_one_more(flow)
        generation = flow.recovered.generation
        assert replica_of(flow, tmp_path).fence.claim(Generation(generation + 7))
        before = there(flow, tmp_path)
        with pytest.raises(FencedError):
            replica_in(flow).uploader.send_early(manifest, {NUMBERS}, generation)
        assert there(flow, tmp_path) == before


@pytest.mark.parametrize("point", ["remote-announced", "remote-sent"])
def test_killed_with_content_sent_ahead_the_next_start_relies_on_none_of_it(tmp_path: Path, point: str) -> None:
    def live() -> None:
        with running(tmp_path, **own(tmp_path)) as flow:
            sealed_and_one_more(flow)
            make_seal_due(flow, 2)
            copied(flow, 2)

    assert is_killed_at(f"{point}#{2 if point == 'remote-sent' else 1}", live)
    with running(tmp_path, **own(tmp_path, remote_grace=0)) as flow:
        stale = {name for name in there(flow, tmp_path) if name.startswith("ahead/")}
        assert stale
        flow.emit(1)
        copied(flow, flow.checkpoint())
        assert flow.run._parts.background.replicator is not None
        flow.run._parts.background.replicator.collect()
        assert not stale & there(flow, tmp_path)
        newest = flow.checkpoints.epochs()[-1]
        replica = replica_of(flow, tmp_path)
        needed = replica.collector.reached(replica.collector.manifests())
        kept = {name for name in there(flow, tmp_path) if name.startswith(("blobs/", "channels/"))}
        assert kept <= needed
    comes_back(tmp_path, newest, **own(tmp_path))


def test_an_epoch_that_is_collected_here_is_held_while_its_content_is_sent_ahead(tmp_path: Path) -> None:
    faults, is_sending, may_go_on = Faults(), threading.Event(), threading.Event()

    def wait(operation: str, path: str) -> None:
        if operation == "replace" and path.startswith("ahead/"):
            is_sending.set()
            may_go_on.wait(20)

    with faults.injected(), running(tmp_path, **own(tmp_path, retain_checkpoints=1)) as flow:
        flow.emit(3)
        copied(flow, flow.checkpoint())
        faults.failing_after = wait
        flow.emit(2)
        flow.checkpoint()
        flow.wait(is_sending.is_set)
        for _ in range(2):
            flow.emit(1)
            flow.checkpoint()
        assert Epoch(2) in flow.checkpoints.epochs()
        may_go_on.set()
        flow.wait(lambda: names(flow, flow.checkpoints.load_manifest(Epoch(4)), NUMBERS) <= there(flow, tmp_path))
        assert flow.remote_status().problem == ""
        flow.emit(1)
        flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [5])
        make_seal_due(flow, 5)
        copied(flow, 5)
    comes_back(tmp_path, 5, **own(tmp_path))


def test_a_bucket_that_is_away_is_asked_again_and_nothing_counts_as_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.protocol.history.remote_schedule.UPLOAD_BACKOFF", Backoff(first_s=0.05))
    faults = Faults()
    with faults.injected(), running(tmp_path, **own(tmp_path)) as flow:
        flow.emit(3)
        copied(flow, flow.checkpoint())
        faults.failing = lambda operation, path: NotDone("away") if path.startswith("blobs/") else None
        flow.emit(2)
        flow.checkpoint()
        flow.wait(lambda: "away" in flow.remote_status().problem)
        assert flow.remote_status().ahead_bytes == 0
        faults.failing = None
        flow.wait(lambda: flow.remote_status().ahead_bytes > 0)
        assert flow.remote_status().problem == ""
        make_seal_due(flow, 2)
        copied(flow, 2)
    comes_back(tmp_path, 2, **own(tmp_path))


def live(storage: Path, seed: int) -> None:
    chance = random.Random(seed)
    settings = own(storage, operators={"totals": {"replicate_interval": "150ms"}}, remote_grace=0)
    flow = SparklessFlow(storage, **settings, channel_capacity_entries=1_000)
    try:
        for _ in range(chance.randint(2, 8)):
            match chance.choice(["number", "count", "publish", "copy", "collect"]):
                case "number":
                    flow.step(NUMBERS)
                case "count":
                    flow.step(TOTALS)
                case "publish":
                    flow.emit(1)  # this sink keeps no trace of an epoch without rows
                    flow.checkpoint()
                case "copy":
                    flow.emit(1)
                    copied(flow, flow.checkpoint())
                case _:
                    assert flow.run._parts.background.replicator is not None
                    flow.run._parts.background.replicator.collect_now(grace_ms=0, is_dry_run=False)
    finally:
        flow.stop()


@pytest.mark.parametrize("seed", range(8))
def test_killed_anywhere_each_number_is_published_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(chance.randint(2, 5)):
        point = f"{chance.choice(REMOTE_POINTS)}#{chance.choice([1, 1, 2, 3])}"
        is_killed_at(point, partial(live, tmp_path, chance.randint(0, 10**6)))
        has_copy = any((tmp_path / "remote").glob("counting/checkpoints/*/manifest.json"))
        if has_copy and chance.random() < 0.5 and (tmp_path / "storage").exists():
            lose_host(tmp_path)
    with running(tmp_path, **own(tmp_path)) as flow:
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_configuration_wins_over_code(tmp_path: Path) -> None:
    in_code = {NUMBERS: {"replicate_interval": "2h"}, TOTALS: {"replicate_interval": "1h"}}
    settings = own(tmp_path, operators={"numbers": {"replicate_interval": "0s"}})
    flow = SparklessFlow(tmp_path, own=in_code, **settings)
    try:
        assert flow.run._parts.background.replicator is not None
        cadence = flow.run._parts.background.replicator.schedule.cadence
        assert cadence.seal_s == 3_600
        assert cadence.due(Epoch(1), 0.0) == {NUMBERS}
    finally:
        flow.stop()


def test_an_interval_of_an_operator_that_would_mean_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'durable = "remote".*operator=totals'):
        SparklessFlow(tmp_path, **own(tmp_path, durable="remote"))
    with pytest.raises(ConfigError, match=r"per-operator mode.*operator=totals"):
        SparklessFlow(tmp_path, mode="per-operator", operators={"totals": {"replicate_interval": "1h"}})
    with pytest.raises(ConfigError, match=r"operators.totals: replicate_interval: 'often' is not a duration"):
        SparklessFlow(tmp_path, **own(tmp_path, operators={"totals": {"replicate_interval": "often"}}))
    with pytest.raises(ConfigError, match=r"operators.sums: the flow has no such operator"):
        SparklessFlow(tmp_path, **own(tmp_path, operators={"sums": {"replicate_interval": "1h"}}))
