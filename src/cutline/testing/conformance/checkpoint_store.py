"""The suite that every checkpoint store must pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from msgspec.structs import replace

from cutline.errors import DamagedRecordError, FencedError
from cutline.model.checkpoint import ChannelCut, Manifest, OperatorCut, OperatorRecord, SubtaskCut, Tombstone
from cutline.model.cut import Timings
from cutline.model.ids import NO_EPOCH, START, BatchId, Epoch, FlowName, Generation, OperatorId, Position, Subtask
from cutline.ports.checkpoint_store import CheckpointStore, StoredRecord
from cutline.ports.query_dir import FileSet

TOTALS = OperatorId("totals")


class CheckpointStoreConformance(ABC):
    """Subclasses open an empty store; the suite itself writes the files of a query's directory."""

    @abstractmethod
    def make_store(self, tmp_path: Path) -> CheckpointStore: ...

    @pytest.fixture
    def store(self, tmp_path: Path) -> CheckpointStore:
        return self.make_store(tmp_path)

    @pytest.fixture
    def query_dir(self, tmp_path: Path) -> Path:
        return tmp_path / "query"

    # ------------------------------------------------------------------ taking a snapshot

    def test_held_files_outlive_the_querys_own_clean_up(self, store: CheckpointStore, query_dir: Path) -> None:
        files = write_files(query_dir, 1)
        held = store.hold(TOTALS, Epoch(1), query_dir, files)
        for name in files.names():
            (query_dir / name).unlink()
        subtasks, shared = store.store_files(held)
        assert [one.path for one in subtasks[0].files] == files.subtasks[Subtask(0)]
        assert sorted(one.path for one in shared) == sorted(files.shared)

    def test_a_file_that_is_gone_before_it_is_held_is_damage(self, store: CheckpointStore, query_dir: Path) -> None:
        files = write_files(query_dir, 1)
        (query_dir / files.names()[-1]).unlink()
        with pytest.raises(DamagedRecordError):
            store.hold(TOTALS, Epoch(1), query_dir, files)

    def test_content_is_stored_once(self, store: CheckpointStore, query_dir: Path) -> None:
        first, second = snapshot(store, query_dir, 1), snapshot(store, query_dir, 2)
        assert first.subtasks[0].new_bytes == first.subtasks[0].size_bytes > 0
        assert 0 < second.subtasks[0].new_bytes < second.subtasks[0].size_bytes

    def test_a_record_is_never_changed(self, store: CheckpointStore, query_dir: Path) -> None:
        record = snapshot(store, query_dir, 1)
        again = store.store_record(replace(record, watermark_ms=99))
        assert again.record == record
        assert again == store.find_record(record.epoch, TOTALS, record.generation)

    def test_every_generation_has_a_record_of_its_own(self, store: CheckpointStore, query_dir: Path) -> None:
        record = snapshot(store, query_dir, 1)
        assert store.find_record(record.epoch, TOTALS, Generation(2)) is None
        other = replace(record, generation=Generation(2), watermark_ms=99)
        assert store.store_record(other).record == other
        assert store.recorded(Epoch(1)) == {TOTALS}

    # ------------------------------------------------------------------ ending an epoch

    def test_an_epoch_exists_only_with_its_manifest(self, store: CheckpointStore, query_dir: Path) -> None:
        record = snapshot(store, query_dir, 1)
        assert store.epochs() == []
        with pytest.raises(DamagedRecordError):
            store.load_manifest(Epoch(1))
        manifest = manifest_of(store, record)
        assert store.store_manifest(manifest) == manifest
        assert store.epochs() == [1]
        assert store.load_manifest(Epoch(1)) == manifest
        assert store.load_record(manifest, TOTALS) == record
        assert store.damage(record) == []

    def test_the_first_manifest_stays(self, store: CheckpointStore, query_dir: Path) -> None:
        manifest = complete(store, query_dir, 1)
        assert store.store_manifest(replace(manifest, completed_ms=9)) == manifest
        assert store.store_tombstone(tombstone(1)) == manifest

    def test_a_tombstone_bars_the_manifest_for_good(self, store: CheckpointStore, query_dir: Path) -> None:
        record = snapshot(store, query_dir, 1)
        manifest = manifest_of(store, record)
        assert store.store_tombstone(tombstone(1)) == tombstone(1)
        assert store.store_manifest(manifest) == tombstone(1)
        store.discard(Epoch(1))
        store.collect([Epoch(1)], Epoch(9))
        assert store.store_manifest(manifest) == tombstone(1)
        assert store.epochs() == []

    def test_discarding_removes_an_aborted_epoch_and_no_complete_one(
        self, store: CheckpointStore, query_dir: Path
    ) -> None:
        manifest = complete(store, query_dir, 1)
        snapshot(store, query_dir, 2)
        for epoch in (1, 2, 3):
            store.discard(Epoch(epoch))
        assert store.recorded(Epoch(2)) == frozenset()
        assert store.damage(store.load_record(manifest, TOTALS)) == []

    def test_a_record_that_the_manifest_does_not_name_is_refused(self, store: CheckpointStore, query_dir: Path) -> None:
        manifest = complete(store, query_dir, 1)
        cut = replace(manifest.operators[TOTALS], record_sha256="0" * 64)
        with pytest.raises(DamagedRecordError):
            store.load_record(replace(manifest, operators={TOTALS: cut}), TOTALS)
        with pytest.raises(DamagedRecordError):
            store.load_record(replace(manifest, epoch=Epoch(5)), TOTALS)

    # ------------------------------------------------------------------ collecting

    def test_collecting_keeps_all_that_the_others_need(self, store: CheckpointStore, query_dir: Path) -> None:
        manifests = [complete(store, query_dir, epoch) for epoch in (1, 2, 3)]
        gone = store.load_record(manifests[0], TOTALS)
        assert list(store.collect([Epoch(1), Epoch(7)], Epoch(4))) == [1]
        assert store.epochs() == [2, 3]
        for manifest in manifests[1:]:
            assert store.damage(store.load_record(manifest, TOTALS)) == []
        assert store.damage(gone), "content that only the first one had is gone"

    def test_a_pending_epoch_keeps_its_content(self, store: CheckpointStore, query_dir: Path) -> None:
        complete(store, query_dir, 1)
        record = snapshot(store, query_dir, 2)
        store.collect([Epoch(1)], Epoch(2))
        assert store.damage(record) == []
        assert isinstance(store.store_manifest(manifest_of(store, record)), Manifest)
        store.collect([], Epoch(3))
        assert store.damage(record) == []

    def test_content_of_an_aborted_epoch_goes(self, store: CheckpointStore, query_dir: Path) -> None:
        complete(store, query_dir, 1)
        record = snapshot(store, query_dir, 2)
        store.discard(Epoch(2))
        store.collect([], Epoch(3))
        assert store.damage(record)

    def test_an_inherited_epoch_leaves_a_tombstone(self, store: CheckpointStore, query_dir: Path) -> None:
        record = snapshot(store, query_dir, 1)
        manifest = replace(manifest_of(store, record), is_inherited=True)
        store.store_manifest(manifest)
        store.collect([Epoch(1)], Epoch(2))
        assert store.epochs() == []
        assert isinstance(store.store_manifest(manifest), Tombstone)

    def test_a_fenced_collector_deletes_nothing(self, store: CheckpointStore, query_dir: Path) -> None:
        manifest = complete(store, query_dir, 1)
        complete(store, query_dir, 2)

        def fenced() -> None:
            raise FencedError("another process has taken over")

        with pytest.raises(FencedError):
            store.collect([Epoch(1)], Epoch(3), fenced)
        with pytest.raises(FencedError):
            store.collect_unreferenced(Epoch(3), lambda *_: True, fenced)
        assert store.damage(store.load_record(manifest, TOTALS)) == []

    def test_what_no_manifest_names_is_asked_about_before_it_goes(
        self, store: CheckpointStore, query_dir: Path
    ) -> None:
        complete(store, query_dir, 1)
        orphan = snapshot(store, query_dir, 2)
        later = snapshot(store, query_dir, 3)
        store.discard(NO_EPOCH)
        store.store_record(replace(orphan, generation=Generation(2)))
        asked: list[str] = []

        def refuse(kind: str, _: Path) -> bool:
            asked.append(kind)
            return False

        store.collect_unreferenced(Epoch(3), refuse)
        assert "record" in asked
        assert store.recorded(Epoch(2)) == {TOTALS}
        store.collect_unreferenced(Epoch(3), lambda *_: True)
        assert store.recorded(Epoch(2)) == frozenset()
        assert store.damage(later) == []


