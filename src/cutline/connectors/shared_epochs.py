"""Several sinks of a flow on one database publish each epoch together: the first that commits publishes for all.

The sinks do not coordinate in memory. ``prepare`` records in the database what the epoch will publish, and the first
sink that commits publishes it for all of them, in one transaction. Its permit says that the manifest is stored, and a
checkpoint exists for all operators or for none. Only records of the same process count: an earlier process may have
prepared other rows and died.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from cutline.base.crashpoints import crashpoint
from cutline.connectors.sink_base import OpenedSink
from cutline.errors import SinkError
from cutline.model.ids import Epoch, SinkId
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.sink_ledger import SinkLedger

_processes: dict[int, str] = {}


def process_name() -> str:
    """Names this process, so that records prepared by different processes are never mixed."""
    return _processes.setdefault(os.getpid(), secrets.token_hex(8))


def new_claim(history: str) -> str:
    """A claim that also names the process: a sink publishes only for other sinks of its own process."""
    return f"{process_name()}-{secrets.token_hex(4)} {history}"


def is_of_this_process(claim: str) -> bool:
    return claim.startswith(f"{process_name()}-")


class Share(Protocol):
    """What one sink publishes of an epoch, inside a transaction on the database."""

    @property
    def sink(self) -> SinkId: ...

    @property
    def has_rows(self) -> bool: ...

    def ledger(self, epoch: Epoch) -> SinkLedger:
        """As the transaction sees it; its digests include at least that of ``epoch``."""
        ...

    def publish(self, permit: CommitPermit) -> None: ...


class Rewindable(Protocol):
    """A sink inside a transaction that rewinds."""

    def ledger(self, epoch: Epoch) -> SinkLedger: ...

    def rewind(self, epoch: Epoch) -> None: ...


S = TypeVar("S", bound=Share)
R = TypeVar("R", bound=Rewindable)


class Keep(NamedTuple):
    """How many epochs a sink can be rewound to."""

    epochs: int
    #: A user has named the number. If not, the sink can also be rewound to older checkpoints of the flow.
    is_all: bool

    @property
    def number(self) -> int:
        """As one number, for records: negative if no user has named it."""
        return self.epochs if self.is_all else -self.epochs

    @classmethod
    def of(cls, number: int) -> Keep:
        return cls(abs(number), is_all=number > 0)

    @classmethod
    def asked(cls, number: int | None, default: int) -> Keep:
        return cls(default if number is None else number, is_all=number is not None)


def may_publish_for(ledger: SinkLedger, epoch: Epoch) -> bool:
    """Whether a sink of this process may publish the epoch for the sink of this ledger.

    If not, that sink's own permit decides: it has published the epoch already, was rewound, or another process is
    taking over all sinks of the flow.
    """
    is_claimed_elsewhere = bool(ledger.claim) and not is_of_this_process(ledger.claim)
    return epoch > ledger.highest and not is_claimed_elsewhere


def publish_for_all(shares: Sequence[S], permit: CommitPermit) -> None:
    """Publish each share in the open transaction."""
    pass_point("sink-commit-begun", shares)
    for share in shares:
        share.publish(permit)


def pass_point(point: str, shares: Iterable[Share]) -> None:
    """A place at which tests kill the process, for each participating sink."""
    for share in shares:
        crashpoint(point, share.sink)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindTarget(Generic[R]):
    """One sink to rewind, and how far."""

    opened: OpenedSink
    epoch: Epoch
    can_rewind: bool
    in_transaction: R


def rewind_targets(targets: Iterable[RewindTarget[R]], *, keep_more: str) -> None:
    """Rewind each sink in the open transaction, so that no reader sees only some of them rewound."""
    for target in targets:
        ledger = target.in_transaction.ledger(target.epoch)
        if ledger.published > target.epoch and not target.can_rewind:
            raise SinkError(
                "the sink was made with rewindable=False",
                next_step='use on_rollback="keep"',
                flow=ledger.flow,
                sink=ledger.sink,
            )
        if target.opened.is_to_rewind(ledger, target.epoch, keep_more=keep_more):
            target.in_transaction.rewind(target.epoch)
            target.opened.reach("sink-rewind-half")
