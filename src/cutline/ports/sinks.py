"""The sink port: two-phase output. Its conformance suite is ``cutline.testing.conformance.sinks``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.model.staging import Piece, StagedBatch

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.protocol.publish.commit import CommitPermit
    from cutline.protocol.publish.rewind_points import Gap


class StageAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Names one task's attempt to stage its part of a batch. ``attempt`` is unique across retries and re-runs."""

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
    """What a sink gets when the flow starts. ``schema_ipc`` is the Arrow schema of the rows it will receive."""

    flow: FlowName
    operator: OperatorId
    sink: SinkId
    output_mode: str
    schema_ipc: bytes


class Sink(Protocol):
    """Two-phase output. ``commit`` publishes an epoch exactly once, and only with a permit from a stored manifest.

    Life of a row: ``stager().open(...).write`` on an executor → ``prepare`` (part of the acknowledgement) →
    ``commit`` (after the manifest), or ``abort`` (it belongs to an abandoned history).
    Every method is idempotent: after a crash it may be called again with the same arguments.
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
        """Bind staged batches to the epoch; the result is stored in the snapshot and passed to ``commit``.

        The same batch may be prepared for several epochs while their outcome is open; the permit decides.
        """
        ...

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish exactly the given batches as one epoch. Already published: do nothing."""
        ...

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Discard staged output that will never be published. Unknown or already discarded: do nothing."""
        ...

    def published(self) -> Epoch | None:
        """Highest epoch whose rows readers can see, according to the sink itself; None if there is none.

        An epoch without rows need not leave a trace, so this may lag behind the last committed epoch.
        """
        ...

    def highest(self) -> Epoch:
        """Highest epoch the target has ever seen, rewound or not: new ones must be above it. NO_EPOCH if none."""
        ...

    def rewind(self, epoch: Epoch) -> None:
        """Make readers see what they saw when ``epoch`` (or the last published epoch before it) was newest."""
        ...


@runtime_checkable
class Claimable(Protocol):
    """A sink that can be claimed: after that, a process that was thought dead and wakes up publishes nothing."""

    def claimed(self) -> str:
        """The newest claim in the target, as ``claim`` stored it; empty: the sink was never claimed."""
        ...

    def claim(self, history: str, *, expected: str) -> None:
        """From now on only this instance publishes for its flow and sink. Called when a start is certain to proceed.

        Stores a token of this instance, a space and ``history``, which says whose claim it is and is never interpreted
        by the sink. Raises FencedError if the newest claim is not ``expected``: another start was faster. An instance
        without a claim publishes as long as no other instance has claimed the sink.
        """
        ...


@runtime_checkable
class RewindsTogether(Protocol):
    """A sink that can be rewound in one step with others, so that no reader sees only some of them rewound."""

    def rewind_group(self) -> object:
        """Sinks with equal keys are rewound in one transaction."""
        ...

    def rewind_together(self, targets: Sequence[tuple[Any, Epoch]]) -> None:
        """``rewind`` each of these sinks of the group to its epoch: all of them or none."""
        ...


@runtime_checkable
class RewindsSoFar(Protocol):
    """A sink that can be rewound, but not to every epoch."""

    def oldest_rewind(self) -> Epoch:
        """The oldest epoch that ``rewind`` reaches."""
        ...


@runtime_checkable
class RewindsToPoints(Protocol):
    """A sink whose older epochs become as sparse as the flow's checkpoints (``CommitPermit.rewind_points``)."""

    def rewind_gaps(self) -> tuple[Gap, ...]:
        """The epochs, above the oldest one, that ``rewind`` does not reach."""
        ...


@runtime_checkable
class RecordsReach(Protocol):
    """A sink whose target also says how far it has come without rows, for readers of several tables."""

    def record_reach(self, epoch: Epoch, *, is_per_operator: bool, at_start: bool = False) -> None:
        """Nothing is missing up to ``epoch``. ``at_start``: it is where the flow continues, after a claim.

        See ``cutline.protocol.publish.flow_epochs``. A failure, or a process that was replaced, does no harm.
        """
        ...
