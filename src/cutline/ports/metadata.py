"""The metadata port: the coordinator's own durable records."""

from __future__ import annotations

from typing import Protocol

import msgspec

from cutline.model.cut import BarrierTerms
from cutline.model.history import Identity
from cutline.model.ids import Epoch, Generation, SinkId
from cutline.model.status import EpochOutcome

__all__ = ["EpochOutcome", "MetadataStore", "PendingRecord"]


class PendingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that was begun and is neither complete nor aborted."""

    epoch: Epoch
    #: The generation of the coordinator that began it.
    generation: Generation
    terms: BarrierTerms


class MetadataStore(Protocol):
    """Everything the coordinator must remember across restarts. Each call is durable when it returns."""

    def next_generation(self, at_least: Generation) -> Generation:
        """A number that was never issued before and is at least ``at_least``: a new process takes over."""
        ...

    def advance_generation(self) -> Generation:
        """The next number, for a region of the flow that this process runs. Raises FencedError if it is fenced."""
        ...

    def check_fence(self) -> None:
        """Raise FencedError if a newer generation has been issued; called before anything is deleted."""
        ...

    def last_epoch(self) -> Epoch:
        """The highest epoch ever recorded."""
        ...

    def last_completed(self) -> Epoch:
        """The highest epoch whose recorded outcome is that it completed; NO_EPOCH if none."""
        ...

    def store_pending(self, record: PendingRecord) -> None:
        """Record the start of an epoch. Raises FencedError if a newer generation has been issued."""
        ...

    def pending(self) -> list[PendingRecord]:
        """Epochs without an outcome, ascending."""
        ...

    def store_outcome(self, outcome: EpochOutcome) -> None:
        """Record how an epoch ended. If an outcome is recorded already, it stays."""
        ...

    def history(self, limit: int) -> list[EpochOutcome]:
        """The newest outcomes, newest first."""
        ...

    def store_pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        """Record that an epoch is pinned, or no longer pinned."""
        ...

    def pins(self) -> frozenset[Epoch]: ...

    def store_published(self, sink: SinkId, epoch: Epoch) -> None: ...

    def published(self) -> dict[SinkId, Epoch]: ...

    def store_seen(self, sink: SinkId, epoch: Epoch) -> None:
        """The newest epoch with rows that a sink was told to publish: the sink itself reports it too, unless its target
        was replaced by an older copy."""
        ...

    def seen(self) -> dict[SinkId, Epoch]: ...

    def store_announced(self, identity: Identity) -> None:
        """A generation is about to be announced in the remote tier; whether it begins is open."""
        ...

    def announced(self) -> frozenset[Identity]: ...

    def issued(self) -> Generation:
        """The newest number that was ever issued; 0: none, or the records were lost."""
        ...

    def note_run(self) -> None:
        """A start has brought the sinks in line: from now on this storage has run the flow."""
        ...

    def has_run(self) -> bool: ...

    def count_recovery(self, path: str) -> None: ...

    def recoveries(self) -> dict[str, int]: ...

    def close(self) -> None: ...
