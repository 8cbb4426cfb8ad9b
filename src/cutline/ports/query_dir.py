"""The query directory port: reads and prepares the directory that a Spark query runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from cutline.model.checkpoint import OperatorRecord
from cutline.model.generation import LostInput
from cutline.model.ids import BatchId, OperatorId, Subtask


class FileSet(msgspec.Struct, frozen=True, kw_only=True):
    """The exact files that a query needs to start after ``batch``: paths relative to its spark_checkpoint_dir."""

    batch: BatchId
    #: State files, per subtask (state partition).
    subtasks: dict[Subtask, list[str]]
    #: Everything that belongs to the query as a whole: metadata, offsets, commits, schemas, source logs.
    shared: list[str]
    #: Event-time watermark that the next batch starts with; 0 when there is none.
    watermark_ms: int = 0

    def names(self) -> list[str]:
        return [*self.shared, *(name for subtask in self.subtasks.values() for name in subtask)]


class QueryDir(Protocol):
    """Reads and prepares the directories of one flow's queries. Each method takes the directory as an argument."""

    # ---- a query that runs, or ran, in the directory
    def is_committed(self, spark_checkpoint_dir: Path, batch: BatchId) -> bool:
        """Whether Spark has finished the batch, so that its state files are final."""
        ...

    def last_committed(self, spark_checkpoint_dir: Path) -> BatchId:
        """The last batch that the query has finished; NO_BATCH if none."""
        ...

    def files_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> FileSet:
        """The exact files of a snapshot after ``batch``."""
        ...

    def live_damage(
        self, spark_checkpoint_dir: Path, last_appended: BatchId, complete: BatchId, *, may_be_behind: bool = False
    ) -> list[str]:
        """Why a query cannot continue in this directory, given the last batch in its log; empty when it can.

        ``complete``: the operator's cut batch in the newest complete epoch. ``may_be_behind``: the directory may be
        behind the log by any number of batches, which the query runs again from the log.
        """
        ...

    # ---- running batches of the log again
    def plan_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> dict[str, bytes]:
        """The query's plan of a batch, byte for byte. Raises DamagedRecordError if there is none."""
        ...

    def put_plan(self, spark_checkpoint_dir: Path, batch: BatchId, plan: Mapping[str, bytes]) -> None:
        """Make the next query that starts in this directory run ``batch`` exactly as planned."""
        ...

    def commit_plan(self, spark_checkpoint_dir: Path, batch: BatchId) -> None:
        """Mark a planned batch of a stateless query as finished."""
        ...

    # ---- preparing a directory
    def begin_anew(self, spark_checkpoint_dir: Path) -> None:
        """Make an empty directory, in which a query begins with its first batch."""
        ...

    def restore(self, record: OperatorRecord, spark_checkpoint_dir: Path) -> None:
        """Build a fresh directory that continues after the record's batch."""
        ...

    def begin_as_before(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        """Make a query that starts here with its first batch read from the position at which it first began.

        ``live_dir``: the directory that the query has run on since, which records that position.
        """
        ...

    def record_sources(self, operator: OperatorId, spark_checkpoint_dir: Path) -> None:
        """Record, before the query starts, what the offsets of its sources do not say: it becomes part of snapshots."""
        ...

    # ---- lost input
    def lost_input(self, record: OperatorRecord, live_dir: Path) -> list[LostInput]:
        """What a source has read since the record, by its live directory, and cannot reread.

        Raises DamagedRecordError if the record lacks the source's position, StoreError if a server does not answer.
        """
        ...

    def lost_ahead(self, operator: OperatorId, spark_checkpoint_dir: Path) -> list[LostInput]:
        """What a query that continues in this directory would read next but cannot. Raises StoreError."""
        ...

    def skip_lost_input(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        """Make a query that starts here continue with the earliest input that its sources still have.

        ``live_dir``: the directory that the query has run on, which may hold the sources' newest addresses.
        """
        ...