def write_files(query_dir: Path, batch: int) -> FileSet:
    """The files of a directory after a batch: one old and one new state file."""
    content = {f"state/0/0/{number}.delta": b"state %d" % number * 500 for number in (batch, batch + 1)}
    shared = {"metadata": b"id", f"offsets/{batch}": b"offsets %d" % batch, f"commits/{batch}": b"commit %d" % batch}
    for name, data in (content | shared).items():
        path = query_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return FileSet(batch=BatchId(batch), subtasks={Subtask(0): sorted(content)}, shared=list(shared))


def snapshot(store: CheckpointStore, query_dir: Path, epoch: int) -> OperatorRecord:
    files = write_files(query_dir, epoch)
    subtasks, shared = store.store_files(store.hold(TOTALS, Epoch(epoch), query_dir, files))
    record = OperatorRecord(
        flow=FlowName("flow"),
        operator=TOTALS,
        epoch=Epoch(epoch),
        generation=Generation(1),
        batch=BatchId(epoch),
        barrier=Position(epoch),
        positions={},
        aligned=True,
        watermark_ms=0,
        subtasks=subtasks,
        shared=shared,
        sinks={},
        timings=Timings(),
    )
    assert store.store_record(record).record == record
    return record


def manifest_of(store: CheckpointStore, record: OperatorRecord) -> Manifest:
    stored = store.find_record(record.epoch, record.operator, record.generation)
    assert stored is not None
    return Manifest(
        flow=record.flow,
        epoch=record.epoch,
        generation=record.generation,
        previous_epoch=NO_EPOCH,
        started_ms=0,
        completed_ms=1,
        operators={record.operator: _cut(stored)},
        channels={record.operator: ChannelCut(barrier=record.barrier, lineage=[(Generation(1), START)], in_flight={})},
    )


