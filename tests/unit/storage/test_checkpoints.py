"""The snapshot store of the local tier, from the pin to the restore, on a Spark directory made by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from cutline.base import durable
from cutline.connectors.replay_guard import ReplayGuard
from cutline.coordinator.manifests import operator_cut
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import ChannelCut, Manifest, OperatorRecord, SnapshotFile, Tombstone
from cutline.model.cut import Timings
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_BATCH, NO_EPOCH, START, BatchId, Epoch, FlowName, Generation, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import HeldFiles
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.local import LocalStore
from cutline.worker.snapshots import acknowledgement
from tests.support import stored_records
from tests.support.killing import is_killed_at
from tests.support.spark_dirs import SparkDir, content_of

TOTALS = OperatorId("totals")


@pytest.fixture(autouse=True)
def every_file_is_a_blob(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a directory made by hand are all small; most tests here are about those that are not."""
    if "inline" not in request.node.name:
        monkeypatch.setattr("cutline.storage.checkpoints.INLINE_BYTES", -1)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "storage", "flow")


@pytest.fixture
def store(layout: Layout) -> LocalStore:
    return LocalStore.open(layout, ReplayGuard())


@pytest.fixture
def spark(tmp_path: Path) -> SparkDir:
    spark = SparkDir(tmp_path / "spark")
    for batch in range(3):
        spark.run(batch, {"orders": batch})
    return spark


def record_of(store: LocalStore, spark: SparkDir, epoch: int, batch: int, *, generation: int = 1) -> OperatorRecord:
    """Pin and store the files of a batch, and the record that names them."""
    files = store.query_dirs.files_of(spark.root, BatchId(batch))
    subtasks, shared = store.checkpoints.store_files(store.checkpoints.hold(TOTALS, Epoch(epoch), spark.root, files))
    record = OperatorRecord(
        flow=FlowName("flow"),
        operator=TOTALS,
        epoch=Epoch(epoch),
        generation=Generation(generation),
        batch=BatchId(batch),
        barrier=Position(batch + 1),
        positions={},
        aligned=True,
        watermark_ms=files.watermark_ms,
        subtasks=subtasks,
        shared=shared,
        sinks={},
        timings=Timings(),
    )
    store.checkpoints.store_record(record)
    return record


def manifest_of(store: LocalStore, *records: OperatorRecord) -> Manifest:
    return Manifest(
        flow=FlowName("flow"),
        epoch=records[0].epoch,
        generation=Generation(1),
        previous_epoch=Epoch(0),
        started_ms=0,
        completed_ms=1,
        operators={
            record.operator: operator_cut(acknowledgement(store.checkpoints.store_record(record))) for record in records
        },
        channels={
            record.operator: ChannelCut(barrier=record.barrier, lineage=[(Generation(1), START)], in_flight={})
            for record in records
        },
    )


def checkpoint(store: LocalStore, spark: SparkDir, epoch: int, batch: int) -> OperatorRecord:
    record = record_of(store, spark, epoch, batch)
    assert isinstance(store.checkpoints.store_manifest(manifest_of(store, record)), Manifest)
    return record


def collect(store: LocalStore, drop: Sequence[Epoch]) -> Sequence[Epoch]:
    """What lies above the newest complete epoch is under way."""
    return store.checkpoints.collect(drop, max(store.checkpoints.epochs(), default=NO_EPOCH))


def keep_only(store: LocalStore, *epochs: Epoch) -> Sequence[Epoch]:
    return collect(store, [epoch for epoch in store.checkpoints.epochs() if epoch not in epochs])


def blobs(layout: Layout) -> set[str]:
    return {path.name for path in layout.blobs.glob("*/*")}


def hashes(*records: OperatorRecord) -> set[str]:
    return {file.sha256 for record in records for file in record.files()}


# ------------------------------------------------------------------------------------------------- taking, restoring


def test_a_restored_directory_holds_exactly_the_files_of_the_snapshot(
    store: LocalStore, spark: SparkDir, tmp_path: Path
) -> None:
    taken = content_of(spark.root)
    record = checkpoint(store, spark, 1, 1)
    spark.run(3)
    store.query_dirs.restore(record, tmp_path / "restored")
    restored = content_of(tmp_path / "restored")
    assert {name: taken[name] for name in restored} == restored
    assert "commits/1" in restored
    assert "commits/2" not in restored
    assert store.query_dirs.files_of(tmp_path / "restored", BatchId(1)) == store.query_dirs.files_of(
        spark.root, BatchId(1)
    )
    assert store.query_dirs.live_damage(tmp_path / "restored", BatchId(1), NO_BATCH) == []


