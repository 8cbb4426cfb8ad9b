"""The snapshot port: what is stored of a checkpoint, and the store that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.ports.sinks import StagedBatch
from cutline.protocol.messages.coordinator import Timings

#: (generation, first position) pairs; see ``cutline.protocol.history.lineage``.
Spans = list[tuple[Generation, Position]]


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One pinned file of a snapshot, by content."""

    #: Relative to the operator's spark_checkpoint_dir.
    path: str
    sha256: str
    size_bytes: int
    #: The content itself, for the small files that are new in every epoch; None: it is a blob.
    content: bytes | None = None


class FileSet(msgspec.Struct, frozen=True, kw_only=True):
    """The exact files that a query needs to start after ``batch``: paths relative to its spark_checkpoint_dir."""

    batch: BatchId
    #: State files, per subtask (state partition).
    subtasks: dict[Subtask, list[str]]
    #: Everything that belongs to the query as a whole: metadata, offsets, commits, schemas, source logs.
    shared: list[str]
    #: Event-time watermark that the next batch starts with; 0 when there is none.
    watermark_ms: int = 0


class SubtaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask's part of a snapshot."""

    subtask: Subtask
    files: list[SnapshotFile]
    size_bytes: int
    new_bytes: int
    #: Hashing and storing its files.
    async_ms: float = 0.0


class SinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink had staged at the cut and what it said in ``prepare``."""

    staged: list[StagedBatch]
    token: dict[str, Any]


class OperatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one operator contributes to one epoch: state and positions, in one atomic record, never changed.

    It holds all that the acknowledgement says, so that an operator can say it again.
    """

    flow: FlowName
    operator: OperatorId
    epoch: Epoch
    generation: Generation
    batch: BatchId
    barrier: Position
    positions: dict[OperatorId, Position]
    aligned: bool
    watermark_ms: int
    subtasks: list[SubtaskRecord]
    shared: list[SnapshotFile]
    sinks: dict[SinkId, SinkRecord]
    timings: Timings

    def files(self) -> list[SnapshotFile]:
        return [*self.shared, *(file for subtask in self.subtasks for file in subtask.files)]


class StoredRecord(NamedTuple):
    """An operator's record as it lies in the store."""

    record: OperatorRecord
    sha256: str


class SubtaskCut(msgspec.Struct, frozen=True, kw_only=True):
    """A subtask's figures in the manifest."""

    subtask: Subtask
    files: int
    size_bytes: int
    new_bytes: int
    async_ms: float


