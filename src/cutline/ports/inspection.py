"""The inspection port: what ``cutline verify`` needs to inspect a flow that it does not run. Nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.ids import Epoch, Generation, OperatorId, SinkId


class FileProblem(NamedTuple):
    """One file, or a range of a log that a source reads, and what is wrong with it."""

    #: For a log, its name and the range: "stream ORDERS: sequences 120 to 340".
    path: str
    problem: str
    #: Number of files or messages concerned, as far as known.
    parts: int = 1


class SourceReport(NamedTuple):
    """Whether a source can reread what it has read since a checkpoint."""

    problems: Sequence[FileProblem] = ()
    #: Human-readable notes on what cannot be checked from here.
    notes: Sequence[str] = ()


class PartitionProgress(NamedTuple):
    """How far a partition of a source was read."""

    name: str
    #: The next number to read, and the next that the source will assign.
    position: int
    end: int


class Expiry(NamedTuple):
    """Until when a source certainly, or probably, keeps what a position needs."""

    #: None: no end is in sight.
    at_ms: int | None
    #: What ends it: "retention.ms of topic orders".
    limit: str = ""


class SourceProgress(NamedTuple):
    """What a source's server says about positions in it."""

    #: "topic orders".
    what: str
    #: At the newest position.
    partitions: Sequence[PartitionProgress] = ()
    #: Of each position that was asked about.
    expiries: Sequence[Expiry] = ()


class CompletedEpoch(NamedTuple):
    """A checkpoint that the coordinator's records call complete; it may have been released since."""

    epoch: Epoch
    generation: Generation
    operators: frozenset[OperatorId]


class CoordinatorRecords(NamedTuple):
    """What the coordinator's database says, as far as it can be read."""

    problem: str | None = None
    completed: Sequence[CompletedEpoch] = ()
    pins: frozenset[Epoch] = frozenset()
    #: Number of generations created since the database exists.
    recoveries: int = 0
    #: Epochs from here on have no outcome yet, or have not begun; 0: unknown.
    open_from: Epoch = Epoch(0)
    #: The newest generation number that this host has taken, even if its record was never created; 0: unknown.
    generation: Generation = Generation(0)
    #: The newest epoch that each sink has published, and the newest one with rows that it was told to publish.
    published: Mapping[SinkId, Epoch] = {}
    seen: Mapping[SinkId, Epoch] = {}


class SnapshotInspector(Protocol):
    """Inspects the stored checkpoints of one flow."""

    def epochs(self) -> list[Epoch]:
        """Epochs that have a manifest, readable or not, ascending. Those with a tombstone have none."""
        ...

    def load_manifest(self, epoch: Epoch) -> Manifest: ...

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord: ...

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        """The operators that have stored a record for an epoch, by the names of the records."""
        ...

    def file_damage(self, file: SnapshotFile, *, deep: bool) -> str | None:
        """What is wrong with a stored file; not ``deep``: only the size of a blob is checked."""
        ...

    def incomplete(self, record: OperatorRecord) -> list[FileProblem]:
        """What a query that starts from exactly these files would miss. The files exist, with the right sizes."""
        ...

    def sources(self, record: OperatorRecord, live_dir: Path | None) -> SourceReport:
        """Whether the sources can reread what came after the checkpoint.

        ``live_dir``: the directory that the operator runs on now; None: unknown.
        """
        ...
