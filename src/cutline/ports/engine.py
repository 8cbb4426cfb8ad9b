"""The engine port: what runs an operator's query and moves its rows. The one real engine is Spark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cutline.model.ids import BatchId, FlowName, Generation, OperatorId, Position, SinkId
from cutline.ports.sinks import Piece, Stager
from cutline.protocol.history.lineage import Lineage


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """An Arrow IPC file with rows of one batch, written by one task."""

    #: File name inside the channel's data folder.
    name: str
    rows: int
    size_bytes: int
    crc32: int


class SegmentPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the segments of a channel are: a folder, or a place in an object store."""

    url: str
    #: What the object store's client needs beside the environment.
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
    #: Arrow schema in which the rows are stored; Spark may hand them over with other time zones.
    schema_ipc: bytes
    #: None: nobody reads this channel, only sinks want the rows.
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
        """Compute the rows and drop them, so that the state advances."""
        ...


#: Called by the engine for every batch, in order; raising fails the query.
BatchHandler = Callable[[StreamingBatch], None]


class PlannedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source outside of the flow that an operator's function reads, as it is set up now."""

    #: As Spark calls it: "json", "rate", "cutline_nats".
    format: str
    #: Of Spark's file sources the folder, with its scheme unless it is on this file system; of all others empty.
    folder: str = ""
    #: As JSON, what its rows depend on and nothing else; only of sources that keep no rows.
    settings: bytes | None = None


class OperatorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has found out about an operator before anything runs."""

    operator: OperatorId
    subtasks: int
    is_stateful: bool
    #: Arrow schema of the rows, as an IPC message.
    schema_ipc: bytes
    #: What it reads from outside of the flow, each once.
    sources: tuple[PlannedSource, ...] = ()


class Query(Protocol):
    """A running query."""

    def is_active(self) -> bool: ...

    def is_idle(self) -> bool:
        """Whether it runs no batch and has nothing to run."""
        ...

    def failure(self) -> str | None:
        """The whole error that ended the query, or None."""
        ...

    def stop(self) -> None:
        """Stop now; the batch under way is cancelled and will be re-run by the next start."""
        ...

    def wait_processed(self) -> None:
        """Wait until everything that the query's sources have now is processed, or until the query has ended."""
        ...

    def progress(self) -> dict[str, Any]:
        """Figures of the newest batch, for people."""
        ...


class LiveDirs(Protocol):
    """Live directories of Spark that lie elsewhere; what is in the flow's folder is a mirror of them.

    Raises StoreError when the file system fails, FileNotFoundError for a file that is not there.
    """

    def url(self, mirror: Path) -> str:
        """Where Spark has it."""
        ...

    def read(self, mirror: Path, name: str) -> bytes: ...

    def has(self, mirror: Path, name: str) -> bool: ...

    def fetch(self, mirror: Path) -> None:
        """Bring the mirror up to date; does nothing while the mirror has not been put in place."""
        ...

    def publish(self, mirror: Path) -> None:
        """Put the mirror in place, unless it is: a query is about to start on it. Older ones of its operator go.

        Raises DamagedRecordError if it was put there and is gone.
        """
        ...

    def keep(self, operators: Collection[OperatorId]) -> None:
        """Those of all other operators may go."""
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
        """Tell the operator's reader how far it may read a channel, and where a query begins that has read nothing."""
        ...

    def expect_restarts(self, operator: OperatorId, are_expected: bool) -> None:
        """Its query ends now and then only to be started again: what Spark says about that is not worth a line."""
        ...

    def begin_stop(self) -> None:
        """The queries are about to be stopped on purpose: what Spark says about that is not worth a line."""
        ...

    def close(self) -> None: ...
