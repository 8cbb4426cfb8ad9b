"""The metadata port: the coordinator's own durable records."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from cutline.model.ids import Epoch, Generation, SinkId
from cutline.protocol.messages.coordinator import BarrierTerms


class PendingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that was begun and is neither complete nor aborted."""

    epoch: Epoch
    #: The coordinator's that began it.
    generation: Generation
    terms: BarrierTerms


class EpochOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an epoch ended, for the history."""

    epoch: Epoch
    generation: Generation
    started_ms: int
    ended_ms: int
    outcome: Literal["completed", "aborted"]
    reason: str
    details: dict[str, Any]


class MetadataStore(Protocol):
    """Everything the coordinator must not forget. Each call is durable when it returns."""

    def next_generation(self, at_least: Generation) -> Generation:
        """A number that was never handed out before and is no smaller than ``at_least``: a new process takes over."""
        ...

    def advance_generation(self) -> Generation:
        """The next number, for a region of the flow that this process runs. Raises FencedError if it no longer does."""
        ...

    def check_fence(self) -> None:
        """Raise FencedError if a newer generation has been handed out; to be asked before anything is deleted."""
        ...

    def last_epoch(self) -> Epoch:
        """The highest epoch ever recorded."""
        ...

    def store_pending(self, record: PendingRecord) -> None:
        """Record the start of an epoch. Raises FencedError if a newer generation has been handed out."""
        ...

    def pending(self) -> list[PendingRecord]:
        """Epochs without an outcome, ascending."""
        ...

    def store_outcome(self, outcome: EpochOutcome) -> None:
        """Record how an epoch ended. Recorded before: the first outcome stays."""
        ...

    def history(self, limit: int) -> list[EpochOutcome]:
        """The newest outcomes, newest first."""
        ...

    def store_pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        """Remember that somebody holds on to an epoch, or has let go of it."""
        ...

    def pins(self) -> frozenset[Epoch]: ...

    def store_published(self, sink: SinkId, epoch: Epoch) -> None: ...

    def published(self) -> dict[SinkId, Epoch]: ...

    def store_seen(self, sink: SinkId, epoch: Epoch) -> None:
        """The newest epoch with rows that a sink was told to publish: it says so itself, unless it was put back."""
        ...

    def seen(self) -> dict[SinkId, Epoch]: ...

    def count_recovery(self, path: str) -> None: ...

    def recoveries(self) -> dict[str, int]: ...

    def close(self) -> None: ...