def test_what_is_restored_from_disk_is_what_was_stored(
    store: LocalStore, layout: Layout, spark: SparkDir, tmp_path: Path
) -> None:
    record = checkpoint(store, spark, 1, 2)
    again = LocalStore.open(layout, ReplayGuard())
    loaded = again.checkpoints.load_record(again.checkpoints.load_manifest(Epoch(1)), TOTALS)
    assert loaded == record
    again.query_dirs.restore(loaded, tmp_path / "restored")
    assert again.query_dirs.files_of(tmp_path / "restored", BatchId(2)).watermark_ms == 1_002


def test_a_snapshot_before_the_first_batch_has_no_files(store: LocalStore, spark: SparkDir, tmp_path: Path) -> None:
    record = checkpoint(store, spark, 1, NO_BATCH)
    assert record.files() == []
    (tmp_path / "restored").mkdir()
    (tmp_path / "restored" / "leftover").write_bytes(b"of an earlier try")
    store.query_dirs.restore(record, tmp_path / "restored")
    assert content_of(tmp_path / "restored") == {}


def test_restoring_again_starts_from_nothing(store: LocalStore, spark: SparkDir, tmp_path: Path) -> None:
    first, second = checkpoint(store, spark, 1, 1), checkpoint(store, spark, 2, 2)
    store.query_dirs.restore(second, tmp_path / "restored")
    store.query_dirs.restore(first, tmp_path / "restored")
    assert "commits/2" not in content_of(tmp_path / "restored")


def test_what_spark_does_in_a_restored_directory_does_not_touch_the_snapshot(
    store: LocalStore, spark: SparkDir, tmp_path: Path
) -> None:
    record = checkpoint(store, spark, 1, 1)
    store.query_dirs.restore(record, tmp_path / "restored")
    for path in (tmp_path / "restored").rglob("*"):
        if path.is_file():
            path.unlink()
            path.write_bytes(b"written anew by Spark")
    assert store.checkpoints.damage(record) == []


def test_pinned_files_outlive_sparks_own_clean_up(store: LocalStore, spark: SparkDir) -> None:
    pin = store.checkpoints.hold(TOTALS, Epoch(1), spark.root, store.query_dirs.files_of(spark.root, BatchId(1)))
    expected = {name: (spark.root / name).read_bytes() for name in pin.paths}
    for name in pin.paths:
        (spark.root / name).unlink()
    subtasks, shared = store.checkpoints.store_files(pin)
    stored = [*shared, *(file for subtask in subtasks for file in subtask.files)]
    assert {file.path for file in stored} == set(expected)