def complete(store: CheckpointStore, query_dir: Path, epoch: int) -> Manifest:
    manifest = manifest_of(store, snapshot(store, query_dir, epoch))
    assert store.store_manifest(manifest) == manifest
    return manifest


def tombstone(epoch: int) -> Tombstone:
    return Tombstone(epoch=Epoch(epoch), generation=Generation(1), reason="timed out")


def _cut(stored: StoredRecord) -> OperatorCut:
    record = stored.record
    subtasks = [
        SubtaskCut(
            subtask=one.subtask, files=len(one.files), size_bytes=one.size_bytes, new_bytes=one.new_bytes, async_ms=0.0
        )
        for one in record.subtasks
    ]
    return OperatorCut(
        generation=record.generation,
        batch=record.batch,
        after_batch=BatchId(record.batch - 1),
        barrier=record.barrier,
        positions=record.positions,
        mode="aligned",
        watermark_ms=record.watermark_ms,
        record_sha256=stored.sha256,
        files=len(record.files()),
        size_bytes=sum(one.size_bytes for one in record.subtasks),
        new_bytes=sum(one.new_bytes for one in record.subtasks),
        start_delay_ms=0.0,
        alignment_ms=0.0,
        sync_ms=0.0,
        async_ms=0.0,
        total_ms=0.0,
        subtasks=subtasks,
    )
