"""What verification and garbage collection report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from cutline.model.ids import Epoch, OperatorId

# ------------------------------------------------------------------------------------------------- verification

#: good; damaged; left: of a history that a restore abandoned; gone: collected during the verification.
Verdict = Literal["good", "damaged", "left", "gone"]

BACKUP = "restore the file from a backup"
OTHER_EPOCH = "this checkpoint cannot be trusted: restore another one, or take a new one (cutline savepoint create)"
LIVE_LOG = "only a running flow can continue; take a new checkpoint now, and do not restart before it is complete"
RESTORE_INPUT = "put the input file in place before the restore, or take newer checkpoints until this one is released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem."""

    #: None: it concerns the flow as a whole.
    epoch: Epoch | None
    operator: OperatorId | None
    #: Relative to the flow's folder if it is in there.
    path: str
    problem: str
    next_step: str = OTHER_EPOCH


@dataclass(slots=True, kw_only=True)
class EpochReport:
    """The result of verifying one checkpoint."""

    epoch: Epoch
    verdict: Verdict = "good"
    problems: list[Finding] = field(default_factory=list)
    #: What could not be checked.
    notes: list[str] = field(default_factory=list)
    checked_files: int = 0
    checked_bytes: int = 0


# ------------------------------------------------------------------------------------------- garbage collection

#: Why each kind is garbage.
WHY = {
    "blob": "no complete checkpoint reaches it",
    "record": "no complete checkpoint names it",
    "temporary": "left by a write that was interrupted",
    "savepoint": "it was never finished",
    "request": "no process waits for it any more",
    "entry": "no checkpoint and no consumer needs it",
    "segment": "no entry names it",
    "channel": "neither the flow nor a checkpoint has its operator",
    "pins": "the process that held these files is gone",
    "spark": "no operator runs on it",
    "manifest": "the remote tier keeps newer checkpoints",
    "published": "its checkpoint is gone",
    "ahead": "the process that uploaded this early has ended",
}


class Garbage(msgspec.Struct, frozen=True, kw_only=True):
    """A file, or a folder with its content, that nothing needs."""

    kind: str
    #: Relative to the flow's folder, or to its place in the remote tier.
    path: str
    size_bytes: int
    why: str
    tier: str = "local"


class Collected(msgspec.Struct, kw_only=True):
    """The garbage that was found, and removed unless it was a dry run."""

    findings: list[Garbage] = []
    #: What was kept because it is unknown whether it is needed.
    in_doubt: list[str] = []


OnFound = Callable[[Garbage], None]


def _ignore(_: Garbage) -> None: ...


def found(collected: Collected) -> Iterator[tuple[str, str, int, int]]:
    """(tier, kind, count, bytes) of all findings."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in collected.findings:
        count, size_bytes = sums.get((one.tier, one.kind), (0, 0))
        sums[one.tier, one.kind] = (count + 1, size_bytes + one.size_bytes)
    for (tier, kind), (count, size_bytes) in sorted(sums.items()):
        yield tier, kind, count, size_bytes
