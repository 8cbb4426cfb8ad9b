"""The suite that every query directory adapter must pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import pytest

from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import OperatorRecord
from cutline.model.ids import NO_BATCH, BatchId
from cutline.ports.query_dir import QueryDir


class QueryDirCase(Protocol):
    """An adapter and a query that runs in its directories."""

    @property
    def query_dirs(self) -> QueryDir: ...

    def run(self, spark_checkpoint_dir: Path, batch: int) -> None:
        """The query plans and finishes a batch."""
        ...

    def plan(self, spark_checkpoint_dir: Path, batch: int) -> None:
        """The query plans a batch and is killed."""
        ...

    def record(self, spark_checkpoint_dir: Path, batch: int) -> OperatorRecord:
        """A stored snapshot after a batch."""
        ...


class QueryDirConformance(ABC):
    @abstractmethod
    def make_case(self, tmp_path: Path) -> QueryDirCase: ...

    @pytest.fixture
    def case(self, tmp_path: Path) -> QueryDirCase:
        return self.make_case(tmp_path)

    @pytest.fixture
    def folder(self, tmp_path: Path, case: QueryDirCase) -> Path:
        """Three batches were run in it."""
        folder = tmp_path / "spark" / "totals" / "g000001"
        for batch in range(3):
            case.run(folder, batch)
        return folder

    # ------------------------------------------------------------------ a query that ran

    def test_a_batch_is_committed_when_the_query_has_finished_it(self, case: QueryDirCase, folder: Path) -> None:
        case.plan(folder, 3)
        asked = [case.query_dirs.is_committed(folder, BatchId(batch)) for batch in (NO_BATCH, 0, 2, 3)]
        assert asked == [True, True, True, False]
        assert case.query_dirs.last_committed(folder) == 2

    def test_where_no_query_ran_nothing_is_committed(self, case: QueryDirCase, tmp_path: Path) -> None:
        case.query_dirs.begin_anew(tmp_path / "empty")
        assert case.query_dirs.last_committed(tmp_path / "empty") == NO_BATCH
        assert case.query_dirs.live_damage(tmp_path / "empty", NO_BATCH, NO_BATCH) == []

    def test_an_older_batch_has_its_own_files(self, case: QueryDirCase, folder: Path) -> None:
        older, newer = (set(case.query_dirs.files_of(folder, BatchId(batch)).names()) for batch in (1, 2))
        assert "commits/1" in older and "commits/2" in newer
        assert "commits/2" not in older

    def test_a_batch_that_was_not_finished_has_no_files(self, case: QueryDirCase, folder: Path) -> None:
        with pytest.raises(DamagedRecordError):
            case.query_dirs.files_of(folder, BatchId(7))

    # ------------------------------------------------------------------ a directory and its log

    @pytest.mark.parametrize(("last_appended", "is_sound"), [(1, False), (2, True), (3, True), (4, False)])
    def test_the_log_may_be_ahead_by_a_planned_batch(
        self, case: QueryDirCase, folder: Path, last_appended: int, is_sound: bool
    ) -> None:
        case.plan(folder, 3)
        damage = case.query_dirs.live_damage(folder, BatchId(last_appended), BatchId(1))
        assert (damage == []) is is_sound

    def test_a_directory_behind_a_checkpoint_is_damaged_unless_it_may_be(
        self, case: QueryDirCase, folder: Path
    ) -> None:
        assert case.query_dirs.live_damage(folder, BatchId(5), BatchId(4))
        assert case.query_dirs.live_damage(folder, BatchId(5), BatchId(4), may_be_behind=True) == []

    def test_a_directory_that_is_gone_is_damaged(self, case: QueryDirCase, tmp_path: Path) -> None:
        assert case.query_dirs.live_damage(tmp_path / "gone", BatchId(2), BatchId(2))
        assert case.query_dirs.live_damage(tmp_path / "gone", BatchId(2), NO_BATCH, may_be_behind=True)

    # ------------------------------------------------------------------ plans

    def test_a_plan_is_put_back_byte_for_byte(self, case: QueryDirCase, folder: Path) -> None:
        case.plan(folder, 3)
        plan = case.query_dirs.plan_of(folder, BatchId(3))
        restored = folder.with_name("g000002")
        case.query_dirs.restore(case.record(folder, 2), restored)
        case.query_dirs.put_plan(restored, BatchId(3), plan)
        assert case.query_dirs.plan_of(restored, BatchId(3)) == plan
        assert case.query_dirs.last_committed(restored) == 2
        case.query_dirs.commit_plan(restored, BatchId(3))
        assert case.query_dirs.last_committed(restored) == 3

    def test_what_was_not_planned_has_no_plan(self, case: QueryDirCase, folder: Path) -> None:
        with pytest.raises(DamagedRecordError):
            case.query_dirs.plan_of(folder, BatchId(9))

    # ------------------------------------------------------------------ preparing a directory

    def test_a_restored_directory_continues_after_the_batch(self, case: QueryDirCase, folder: Path) -> None:
        restored = folder.with_name("g000002")
        for batch in (2, 1):  # the second restore starts from nothing
            case.query_dirs.restore(case.record(folder, batch), restored)
            assert case.query_dirs.last_committed(restored) == batch
            assert case.query_dirs.live_damage(restored, BatchId(batch), BatchId(batch)) == []
            wanted = case.query_dirs.files_of(folder, BatchId(batch))
            assert case.query_dirs.files_of(restored, BatchId(batch)) == wanted
        assert case.query_dirs.last_committed(folder) == 2, "the live directory is unchanged"

    def test_beginning_anew_leaves_nothing(self, case: QueryDirCase, folder: Path) -> None:
        case.query_dirs.begin_anew(folder)
        assert case.query_dirs.last_committed(folder) == NO_BATCH
        assert not case.query_dirs.is_committed(folder, BatchId(0))

    # ------------------------------------------------------------------ input

    def test_without_sources_no_input_is_lost(self, case: QueryDirCase, folder: Path) -> None:
        record = case.record(folder, 1)
        assert case.query_dirs.lost_input(record, folder) == []
        assert case.query_dirs.lost_ahead(record.operator, folder) == []
        case.query_dirs.begin_as_before(folder.with_name("g000002"), folder)
        restored = folder.with_name("g000003")
        case.query_dirs.restore(record, restored)
        case.query_dirs.skip_lost_input(restored, folder)
        assert case.query_dirs.last_committed(restored) == 1
