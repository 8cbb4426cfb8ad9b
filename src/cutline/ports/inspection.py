"""The inspection port: what ``cutline verify`` needs to look at a flow that it does not run. Nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.ids import Epoch, Generation, OperatorId, SinkId


class FileProblem(NamedTuple):
    """One file, or a range of a log that a source reads, and what is wrong with it."""

    #: Of a log its name and the range: "stream ORDERS: sequences 120 to 340".
    path: str
    problem: str
    #: How many files or messages are concerned, as far as that is known.
    parts: int = 1


class SourceReport(NamedTuple):
    """Whether what a source has read since a checkpoint can be read again."""

    problems: Sequence[FileProblem] = ()
    #: What nobody can know from here, for people.
    notes: Sequence[str] = ()


class CompletedEpoch(NamedTuple):
    """A checkpoint that the coordinator's records call complete; it may have been let go of since."""

    epoch: Epoch
    generation: Generation
    operators: frozenset[OperatorId]


class CoordinatorRecords(NamedTuple):
    """What the coordinator's database says, as far as it can be read."""

    problem: str | None = None
    completed: Sequence[CompletedEpoch] = ()
    pins: frozenset[Epoch] = frozenset()
    #: How many generations have come into being since the database exists.
    recoveries: int = 0
    #: Epochs from here on have no outcome yet, or have not begun; 0 if that is not known.
    open_from: Epoch = Epoch(0)
    #: The newest that this host has taken, be it that it never came into being; 0 if that is not known.
    generation: Generation = Generation(0)
    #: How far each sink is, and the newest epoch with rows that it was told to publish.
    published: Mapping[SinkId, Epoch] = {}
    seen: Mapping[SinkId, Epoch] = {}


class SnapshotInspector(Protocol):
    """Looks at the stored checkpoints of one flow."""

    def epochs(self) -> list[Epoch]:
        """Epochs that have a manifest, readable or not, ascending. Those with a tombstone have none."""
        ...

    def load_manifest(self, epoch: Epoch) -> Manifest: ...

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord: ...

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        """Who has stored a record for an epoch, by the names of the records."""
        ...

    def file_damage(self, file: SnapshotFile, *, deep: bool) -> str | None:
        """What is wrong with a stored file; not ``deep``: a blob is only held against its size."""
        ...

    def incomplete(self, record: OperatorRecord) -> list[FileProblem]:
        """What a query would miss that starts from exactly these files. They are there, with their sizes."""
        ...

    def sources(self, record: OperatorRecord, live_dir: Path | None) -> SourceReport:
        """Whether the sources can read again what came after the checkpoint.

        ``live_dir``: the directory that the operator runs on now; None: unknown.
        """
        ...
