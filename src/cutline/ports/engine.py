"""The engine port: what runs an operator's query and moves its rows. The one real engine is Spark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from cutline.model.entries import Segment
from cutline.model.ids import BatchId, FlowName, Generation, OperatorId, Position, SinkId
from cutline.model.plan import OperatorPlan
from cutline.model.staging import Piece
from cutline.ports.sinks import Stager
from cutline.protocol.history.lineage import Lineage


class SegmentPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the segments of a channel are: a folder, or a place in an object store."""

    url: str
    #: Settings of the object store's client beside the environment.
    options: dict[str, str] = {}

    @property
    def is_folder(self) -> bool:
        return "://" not in self.url


class StageJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the executors do with the rows of a batch: write segments for consumers, stage output for sinks."""

    flow: FlowName
    operator: OperatorId
    generation: Generation
    batch: BatchId
    #: Arrow schema in which the rows are stored; Spark may pass them with other time zones.
    schema_ipc: bytes
    #: None: no operator reads this channel; only sinks need the rows.
    segments: SegmentPlace | None
    stagers: dict[SinkId, Stager]


class StagedTask(msgspec.Struct, frozen=True, kw_only=True):
    """What one task reports."""

    rows: int
    segment: Segment | None
    pieces: dict[SinkId, list[Piece]]


class StreamingBatch(Protocol):
    """A micro-batch that the engine has planned: its rows are there to be computed."""

    @property
    def batch(self) -> BatchId: ...

    def positions(self) -> Mapping[OperatorId, Position]:
        """How far this batch reads each input channel."""
        ...

    def watermark_ms(self) -> int:
        """Event-time watermark that this batch runs with; 0 without one."""
        ...

    def stage(self, job: StageJob) -> list[StagedTask]:
        """Compute the rows and write them, on the executors. Durable when it returns."""
        ...

    def run_to_end(self) -> None:
        """Compute the rows and ignore them, so that the state advances."""
        ...


#: Called by the engine for every batch, in order; raising fails the query.
BatchHandler = Callable[[StreamingBatch], None]


class Query(Protocol):
    """A running query."""

    def is_active(self) -> bool: ...

    def is_idle(self) -> bool:
        """Whether it runs no batch and has nothing to run."""
        ...

    def failure(self) -> str | None:
        """The whole trace of the error that ended the query; None: no error."""
        ...

    def stop(self) -> None:
        """Stop now and cancel the batch under way; the next start runs it again."""
        ...

    def wait_processed(self) -> None:
        """Wait until everything that the query's sources have now is processed, or until the query has ended."""
        ...

    def state_bytes(self) -> int | None:
        """How much state the query keeps, after its newest batch; None: no state, or not known. Never raises."""
        ...


class LiveDirs(Protocol):
    """Spark's live directories outside of the flow's folder; the flow's folder holds mirrors of them.

    Raises StoreError when the file system fails, FileNotFoundError for a file that is not there.
    """

    def url(self, mirror: Path) -> str:
        """Where Spark keeps the directory."""
        ...

    def read(self, mirror: Path, name: str) -> bytes: ...

    def has(self, mirror: Path, name: str) -> bool: ...

    def fetch(self, mirror: Path) -> None:
        """Bring the mirror up to date; does nothing until the mirror has been published."""
        ...

    def publish(self, mirror: Path) -> None:
        """Copy the mirror to its place unless it is there: a query is about to start on it. Deletes the operator's
        older directories.

        Raises DamagedRecordError if the directory was published and is missing.
        """
        ...

    def keep(self, operators: Collection[OperatorId]) -> None:
        """Delete the directories of all other operators."""
        ...


class Engine(Protocol):
    """Plans and starts queries."""

    def live_dirs(self) -> LiveDirs | None:
        """None: Spark's directories lie in the flow's folder."""
        ...

    def plan(self) -> dict[OperatorId, OperatorPlan]:
        """Build every operator's query, in the order of the graph, and check that it can run. Starts nothing."""
        ...

    def start(self, operator: OperatorId, spark_checkpoint_dir: Path, handler: BatchHandler) -> Query: ...

    def set_gate(
        self, operator: OperatorId, channel: OperatorId, admit: Position, lineage: Lineage, first: Position
    ) -> None:
        """Tell the operator's reader how far it may read a channel, and where a new query begins."""
        ...

    def expect_restarts(self, operator: OperatorId, are_expected: bool) -> None:
        """The operator's query ends from time to time and is restarted: Spark's log lines about that are suppressed."""
        ...

    def begin_stop(self) -> None:
        """The queries are about to be stopped on purpose: Spark's log lines about that are suppressed."""
        ...

    def close(self) -> None: ...
