"""The sink port: two-phase output. Its conformance suite is ``cutline.testing.conformance.sinks``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, SinkId

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.protocol.publish.commit import CommitPermit

#: What a sink's executors report about one staged piece (a file, a table …). Plain JSON.
Piece = dict[str, Any]


class StagedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The durable, invisible output of one batch for one sink."""

    generation: Generation
    batch: BatchId
    rows: int
    bytes: int
    pieces: list[Piece]


class StageAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Names one task's try at staging its part of a batch. ``attempt`` is unique across retries and re-runs."""

    flow: FlowName
    operator: OperatorId
    generation: Generation
    batch: BatchId
    partition: int
    attempt: str


class StageWriter(Protocol):
    """Executor side: takes the rows of one task. Nothing it writes may be visible to readers of the sink."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> list[Piece]:
        """Make everything written durable and describe it. An empty task returns no piece."""
        ...


class Stager(Protocol):
    """Picklable; travels to the executors."""

    def open(self, attempt: StageAttempt) -> StageWriter: ...


class SinkContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink is told when the flow starts. ``schema_ipc`` is the Arrow schema of the rows it will get."""

    flow: FlowName
    operator: OperatorId
    sink: SinkId
    output_mode: str
    schema_ipc: bytes


class Sink(Protocol):
    """Two-phase output. ``commit`` publishes an epoch exactly once, and only with a permit from a stored manifest.

    Life of a row: ``stager().open(...).write`` on an executor → ``prepare`` (part of the acknowledgement) →
    ``commit`` (after the manifest), or ``abort`` (it belongs to a history that was given up).
    Every method may be called again after a crash with the same arguments and must then change nothing more.
    """

    #: Spark output modes this sink can publish.
    output_modes: frozenset[str]
    #: Whether ``rewind`` works.
    can_rewind: bool

    def open(self, context: SinkContext) -> None:
        """Driver side, before anything runs: create or check the target; raise SinkError if it does not fit."""
        ...

    def stager(self) -> Stager: ...

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Bind staged batches to the epoch; what it returns is stored in the snapshot and given to ``commit``.

        The same batch may be prepared for several epochs while their outcome is open; the permit decides.
        """
        ...

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish exactly the given batches as one epoch. Already published: do nothing."""
        ...

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Throw away staged output that will never be published. Unknown or already gone: do nothing."""
        ...

    def published(self) -> Epoch | None:
        """Highest epoch whose rows readers can see, according to the sink itself; None if there is none.

        An epoch without rows need not leave a trace, so this may lag behind what was committed.
        """
        ...

    def highest(self) -> Epoch:
        """Highest epoch the target has ever seen, taken back or not: new ones must be above it. NO_EPOCH if none."""
        ...

    def rewind(self, epoch: Epoch) -> None:
        """Make readers see what they saw when ``epoch`` (or the last published one before it) was newest."""
        ...


@runtime_checkable
class Claimable(Protocol):
    """A sink that can be taken over: a process that was thought dead and wakes up publishes nothing any more."""

    def claim(self) -> None:
        """From now on nobody but this instance publishes for its flow and sink. Called once a start is sure to go on.

        An instance that has claimed nothing publishes as long as nobody has.
        """
        ...


@runtime_checkable
class RewindsTogether(Protocol):
    """A sink that can be taken back in one step with others, so that no reader sees some of them gone back."""

    def rewind_group(self) -> object:
        """Sinks of which this is equal are taken back together."""
        ...

    def rewind_together(self, targets: Sequence[tuple[Any, Epoch]]) -> None:
        """``rewind`` each of these sinks of the group to its epoch, all or none."""
        ...


@runtime_checkable
class RewindsSoFar(Protocol):
    """A sink that can be taken back, but not to every epoch."""

    def oldest_rewind(self) -> Epoch:
        """The oldest epoch that ``rewind`` reaches."""
        ...