def test_a_pin_is_gone_when_its_files_are_stored(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    checkpoint(store, spark, 1, 1)
    assert list(layout.pins.rglob("*")) == []


def test_a_file_that_is_gone_before_the_pin_is_damage(store: LocalStore, spark: SparkDir) -> None:
    files = store.query_dirs.files_of(spark.root, BatchId(1))
    (spark.root / "state/0/1/2.delta").unlink()
    with pytest.raises(DamagedRecordError) as caught:
        store.checkpoints.hold(TOTALS, Epoch(1), spark.root, files)
    assert caught.value.where["path"] == "state/0/1/2.delta"


def test_a_pin_on_a_file_system_without_links_is_a_copy(
    store: LocalStore, spark: SparkDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    files = store.query_dirs.files_of(spark.root, BatchId(1))
    with monkeypatch.context() as without_links:
        without_links.setattr(os, "link", refuse)
        subtasks, shared = store.checkpoints.store_files(store.checkpoints.hold(TOTALS, Epoch(1), spark.root, files))
    record = record_of(store, spark, 2, 1)
    assert (record.shared, [one.files for one in record.subtasks]) == (shared, [one.files for one in subtasks])
    assert store.checkpoints.damage(record) == []


def test_pinning_again_starts_from_nothing(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    for batch in (1, 2):
        store.checkpoints.hold(TOTALS, Epoch(1), spark.root, store.query_dirs.files_of(spark.root, BatchId(batch)))
    held = store.checkpoints.hold(TOTALS, Epoch(1), spark.root, store.query_dirs.files_of(spark.root, BatchId(0))).paths
    assert len(list(layout.pin(Epoch(1), TOTALS).iterdir())) == len(held)


def test_files_that_did_not_change_are_stored_once(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    first = checkpoint(store, spark, 1, 1)
    before = blobs(layout)
    second = checkpoint(store, spark, 2, 2)
    assert sum(subtask.new_bytes for subtask in first.subtasks) == sum(subtask.size_bytes for subtask in first.subtasks)
    new_bytes = [subtask.new_bytes for subtask in second.subtasks]
    assert new_bytes == [len("2-0"), len("2-1")]
    assert len(blobs(layout) - before) == len({"offsets/2", "commits/2", "state/0/0/3.delta", "state/0/1/3.delta"})


def test_every_subtask_says_how_long_its_files_took(store: LocalStore, spark: SparkDir) -> None:
    assert all(subtask.async_ms > 0 for subtask in record_of(store, spark, 1, 1).subtasks)


def test_the_files_of_each_subtask_are_told_apart(store: LocalStore, spark: SparkDir) -> None:
    record = record_of(store, spark, 1, 1)
    assert {subtask.subtask: {file.path for file in subtask.files} for subtask in record.subtasks} == {
        0: {"state/0/0/1.delta", "state/0/0/2.delta"},
        1: {"state/0/1/1.delta", "state/0/1/2.delta"},
    }


def test_a_batch_counts_as_committed_only_when_spark_says_so(store: LocalStore, spark: SparkDir) -> None:
    spark.plan(3)
    assert store.query_dirs.is_committed(spark.root, BatchId(2))
    assert not store.query_dirs.is_committed(spark.root, BatchId(3))
    assert store.query_dirs.is_committed(spark.root / "nothing", NO_BATCH)


# ------------------------------------------------------------------------------------------------- manifests


def test_an_epoch_exists_only_with_its_manifest(store: LocalStore, spark: SparkDir) -> None:
    record = record_of(store, spark, 1, 1)
    assert store.checkpoints.epochs() == []
    assert isinstance(store.checkpoints.store_manifest(manifest_of(store, record)), Manifest)
    assert store.checkpoints.epochs() == [1]


def test_the_first_manifest_of_an_epoch_stays(store: LocalStore, spark: SparkDir) -> None:
    record = record_of(store, spark, 1, 1)
    manifest = manifest_of(store, record)
    assert store.checkpoints.store_manifest(manifest) == manifest
    assert store.checkpoints.store_manifest(manifest_of(store, record_of(store, spark, 1, 2, generation=2))) == manifest
    assert store.checkpoints.load_manifest(Epoch(1)) == manifest


def test_a_manifest_that_a_dead_process_left_is_synced_before_anything_rests_on_it(
    store: LocalStore, layout: Layout, spark: SparkDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(store, checkpoint(store, spark, 1, 1))
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_dir", synced.append)
    store.checkpoints.store_manifest(manifest)
    assert layout.checkpoint(Epoch(1)) in synced, "found by a coordinator that completes the same epoch"
    synced.clear()
    LocalCheckpointStore(layout, is_reader=True)
    assert not synced
    LocalCheckpointStore(layout)
    assert layout.checkpoint(Epoch(1)) in synced, "found by a start"


def test_a_record_that_is_not_the_one_the_manifest_names_is_refused(store: LocalStore, spark: SparkDir) -> None:
    checkpoint(store, spark, 1, 1)
    store.checkpoints._layout.record(Epoch(1), TOTALS, Generation(1)).unlink()
    record_of(store, spark, 1, 2)
    with pytest.raises(DamagedRecordError, match="not the one the manifest names"):
        store.checkpoints.load_record(store.checkpoints.load_manifest(Epoch(1)), TOTALS)


def test_a_record_is_never_changed(store: LocalStore, spark: SparkDir) -> None:
    first = record_of(store, spark, 1, 1)
    stored = store.checkpoints.store_record(first)
    again = store.checkpoints.store_record(replace(first, batch=BatchId(2)))
    assert again == stored
    assert store.checkpoints.find_record(Epoch(1), TOTALS, Generation(1)) == stored


def test_every_generation_has_a_record_of_its_own(store: LocalStore, spark: SparkDir) -> None:
    older, newer = record_of(store, spark, 1, 1), record_of(store, spark, 1, 1, generation=2)
    store.checkpoints.store_manifest(manifest_of(store, newer))
    assert store.checkpoints.load_record(store.checkpoints.load_manifest(Epoch(1)), TOTALS) == newer
    found = store.checkpoints.find_record(Epoch(1), TOTALS, Generation(1))
    assert found is not None and found.record == older
    assert store.checkpoints.find_record(Epoch(1), TOTALS, Generation(3)) is None


def test_what_a_found_record_names_is_held_on_to(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    record_of(store, spark, 2, 2)
    again = LocalStore.open(layout, ReplayGuard())
    again.checkpoints.find_record(Epoch(2), TOTALS, Generation(1))
    collect(again, [])
    assert blobs(layout)
    again.checkpoints.discard(Epoch(2))
    collect(again, [])
    assert blobs(layout) == set()


# ------------------------------------------------------------------------------------------------- tombstones


def tombstone(epoch: int, generation: int = 2) -> Tombstone:
    return Tombstone(epoch=Epoch(epoch), generation=Generation(generation), reason="timed out")


def test_a_tombstone_bars_the_manifest(store: LocalStore, spark: SparkDir) -> None:
    manifest = manifest_of(store, record_of(store, spark, 1, 1))
    assert store.checkpoints.store_tombstone(tombstone(1)) == tombstone(1)
    assert store.checkpoints.store_manifest(manifest) == tombstone(1)
    assert store.checkpoints.epochs() == []


def test_a_manifest_that_is_there_is_found_instead_of_a_tombstone(store: LocalStore, spark: SparkDir) -> None:
    manifest = manifest_of(store, record_of(store, spark, 1, 1))
    store.checkpoints.store_manifest(manifest)
    assert store.checkpoints.store_tombstone(tombstone(1)) == manifest
    assert store.checkpoints.epochs() == [1]


def test_something_unreadable_in_the_manifests_place_bars_it_too(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    checkpoint(store, spark, 1, 1)
    flip(layout.manifest(Epoch(1)))
    assert store.checkpoints.store_tombstone(tombstone(1)) == tombstone(1)
    assert store.checkpoints.epochs() == [1], "it may have been complete: recovery must know of it"


def test_discarding_keeps_the_tombstone(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    record_of(store, spark, 1, 1)
    store.checkpoints.store_tombstone(tombstone(1))
    store.checkpoints.discard(Epoch(1))
    assert [path.name for path in layout.checkpoint(Epoch(1)).iterdir()] == ["manifest.json"]
    assert store.checkpoints.store_tombstone(tombstone(1, generation=9)) == tombstone(1)
    collect(store, [])
    assert blobs(layout) == set()


def test_a_tombstone_that_a_dead_process_left_is_synced_before_anything_rests_on_it(
    store: LocalStore, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.checkpoints.store_tombstone(tombstone(1))
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_dir", synced.append)
    store.checkpoints.store_tombstone(tombstone(1))
    assert layout.checkpoint(Epoch(1)) in synced


def test_a_tombstone_stays_for_good(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    """A coordinator that is only thought dead may come for its place at any time (simulator, seed 1156)."""
    checkpoint(store, spark, 1, 0)
    record_of(store, spark, 2, 0)
    store.checkpoints.store_tombstone(tombstone(2))
    checkpoint(store, spark, 3, 1)
    collect(store, [Epoch(1)])
    assert [path.name for path in layout.checkpoint(Epoch(2)).iterdir()] == ["manifest.json"]
    assert store.checkpoints.epochs() == [3]


def test_the_place_of_an_inherited_epoch_stays_taken_when_it_is_collected(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    """Whoever began it may still want to store it, with records that are gone by then (simulator, seed 123)."""
    checkpoint(store, spark, 1, 0)
    manifest = replace(store.checkpoints.load_manifest(Epoch(1)), is_inherited=True)
    layout.manifest(Epoch(1)).unlink()
    assert store.checkpoints.store_manifest(manifest) == manifest
    checkpoint(store, spark, 2, 1)
    collect(store, [Epoch(1)])
    assert store.checkpoints.epochs() == [2]
    assert isinstance(store.checkpoints.store_manifest(manifest), Tombstone)


def test_epochs_come_in_ascending_order(store: LocalStore, spark: SparkDir) -> None:
    for epoch in (10, 9, 100):
        checkpoint(store, spark, epoch, 1)
    assert store.checkpoints.epochs() == [9, 10, 100]


# ------------------------------------------------------------------------------------------------- damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.unlink()
    path.write_bytes(content)


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_every_damaged_file_of_a_snapshot_is_found(
    store: LocalStore, layout: Layout, spark: SparkDir, damage: Callable[[Path], None]
) -> None:
    record = checkpoint(store, spark, 1, 2)
    for file in record.files():
        blob = layout.blob(file.sha256)
        content = blob.read_bytes()
        damage(blob)
        assert [problem for problem in store.checkpoints.damage(record) if file.path in problem]
        blob.unlink(missing_ok=True)
        blob.write_bytes(content)
    assert store.checkpoints.damage(record) == []


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_damaged_manifests_and_records_are_found(
    store: LocalStore, layout: Layout, spark: SparkDir, damage: Callable[[Path], None]
) -> None:
    checkpoint(store, spark, 1, 1)
    checkpoint(store, spark, 2, 2)
    manifest = store.checkpoints.load_manifest(Epoch(1))
    damage(layout.record(Epoch(1), TOTALS, Generation(1)))
    with pytest.raises(DamagedRecordError):
        store.checkpoints.load_record(manifest, TOTALS)
    damage(layout.manifest(Epoch(2)))
    with pytest.raises(DamagedRecordError):
        store.checkpoints.load_manifest(Epoch(2))


def test_a_live_directory_is_sound_at_and_just_behind_the_log(store: LocalStore, spark: SparkDir) -> None:
    assert store.query_dirs.live_damage(spark.root, BatchId(2), NO_BATCH) == []
    spark.plan(3)
    assert store.query_dirs.live_damage(spark.root, BatchId(2), NO_BATCH) == []
    assert store.query_dirs.live_damage(spark.root, BatchId(3), NO_BATCH) == []


def test_a_live_directory_behind_a_checkpoint_is_damaged(store: LocalStore, spark: SparkDir) -> None:
    """Without its last commit Spark would run the batch again, whose input may have been let go of."""
    assert store.query_dirs.live_damage(spark.root, BatchId(2), BatchId(2)) == []
    (spark.root / "commits/2").unlink()
    assert store.query_dirs.live_damage(spark.root, BatchId(2), BatchId(1)) == []
    assert store.query_dirs.live_damage(spark.root, BatchId(2), BatchId(2))


def test_a_live_directory_before_the_first_batch_is_sound(store: LocalStore, tmp_path: Path) -> None:
    assert store.query_dirs.live_damage(tmp_path / "nothing", NO_BATCH, NO_BATCH) == []
    empty = SparkDir(tmp_path / "spark")
    empty.plan(0)
    assert store.query_dirs.live_damage(empty.root, NO_BATCH, NO_BATCH) == []
    assert store.query_dirs.live_damage(empty.root, BatchId(0), NO_BATCH) == []


@pytest.mark.parametrize("last_appended", [-1, 0, 1, 3, 4, 9])
def test_a_live_directory_that_does_not_fit_the_log_is_damaged(
    store: LocalStore, spark: SparkDir, last_appended: int
) -> None:
    assert store.query_dirs.live_damage(spark.root, BatchId(last_appended), NO_BATCH)


def test_a_live_directory_that_is_gone_is_damaged(store: LocalStore, tmp_path: Path) -> None:
    assert store.query_dirs.live_damage(tmp_path / "nothing", BatchId(0), NO_BATCH)
    assert store.query_dirs.live_damage(tmp_path / "nothing", BatchId(7), NO_BATCH)


@pytest.mark.parametrize("name", ["metadata", "offsets/2", "commits/1", "state/0/0/1.delta", "state/0/1/3.delta"])
def test_a_live_directory_without_one_of_its_files_is_damaged(store: LocalStore, spark: SparkDir, name: str) -> None:
    (spark.root / name).unlink()
    assert store.query_dirs.live_damage(spark.root, BatchId(2), NO_BATCH)


@pytest.mark.parametrize("name", ["offsets/2", "commits/2"])
@pytest.mark.parametrize("content", [b"", b"v1\n", b"v1\n\xff\xfe", b'v1\n{"\xff":1}', b"\0" * 64])
def test_a_live_directory_with_a_broken_record_is_damaged_and_nothing_worse(
    store: LocalStore, spark: SparkDir, name: str, content: bytes
) -> None:
    (spark.root / name).write_bytes(content)
    store.query_dirs.live_damage(spark.root, BatchId(2), NO_BATCH)
    if name == "commits/2" and content != b'v1\n{"\xff":1}':
        assert store.query_dirs.live_damage(spark.root, BatchId(2), NO_BATCH)


# ------------------------------------------------------------------------------------------------- discarding


def test_what_an_aborted_epoch_left_behind_is_forgotten(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    record_of(store, spark, 1, 1)
    store.checkpoints.discard(Epoch(1))
    assert not layout.checkpoint(Epoch(1)).exists()
    keep_only(store)
    assert blobs(layout) == set()


def test_a_complete_epoch_is_never_discarded(store: LocalStore, spark: SparkDir) -> None:
    record = checkpoint(store, spark, 1, 1)
    store.checkpoints.discard(Epoch(1))
    assert store.checkpoints.epochs() == [1]
    assert store.checkpoints.load_record(store.checkpoints.load_manifest(Epoch(1)), TOTALS) == record


def test_discarding_what_is_not_there_does_nothing(store: LocalStore) -> None:
    store.checkpoints.discard(Epoch(7))
    assert store.checkpoints.epochs() == []


def test_a_snapshot_that_is_stored_while_its_epoch_is_discarded_is_let_go(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    """The coordinator aborts while an operator hashes; the operator discards again when it is done."""
    files = store.query_dirs.files_of(spark.root, BatchId(2))
    asked: list[str] = []

    class Paths(dict[str, Path]):
        def __getitem__(self, name: str) -> Path:
            asked.append(name)
            if len(asked) == 4:
                store.checkpoints.discard(Epoch(1))
            return spark.root / name

    store.checkpoints.store_files(HeldFiles(operator=TOTALS, epoch=Epoch(1), files=files, paths=Paths()))
    assert len(asked) > 4
    assert blobs(layout)
    store.checkpoints.discard(Epoch(1))
    keep_only(store)
    assert blobs(layout) == set()


# ------------------------------------------------------------------------------------------------- collecting


def test_collecting_keeps_what_is_reachable_and_nothing_else(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    first, second = checkpoint(store, spark, 1, 1), checkpoint(store, spark, 2, 2)
    assert keep_only(store, Epoch(2)) == [1]
    assert store.checkpoints.epochs() == [2]
    assert blobs(layout) == hashes(second)
    assert store.checkpoints.damage(second) == []
    assert store.checkpoints.damage(first)
    assert not layout.checkpoint(Epoch(1)).exists()


def test_collecting_everything_that_is_kept_changes_nothing(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    records = [checkpoint(store, spark, 1, 1), checkpoint(store, spark, 2, 2)]
    before = content_of(layout.root)
    assert keep_only(store, Epoch(1), Epoch(2)) == []
    assert content_of(layout.root) == before
    assert blobs(layout) == hashes(*records)


def test_content_of_pending_epochs_survives(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    checkpoint(store, spark, 1, 0)
    spark.run(3, state="only in the pending epoch")
    pending = record_of(store, spark, 3, 3)
    keep_only(store, Epoch(1))
    assert store.checkpoints.damage(pending) == []
    store.checkpoints.store_manifest(manifest_of(store, pending))
    keep_only(store, Epoch(3))
    assert store.checkpoints.damage(pending) == []
    assert blobs(layout) == hashes(pending)


def test_a_pending_epoch_that_shares_content_with_one_that_goes_keeps_it(store: LocalStore, spark: SparkDir) -> None:
    checkpoint(store, spark, 1, 2)
    checkpoint(store, spark, 2, 0)
    pending = record_of(store, spark, 3, 2)
    keep_only(store, Epoch(2))
    assert store.checkpoints.damage(pending) == []


def test_an_epoch_that_completes_while_old_ones_are_collected_is_whole(
    store: LocalStore, spark: SparkDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector has read all manifests; now the manifest is stored; then the collector deletes."""
    checkpoint(store, spark, 1, 0)
    spark.run(3, state="only in the new epoch")
    pending = record_of(store, spark, 2, 3)
    manifest = manifest_of(store, pending)
    load = LocalCheckpointStore.load_record
    overtaken: list[bool] = []

    def complete_meanwhile(self: LocalCheckpointStore, of: Manifest, operator: OperatorId) -> OperatorRecord:
        record = load(self, of, operator)
        if not overtaken:
            overtaken.append(store.checkpoints.store_manifest(manifest) == manifest)
        return record

    monkeypatch.setattr(LocalCheckpointStore, "load_record", complete_meanwhile)
    keep_only(store, Epoch(1))
    monkeypatch.undo()
    assert overtaken == [True]
    assert store.checkpoints.epochs() == [1, 2]
    assert store.checkpoints.damage(pending) == []


def test_collecting_while_checkpoints_complete_loses_nothing(store: LocalStore, spark: SparkDir) -> None:
    done = threading.Event()
    failures: list[BaseException] = []

    def collect_on() -> None:
        while not done.is_set():
            try:
                collect(store, store.checkpoints.epochs()[:-2])
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
                return

    collector = threading.Thread(target=collect_on)
    collector.start()
    try:
        for epoch in range(1, 15):
            spark.run(2 + epoch, state=f"of epoch {epoch}")
            record = checkpoint(store, spark, epoch, 2 + epoch)
            assert store.checkpoints.damage(record) == []
    finally:
        done.set()
        collector.join()
    assert failures == []


def test_collecting_killed_in_the_middle_of_an_epoch_leaves_nothing_of_it_and_is_finished_by_the_next(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    for epoch, batch in ((1, 0), (2, 1), (3, 2)):
        checkpoint(store, spark, epoch, batch)
    third = store.checkpoints.load_record(store.checkpoints.load_manifest(Epoch(3)), TOTALS)
    for left in ([2, 3], [3]):
        assert is_killed_at("mid-collect", lambda: keep_only(store, Epoch(3)))
        # Not a record without its manifest: it would look like a checkpoint that has lost it.
        assert sorted(int(path.name) for path in layout.checkpoints.iterdir() if path.name.isdigit()) == left
        assert len(list(layout.checkpoints.glob(".tmp-*"))) == 1
        assert LocalStore.open(layout, ReplayGuard()).checkpoints.epochs() == left
        assert LocalStore.open(layout, ReplayGuard()).checkpoints.damage(third) == []
    assert keep_only(LocalStore.open(layout, ReplayGuard()), Epoch(3)) == []
    assert blobs(layout) == hashes(third)
    assert [int(path.name) for path in layout.checkpoints.iterdir()] == [3]


def test_collecting_with_an_unreadable_manifest_deletes_no_content(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    """What it reaches is not known; keeping too much is the safe side."""
    checkpoint(store, spark, 1, 0)
    second = checkpoint(store, spark, 2, 1)
    third = checkpoint(store, spark, 3, 2)
    flip(layout.manifest(Epoch(2)))
    before = blobs(layout)
    with pytest.raises(DamagedRecordError):
        keep_only(store, Epoch(2), Epoch(3))
    assert blobs(layout) == before
    assert store.checkpoints.damage(second) == store.checkpoints.damage(third) == []


def test_records_of_later_pending_epochs_stay(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    checkpoint(store, spark, 1, 0)
    checkpoint(store, spark, 2, 1)
    record_of(store, spark, 3, 2)
    keep_only(store, Epoch(2))
    assert layout.record(Epoch(3), TOTALS, Generation(1)).exists()
    assert not layout.checkpoint(Epoch(1)).exists()


def test_folders_of_others_do_not_stop_the_collection(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    checkpoint(store, spark, 1, 0)
    checkpoint(store, spark, 2, 1)
    (layout.checkpoints / "lost+found").mkdir()
    assert keep_only(store, Epoch(2)) == [1]


# ------------------------------------------------------------------------------------------------- starting


def test_a_new_process_clears_pins_and_keeps_everything_else(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    record = checkpoint(store, spark, 1, 1)
    store.checkpoints.hold(TOTALS, Epoch(2), spark.root, store.query_dirs.files_of(spark.root, BatchId(2)))
    again = LocalStore.open(layout, ReplayGuard())
    assert list(layout.pins.iterdir()) == []
    assert again.checkpoints.damage(record) == []


def test_what_a_dead_process_had_claimed_is_collected(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    kept = checkpoint(store, spark, 1, 0)
    record_of(store, spark, 2, 2)
    keep_only(LocalStore.open(layout, ReplayGuard()), Epoch(1))
    assert blobs(layout) == hashes(kept)


def test_a_generation_is_created_once_and_the_first_stays(store: LocalStore) -> None:
    record: GenerationRecord = stored_records.EXAMPLES["generation"]
    assert store.generations.create(record)
    assert not store.generations.create(record)
    assert store.generations.load_all() == [record]


def test_generations_come_in_ascending_order(store: LocalStore, layout: Layout) -> None:
    record: GenerationRecord = stored_records.EXAMPLES["generation"]
    for number in (2, 9, 10):
        assert store.generations.create(replace(record, generation=Generation(number)))
    assert not store.generations.create(replace(record, generation=Generation(5))), "a newer one has taken over"
    (layout.generations / ".tmp-000011.json-beef").write_bytes(b"{")
    assert [one.generation for one in store.generations.load_all()] == [2, 9, 10]


def test_a_file_of_a_snapshot_is_named_in_what_is_wrong_with_it(store: LocalStore, spark: SparkDir) -> None:
    record = record_of(store, spark, 1, 1)
    stray = SnapshotFile(path="state/0/0/9.delta", sha256="0" * 64, size_bytes=1)
    assert store.checkpoints.damage(replace(record, shared=[stray])) == [
        "state/0/0/9.delta: blob 000000000000 is missing"
    ]


# ------------------------------------------------------------------------------------------------- small files


def test_inline_files_are_restored_from_the_record_alone(
    store: LocalStore, layout: Layout, spark: SparkDir, tmp_path: Path
) -> None:
    record = checkpoint(store, spark, 1, 1)
    assert {file.path for file in record.shared} >= {"offsets/1", "commits/1", "metadata"}
    assert all(file.content is not None for file in record.shared)
    assert blobs(layout) == {file.sha256 for subtask in record.subtasks for file in subtask.files}
    loaded = store.checkpoints.load_record(store.checkpoints.load_manifest(Epoch(1)), TOTALS)
    store.query_dirs.restore(loaded, tmp_path / "restored")
    taken = content_of(spark.root)
    assert {name: taken[name] for name in content_of(tmp_path / "restored")} == content_of(tmp_path / "restored")


def test_inline_content_that_does_not_match_its_hash_is_damage(store: LocalStore, spark: SparkDir) -> None:
    record = checkpoint(store, spark, 1, 1)
    assert store.checkpoints.damage(record) == []
    spoiled = replace(record, shared=[replace(record.shared[0], content=b"something else"), *record.shared[1:]])
    [problem] = store.checkpoints.damage(spoiled)
    assert record.shared[0].path in problem


def test_a_collection_reads_only_epochs_that_it_has_not_seen(
    store: LocalStore, layout: Layout, spark: SparkDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be hundreds of epochs, and each checkpoint is followed by a collection."""
    kept = [checkpoint(store, spark, epoch, 0) for epoch in range(1, 6)]
    read: list[str] = []
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path.parent.name)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    collect(store, [])
    assert {"000000000001", "000000000005"} <= set(read)
    read.clear()
    newest = checkpoint(store, spark, 6, 1)
    assert collect(store, [Epoch(5)]) == [5]
    assert set(read) <= {"000000000005", "000000000006"}
    assert blobs(layout) == hashes(*kept, newest)


def test_content_of_an_aborted_epoch_goes_with_the_next_collection(
    store: LocalStore, layout: Layout, spark: SparkDir
) -> None:
    kept = checkpoint(store, spark, 1, 0)
    collect(store, [])
    record_of(store, spark, 2, 2)
    assert blobs(layout) > hashes(kept)
    store.checkpoints.discard(Epoch(2))
    collect(store, [])
    assert blobs(layout) == hashes(kept)


def test_a_collection_that_fails_is_made_up_for(store: LocalStore, layout: Layout, spark: SparkDir) -> None:
    checkpoint(store, spark, 1, 0)
    collect(store, [])
    kept = checkpoint(store, spark, 2, 2)
    fenced = iter([None, None])

    def check() -> None:
        """The epoch is gone, its content is not."""
        if next(fenced, "fenced"):
            raise DamagedRecordError("another process runs the flow")

    with pytest.raises(DamagedRecordError):
        store.checkpoints.collect([Epoch(1)], Epoch(9), check)
    assert blobs(layout) > hashes(kept)
    collect(store, [])
    assert blobs(layout) == hashes(kept)
