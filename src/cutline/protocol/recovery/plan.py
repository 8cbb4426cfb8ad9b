"""What ``cutline.protocol.recovery`` decides: how the flow recovers, or why it must not start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cutline.errors import CutlineError, FlowDefinitionError, LostInputError, OtherHistoryError, RecoveryError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId
from cutline.protocol.history.evolution import Evolution

#: The recovery path, as the generation record and the metrics name it.
RecoveryPath = Literal["resume", "alone", "regional", "local", "remote", "fresh"]
#: The tier of the restored content; none if the flow continues.
Tier = Literal["none", "local", "remote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """How the flow recovers. Nothing has been changed yet.

    ``resume``: every operator continues where it was. ``alone``: single operators are restored and catch up with their
    own logs. ``regional``: an operator and all downstream of it are restored. ``local`` and ``remote``: the whole flow
    is restored. ``fresh``: it begins at the beginning.
    """

    path: RecoveryPath
    tier: Tier = "none"
    reason: str
    #: The epoch that the region or the flow is restored to; None: none.
    epoch: Epoch | None = None
    #: Complete epochs of the history that the flow will have, ascending; ``epoch`` is the last of them if there is one.
    manifests: tuple[Manifest, ...] = ()
    #: Operators that get a fresh directory from ``epoch``.
    region: frozenset[OperatorId] = frozenset()
    #: Operators that are restored alone, each to its own epoch; NO_EPOCH: without state.
    alone: Mapping[OperatorId, Epoch] = field(default_factory=dict)
    #: Operators that join a continuing flow.
    joined: tuple[OperatorId, ...] = ()
    evolution: Evolution = field(default_factory=lambda: Evolution(operators=()))
    #: The number of the checkpoint that the evolution makes from ``epoch``; None: operators have not changed.
    evolved_epoch: Epoch | None = None
    #: Lost input that the flow continues without, as its options allow.
    lost_input: tuple[LostInput, ...] = ()
    #: All that was found wrong on the way here.
    problems: tuple[str, ...] = ()


_ERRORS: dict[str, type[CutlineError]] = {
    "recovery": RecoveryError,
    "definition": FlowDefinitionError,
    "lost_input": LostInputError,
    "other_history": OtherHistoryError,
}
RefusalKind = Literal["recovery", "definition", "lost_input", "other_history"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The flow must not start: rows would be lost, published twice or restored wrongly. A user must decide."""

    kind: RefusalKind
    what: str
    next_step: str
    #: Flow, operator, epoch, as far as they are known.
    where: Mapping[str, object] = field(default_factory=dict)
    #: All that was found wrong on the way here.
    problems: tuple[str, ...] = ()
    #: Of another history: whether the remote tier has the newest one, from which the flow can continue on request.
    can_rejoin: bool = False
    #: Of another history: the newest checkpoint of this storage that can be restored on request; None: none.
    restorable: Epoch | None = None
    #: Of another history: whether this storage has run the flow; if not, nothing of its own would be given up.
    has_run: bool = True

    @classmethod
    def of(cls, error: RecoveryError | FlowDefinitionError, problems: tuple[str, ...] = ()) -> Refusal:
        kind: RefusalKind = "recovery"
        can_rejoin, restorable, has_run = False, None, True
        if isinstance(error, FlowDefinitionError):
            kind = "definition"
        elif isinstance(error, LostInputError):
            kind = "lost_input"
        elif isinstance(error, OtherHistoryError):
            kind, can_rejoin, has_run = "other_history", error.can_rejoin, error.has_run
            restorable = None if error.restorable is None else Epoch(error.restorable)
        return cls(
            kind=kind,
            what=error.what,
            next_step=error.next_step,
            where=error.where,
            problems=problems,
            can_rejoin=can_rejoin,
            restorable=restorable,
            has_run=has_run,
        )

    def error(self) -> CutlineError:
        """The error to raise."""
        error = _ERRORS[self.kind](self.what, next_step=self.next_step, **self.where)
        if isinstance(error, OtherHistoryError):
            error.can_rejoin, error.restorable, error.has_run = self.can_rejoin, self.restorable, self.has_run
        return error
