"""Savepoints that starts take by themselves: the state as the former code left it, before other code runs.

``cutline.protocol.deploys`` decides; this performs. A start that is killed here takes the savepoint at its next try, or
finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.errors import CutlineError, DamagedRecordError, RecoveryError, UnknownSavepointError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import FlowCode, GenerationRecord
from cutline.model.ids import Epoch, FlowName
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.protocol.deploys import (
    AUTOMATIC,
    BEFORE_LAST_DEPLOY,
    NamedSavepoints,
    Save,
    SavedState,
    automatic_name,
    before_last_deploy,
    deploy,
    last_deploy,
    left_by,
    newest_code,
    returned_to,
    surplus,
)
from cutline.protocol.history.known_checkpoints import of_present_history
from cutline.protocol.recovery.plan import RestorePlan
from cutline.savepoints.set_aside import readable
from cutline.savepoints.store import Savepoint, Savepoints

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class AutomaticSavepoints:
    """The automatic savepoints of one start."""

    flow: FlowName
    savepoints: Savepoints
    checkpoints: CheckpointStore
    code: FlowCode
    #: The newest so many are kept; 0: none is taken.
    keep: int
    is_per_operator: bool = False
    #: The epoch that a person has requested to restore; None: the flow continues.
    requested: Epoch | None = field(default=None, init=False)
    #: The savepoint that this start restores; empty: none.
    restored: str = field(default="", init=False)
    #: How this start's code differs, in one line; empty: it does not, or ``save`` was not called.
    change: str = field(default="", init=False)
    #: The savepoints of what the former code left, that from which this start continues first.
    saved: list[str] = field(default_factory=list, init=False)
    #: Of these, the one of what a restore gave up; empty: none.
    given_up: str = field(default="", init=False)
    #: Those that nothing may remove now, beside those that generations name; asked when some are removed.
    spared: Callable[[], Collection[str]] = tuple
    _generations: Sequence[GenerationRecord] = field(default=(), init=False)

    def save(self, plan: RestorePlan, generations: Sequence[GenerationRecord]) -> NamedSavepoints:
        """Call it before the new generation is entered. Raises RecoveryError if a savepoint is due and not possible.

        ``generations``: those before, ascending. Returns what the record of the new one names.
        """
        self._generations = generations
        by_epoch = {one.epoch: one for one in plan.manifests}
        if self.requested is not None:  # it gives up later checkpoints, which the plan does not have
            by_epoch |= {one.epoch: one for one in of_present_history(readable(self.checkpoints), generations)}
        decided = deploy(
            self.code,
            generations,
            {epoch: one.code for epoch, one in by_epoch.items()},
            keep=self.keep,
            is_per_operator=self.is_per_operator,
            restored=self.requested,
        )
        self.change = decided.change
        if decided.change and self.requested is None:
            states = _states(self.savepoints, generations)
            left = left_by(states, generations, self.code.hash)
            self.change += f"; this code ran before and left savepoint {left}" if left is not None else ""
        if decided.why_not:
            log.warning("code_changed", flow=self.flow, change=self.change, not_saved=decided.why_not)
        elif decided.change:
            log.warning("code_changed", flow=self.flow, change=self.change)
        continued_from = ""
        for due in decided.saves:
            name = self._save(due, by_epoch)
            continued_from = name if due.taken_before == "deploy" else continued_from
            self.given_up = name if due.taken_before == "restore" else self.given_up
            crashpoint("deploy-saved")
        return NamedSavepoints(saved=continued_from, restored=self.restored)

    def collect(self) -> None:
        """Remove automatic savepoints beyond the number to keep. Call it when no restore request needs one anymore.

        Never that from before the last deploy: those that restores have left may be newer, and as many as are kept.
        """
        last = last_deploy(self._generations)
        spared = {*self.saved, self.restored, *self.spared()}
        if not self.change and last is not None:
            spared |= {last.saved, last.restored_savepoint}
        for name in surplus(map(_state, self.savepoints.list()), keep=self.keep, spared=spared):
            try:
                self.savepoints.delete(name)
            except (CutlineError, OSError) as error:  # the next start tries again
                log.warning("savepoint_not_removed", flow=self.flow, savepoint=name, problem=str(error))
                continue
            log.info("savepoint_removed", flow=self.flow, savepoint=name)
            crashpoint("deploy-collected")

    def _save(self, due: Save, manifests: Mapping[Epoch, Manifest]) -> str:
        """The name of the savepoint; empty: it could not be taken, and is not required."""
        problem: Exception | None = None
        for epoch in due.epochs:
            try:
                name = self._found(manifests[epoch]) or self._created(due, manifests[epoch])
            except DamagedRecordError as error:
                problem = problem or error
                log.warning("not_saved", flow=self.flow, epoch=epoch, problem=str(error))
                continue  # an earlier one may be whole
            except (CutlineError, OSError) as error:
                problem = error
                self.savepoints.remove_unfinished(AUTOMATIC)  # on a full disk, it takes the room that someone makes
                break
            self.saved.append(name)
            log.info("saved_before_new_code", flow=self.flow, savepoint=name, epoch=epoch)
            return name
        if due.is_required:
            raise RecoveryError(
                f"{self.change}; before it runs, the state must be saved, and that failed: {_in_words(problem)}",
                next_step="fix the cause (make room on the disk?) and start again; or start without this savepoint: "
                "--set auto_savepoints=0",
                flow=self.flow,
                epoch=due.epochs[0],
            ) from problem
        log.warning("not_saved", flow=self.flow, epoch=due.epochs[0], problem=_in_words(problem))
        return ""

    def _found(self, manifest: Manifest) -> str:
        """The automatic savepoint of this very checkpoint; another history may have one of the same number."""
        for one in self.savepoints.list():
            if one.taken_before and one.epoch == manifest.epoch and self.savepoints.manifest_of(one) == manifest:
                return one.name
        return ""

    def _created(self, due: Save, manifest: Manifest) -> str:
        # A start that was killed here has left a part under another name; one that starts again and again, many.
        self.savepoints.remove_unfinished(AUTOMATIC)
        name = automatic_name(manifest.epoch, now_ms())
        made = self.savepoints.create(name, manifest, is_drained=False, note=self.change, taken_before=due.taken_before)
        return made.name


def resolved(to: str, savepoints: Savepoints, generations: Sequence[GenerationRecord], *, flow: str) -> str:
    """What a person wrote as the target of a restore: ``before-last-deploy`` becomes the name of a savepoint."""
    if to != BEFORE_LAST_DEPLOY:
        return to
    if already := returned_to(generations):
        raise UnknownSavepointError(
            f"the flow has been restored to before its last deploy already, to savepoint {already}",
            next_step="start it without this; to restore it again, or to before an earlier deploy, name a savepoint",
            flow=flow,
        )
    name = before_last_deploy(generations)
    if name in {one.name for one in _states(savepoints, generations)}:
        return name
    known = ", ".join(one.name for one in savepoints.list()) or "none"
    if last_deploy(generations) is None:
        raise UnknownSavepointError(
            "the code has not changed since the first start: there is no deploy to restore from",
            next_step=f"choose a savepoint ({known}) or an epoch (cutline checkpoints)",
            flow=flow,
        )
    problem = "no savepoint was taken before the code last changed"
    if name:
        problem = f"savepoint {name}, taken before the code last changed, is not here or of a history that was given up"
    raise UnknownSavepointError(
        f"{problem} (now {newest_code(generations) or 'unknown'})",
        next_step=f"choose a savepoint ({known}) or an epoch (cutline checkpoints); if the flow was restored "
        "already, start it without this",
        flow=flow,
    )


def _states(savepoints: Savepoints, generations: Sequence[GenerationRecord]) -> list[SavedState]:
    """The automatic savepoints to which the flow may be restored."""
    return [_state(one) for one in savepoints.list() if _is_of_history(one, savepoints, generations)]


def _is_of_history(one: Savepoint, savepoints: Savepoints, generations: Sequence[GenerationRecord]) -> bool:
    return bool(one.taken_before) and is_restorable(one, savepoints, generations)


def is_restorable(one: Savepoint, savepoints: Savepoints, generations: Sequence[GenerationRecord]) -> bool:
    """Whether a savepoint is of the present history of the flow; if not, it can only be cloned."""
    try:
        savepoints.check_own(one.name)
        return bool(of_present_history([savepoints.manifest_of(one)], generations))
    except CutlineError:
        return False  # ``verify`` reports what is wrong with it


def _state(savepoint: Savepoint) -> SavedState:
    return SavedState(
        name=savepoint.name,
        epoch=savepoint.epoch,
        created_ms=savepoint.created_ms,
        code=savepoint.code,
        taken_before=savepoint.taken_before,
    )


def _in_words(problem: Exception | None) -> str:
    """The cause in a few words: where in the storage it happened does not help."""
    if not isinstance(problem, CutlineError):
        return str(problem)
    why = problem.where.get("why")
    return f"{problem.what}: {why}" if why else problem.what