class OperatorCut(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's line in the manifest."""

    #: Whose record it is.
    generation: Generation
    batch: BatchId
    #: The cut of the complete epoch before this one: sinks publish what was staged since. Epochs before may be gone.
    after_batch: BatchId
    barrier: Position
    positions: dict[OperatorId, Position]
    #: As it was cut in the end, whatever was asked for.
    mode: Literal["aligned", "unaligned"]
    watermark_ms: int
    record_sha256: str
    files: int
    size_bytes: int
    new_bytes: int
    start_delay_ms: float
    alignment_ms: float
    sync_ms: float
    async_ms: float
    #: From the start of the epoch until the record was stored.
    total_ms: float
    subtasks: list[SubtaskCut]


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """Data between a consumer's position and the barrier: the channel's state at the cut."""

    first: Position
    end: Position
    entries: int
    rows: int
    size_bytes: int


class ChannelCut(msgspec.Struct, frozen=True, kw_only=True):
    """A channel at the cut."""

    barrier: Position
    lineage: Spans
    in_flight: dict[OperatorId, InFlight]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The durable record of a complete checkpoint; creating it is the commit point."""

    flow: FlowName
    epoch: Epoch
    generation: Generation
    previous_epoch: Epoch
    started_ms: int
    completed_ms: int
    #: An earlier coordinator had begun it: its place stays taken for good, also when the checkpoint is collected.
    is_inherited: bool = False
    #: It holds what this epoch held, under the names that the operators have had since; None: it was taken by the flow.
    #: It counts only once its generation has begun, because both are made by the start that goes back to that epoch.
    carried_from: Epoch | None = None
    operators: dict[OperatorId, OperatorCut]
    channels: dict[OperatorId, ChannelCut]


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """Stands in the place of a manifest that will never be: no older coordinator can create it afterwards."""

    epoch: Epoch
    #: Who has given the epoch up.
    generation: Generation
    reason: str


class LostInput(msgspec.Struct, frozen=True, kw_only=True):
    """Input that an operator would have read and that is gone; the flow went on without it, as it was told to."""

    operator: OperatorId
    #: A file, or a range: "stream ORDERS: sequences 120 to 340".
    what: str
    why: str
    #: How many files or messages, as far as that is known.
    parts: int


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of the flow. Created conditionally: of two that want the same number, one loses."""

    generation: Generation
    started_ms: int
    #: resume, alone, regional, local, remote or fresh.
    path: str
    #: The epoch the flow was restored to; None when nothing was restored.
    restored_epoch: Epoch | None
    reason: str
    #: Per channel: which generation's entries are visible where.
    lineage: dict[OperatorId, Spans]
    #: Per operator: the generation whose spark_checkpoint_dir it runs on.
    spark_dirs: dict[OperatorId, Generation]
    #: Per operator: its inputs, in the order in which Spark numbers its sources.
    inputs: dict[OperatorId, list[OperatorId]]
    #: Per operator: the Arrow schema of its rows, as base64 of the IPC message.
    schemas: dict[OperatorId, str]
    #: Checkpoints are of single operators; no line is drawn across the flow.
    is_per_operator: bool = False
    #: Operators whose log goes on from none of the same name before this generation: they were renamed, or are new.
    begun: dict[OperatorId, Generation] = {}
    #: Channels that nobody writes any more, because their operator was dropped or renamed, and which of their entries
    #: are of the history: checkpoints that are kept may need them.
    left: dict[OperatorId, Spans] = {}
    #: What its sources could not read again.
    lost_input: list[LostInput] = []


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Files held against Spark's own clean-up, not yet hashed."""

    operator: OperatorId
    epoch: Epoch
    files: FileSet
    #: Path inside the spark_checkpoint_dir → where it is held.
    held: dict[str, Path]


class SnapshotStore(Protocol):
    """Keeps the checkpoints of one flow."""

    # ---- a live spark_checkpoint_dir
    def is_committed(self, spark_checkpoint_dir: Path, batch: BatchId) -> bool:
        """Whether Spark has finished the batch, so that its state files are final."""
        ...

    def files_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> FileSet:
        """The exact files of a snapshot after ``batch``."""
        ...

    def live_damage(
        self, spark_checkpoint_dir: Path, last_appended: BatchId, complete: BatchId, *, may_be_behind: bool = False
    ) -> list[str]:
        """Why a query cannot go on in this folder, given the last batch in its log; empty when it can.

        ``complete``: the operator's cut batch in the newest complete epoch. ``may_be_behind``: by any number of
        batches, which it will run again from its log.
        """
        ...

    # ---- running batches again that stand in the log
    def last_committed(self, spark_checkpoint_dir: Path) -> BatchId:
        """The last batch that the query has finished in this folder; NO_BATCH if none."""
        ...

    def plan_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> dict[str, bytes]:
        """What the query has planned for a batch, byte for byte. Raises DamagedRecordError if it has not."""
        ...

    def put_plan(self, spark_checkpoint_dir: Path, batch: BatchId, plan: Mapping[str, bytes]) -> None:
        """See to it that a query that starts in this folder runs ``batch`` next, exactly as planned."""
        ...

    def commit_plan(self, spark_checkpoint_dir: Path, batch: BatchId) -> None:
        """Take a planned batch of a query without state for done."""
        ...

    def begin_anew(self, spark_checkpoint_dir: Path) -> None:
        """Make it an empty folder, in which a query begins with its first batch."""
        ...

    # ---- taking
    def pin(self, operator: OperatorId, epoch: Epoch, spark_checkpoint_dir: Path, files: FileSet) -> Pin:
        """Hold the files of a snapshot; fast, on the hot path."""
        ...

    def store_files(self, pin: Pin) -> tuple[list[SubtaskRecord], list[SnapshotFile]]:
        """Hash and keep the pinned files by content; returns them per subtask, and the shared ones."""
        ...

    def store_record(self, record: OperatorRecord) -> StoredRecord:
        """Create an operator's record of its generation; returns the one that is there, which may be an older one."""
        ...

    def find_record(self, epoch: Epoch, operator: OperatorId, generation: Generation) -> StoredRecord | None:
        """The record of an epoch that is pending, if it was stored. What it names is held on to, as by storing it."""
        ...

    def store_manifest(self, manifest: Manifest) -> Manifest | Tombstone:
        """Create the manifest; returns what stands in its place: this one, or what was there before."""
        ...

    def store_tombstone(self, tombstone: Tombstone) -> Manifest | Tombstone:
        """See to it that nobody can create the manifest; returns what stands in its place.

        Something that cannot be read bars others too, so then it is the tombstone that was not written.
        """
        ...

    def discard(self, epoch: Epoch) -> None:
        """Forget what an aborted epoch left behind. A manifest and all it names is left alone; a tombstone stays."""
        ...

    # ---- reading
    def epochs(self) -> list[Epoch]:
        """Epochs that have a manifest, readable or not, ascending. Those with a tombstone have none."""
        ...

    def load_manifest(self, epoch: Epoch) -> Manifest: ...

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        """Who has stored a record for an epoch, by the names of the records: also when nothing else can be read."""
        ...

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord: ...

    def damage(self, record: OperatorRecord) -> list[str]:
        """What is wrong with the stored files of a record, for people; empty when every byte is as written."""
        ...

    def lost_input(self, record: OperatorRecord, live_dir: Path) -> list[LostInput]:
        """What a source has read since, by its live directory, and cannot read again; as far as anybody can know.

        Raises DamagedRecordError if the record does not say where it was, StoreError if a server cannot be asked.
        """
        ...

    def lost_ahead(self, operator: OperatorId, spark_checkpoint_dir: Path) -> list[LostInput]:
        """What a query that goes on in this folder would read next and cannot. Raises StoreError."""
        ...

    def skip_lost_input(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        """See to it that a query that starts in this folder goes on with the earliest that its sources still have.

        ``live_dir``: the directory that it has run on, which may know the sources' newest addresses.
        """
        ...

    def begin_as_before(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        """See to it that a query that starts in this folder with its first batch begins to read where it once began.

        ``live_dir``: the directory that it has run on since, which knows.
        """
        ...

    def restore(self, record: OperatorRecord, spark_checkpoint_dir: Path) -> None:
        """Build a fresh spark_checkpoint_dir that continues after the record's batch."""
        ...

    # ---- generations
    def create_generation(self, record: GenerationRecord) -> bool: ...

    def generations(self) -> list[GenerationRecord]:
        """All generations, ascending."""
        ...

    # ---- letting go
    def collect(
        self, drop: Collection[Epoch], open_from: Epoch, check_fence: Callable[[], None] = lambda: None
    ) -> Sequence[Epoch]:
        """Delete these checkpoints, and all content that no other complete or pending one needs; returns what went.

        Named are those that go, not those that stay: another one may complete at any moment. From ``open_from`` on
        epochs may be under way, and what they have stored so far is left alone. ``check_fence`` raises
        when another process has taken over: what that one has stored and not yet bound to an epoch must not go.
        """
        ...

    def sweep(
        self, open_from: Epoch, may_go: Callable[[str, Path], bool], check_fence: Callable[[], None] = lambda: None
    ) -> None:
        """Delete what no checkpoint needs and ``collect`` has not got to, as far as ``may_go`` agrees.

        It hears ("record" or "blob", file): records that no manifest names, of epochs below ``open_from`` (the others
        may be under way), and content that neither a complete nor an open epoch reaches. Raises DamagedRecordError
        rather than guess.
        """
        ...
