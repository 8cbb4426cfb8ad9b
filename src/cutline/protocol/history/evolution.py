"""Which operators of a checkpoint are which operators of the code. Decides only; nothing is read or written here."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cutline.errors import FlowDefinitionError, RecoveryError
from cutline.model.graph import FlowGraph
from cutline.model.ids import FlowName, OperatorId
from cutline.ports import GenerationRecord, Manifest, OperatorPlan, OperatorRecord
from cutline.protocol.history.renaming import Renaming

#: Per operator: the channels it reads, in their order.
Inputs = Mapping[OperatorId, Sequence[OperatorId]]
Fate = Literal["kept", "renamed", "dropped", "added"]

_NEW_NAME = "or give the changed flow a new name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How operators have changed since a checkpoint was taken, as a person says."""

    #: Old name → new name.
    rename: Mapping[str, str] = field(default_factory=dict)
    #: Operators that the code no longer has may be left behind, with all their state.
    allow_dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedOperator:
    """What becomes of one operator."""

    fate: Fate
    #: As the checkpoint calls it; None: it is new.
    was: OperatorId | None
    #: As the code calls it; None: it is dropped.
    now: OperatorId | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Every operator of the checkpoint and of the code, once."""

    operators: tuple[MatchedOperator, ...]

    @property
    def renaming(self) -> Renaming:
        return Renaming({one.was: one.now for one in self.operators if one.was is not None and one.now is not None})

    @property
    def added(self) -> tuple[OperatorId, ...]:
        return tuple(one.now for one in self.operators if one.was is None and one.now is not None)

    @property
    def is_unchanged(self) -> bool:
        return all(one.fate == "kept" for one in self.operators)

    def with_notes(self, notes: Mapping[OperatorId, str]) -> Matching:
        """``notes``: of operators of the code."""
        found = (
            MatchedOperator(fate=one.fate, was=one.was, now=one.now, note=notes.get(one.now, one.note))
            if one.now is not None
            else one
            for one in self.operators
        )
        return Matching(operators=tuple(found))

    def rows(self) -> list[dict[str, Any]]:
        """For people and programs."""
        return [{"fate": one.fate, "was": one.was, "now": one.now, "note": one.note} for one in self.operators]


def match(recorded: Inputs, declared: Inputs, *, flow: FlowName, where: str, changes: Changes) -> Matching:
    """Match by name, and by the names that were changed.

    Raises RecoveryError for what cannot be meant, or would lose something. ``recorded``: what is stored, and ``where``
    says what that is; ``declared``: the code.
    """
    rename = changes.rename
    _check_renames(recorded, declared, flow=flow, where=where, rename=rename)
    names = {old: OperatorId(rename.get(old, old)) for old in recorded}
    new_names = {old: new for old, new in names.items() if new in declared}
    added = [name for name in declared if name not in new_names.values()]
    dropped = [old for old in recorded if old not in new_names]
    if dropped and not changes.allow_dropped:
        raise RecoveryError(
            f"{where} holds operators that the flow no longer has: {', '.join(dropped)}"
            + (f"; new in the code: {', '.join(added)}" if added else ""),
            next_step="restore a checkpoint or savepoint and say which has another name now, or leave it behind with "
            "its state (cutline restore --to … --rename OLD=NEW --allow-dropped); or run the operators of then",
            flow=flow,
        )
    for old, new in new_names.items():
        _check_inputs(old, new, recorded[old], declared[new], new_names, flow=flow)
    kept = [
        MatchedOperator(fate="kept" if old == new else "renamed", was=old, now=new, note=f"goes on from {where}")
        for old, new in new_names.items()
    ]
    gone = [MatchedOperator(fate="dropped", was=old, now=None, note="its state is left behind") for old in dropped]
    fresh = [MatchedOperator(fate="added", was=None, now=name, note="begins without state") for name in added]
    return Matching(operators=(*kept, *gone, *fresh))


def _check_renames(
    recorded: Inputs, declared: Inputs, *, flow: FlowName, where: str, rename: Mapping[str, str]
) -> None:
    for old, new in rename.items():
        if old not in recorded:
            raise RecoveryError(
                f"{where} has no operator {old!r} to be renamed", next_step=f"it has: {', '.join(recorded)}", flow=flow
            )
        if new not in declared:
            raise RecoveryError(
                f"{old!r} cannot become {new!r}: the flow as written has no such operator",
                next_step=f"it has: {', '.join(declared)}",
                flow=flow,
            )
    taken = [rename.get(old, old) for old in recorded]
    for name in taken:
        if taken.count(name) > 1 and name in declared:
            both = [old for old in recorded if rename.get(old, old) == name]
            raise RecoveryError(
                f"{' and '.join(both)} would both be {name!r}", next_step="rename only one of them", flow=flow
            )


def _check_inputs(
    old: OperatorId,
    new: OperatorId,
    before: Sequence[OperatorId],
    now: Sequence[OperatorId],
    new_names: Mapping[OperatorId, OperatorId],
    *,
    flow: FlowName,
) -> None:
    """Spark knows its sources by number: it would go on reading one channel at the position of another."""
    gone = [name for name in before if name not in new_names]
    if gone:
        raise RecoveryError(
            f"{gone[0]} is no longer there, and this operator was reading it",
            next_step=f"rename {gone[0]} if it has another name now, give {new} another name so that it begins "
            f"anew, {_NEW_NAME}",
            flow=flow,
            operator=new,
        )
    then = [new_names[name] for name in before]
    if then != list(now):
        raise RecoveryError(
            f"the inputs of this operator have changed from {then} to {list(now)}",
            next_step=f"declare the old inputs in the old order, give {new} another name so that it begins anew, "
            f"{_NEW_NAME}",
            flow=flow,
            operator=new,
        )


def declared_inputs(graph: FlowGraph) -> dict[OperatorId, tuple[OperatorId, ...]]:
    """What the code says, in its order."""
    return {node.operator: node.inputs for node in graph.operators}


class Matcher:
    """Holds the code against what is stored."""

    def __init__(
        self, graph: FlowGraph, plans: Mapping[OperatorId, OperatorPlan], *, is_per_operator: bool = False
    ) -> None:
        self._graph = graph
        self._plans = plans
        self._is_per_operator = is_per_operator

    def check_mode(self, current: GenerationRecord) -> None:
        if current.is_per_operator != self._is_per_operator:
            was, will_be = (
                ("per-operator", "coordinated") if current.is_per_operator else ("coordinated", "per-operator")
            )
            raise RecoveryError(
                f"the flow was checkpointed in {was} mode, and cannot go on in {will_be} mode",
                next_step="set mode as it was, or give the flow a new name",
                flow=self._graph.flow,
            )

    def last_run(self, current: GenerationRecord) -> Matching:
        """Those of the last run go on as they were; new ones may join them."""
        matching = self._match(current, Changes(), "the last run")
        if self._is_per_operator and not matching.is_unchanged:
            raise RecoveryError(
                f"in per-operator mode no operator can join a flow that has run: {', '.join(matching.added)}",
                next_step="run the operators it was stopped with, or give the changed flow a new name",
                flow=self._graph.flow,
            )
        return matching

    def checkpoint(self, manifest: Manifest, generations: Iterable[GenerationRecord], changes: Changes) -> Matching:
        """``generations``: all there are; that of the checkpoint says what its operators were reading."""
        where = f"epoch {manifest.epoch}"
        record = next((one for one in generations if one.generation == manifest.generation), None)
        if record is not None:
            return self._match(record, changes, where)
        # Without the record nobody knows what they were reading. That is borne if nothing has changed otherwise.
        if changes.rename or set(manifest.operators) != set(self._graph.names):
            raise RecoveryError(
                f"{where} has other operators than the flow, and the record of generation {manifest.generation}, "
                "which says what they read, is missing",
                next_step="run the operators of then, or choose another checkpoint",
                flow=self._graph.flow,
            )
        declared = declared_inputs(self._graph)
        return match(declared, declared, flow=self._graph.flow, where=where, changes=changes)

    def _match(self, record: GenerationRecord, changes: Changes, where: str) -> Matching:
        flow = self._graph.flow
        matching = match(record.inputs, declared_inputs(self._graph), flow=flow, where=where, changes=changes)
        for operator, encoded in matching.renaming.keys(record.schemas).items():
            if base64.b64decode(encoded) != self._plans[operator].schema_ipc:
                raise FlowDefinitionError(
                    "the schema of this operator's channel has changed since the flow last ran",
                    next_step=f"restore the old columns and types, {_NEW_NAME}",
                    flow=flow,
                    operator=operator,
                )
        return matching

    def refuse_returning_names(self, matching: Matching, manifests: Iterable[Manifest]) -> None:
        """What is kept for an older operator of the same name would be taken for that of one which joins."""
        kept = list(manifests)
        for name in matching.added:
            epochs = [manifest.epoch for manifest in kept if name in manifest.operators]
            if epochs:
                raise RecoveryError(
                    f"there was an operator of this name before, and epoch {epochs[-1]}, which is kept, has its state",
                    next_step=f"restore epoch {epochs[-1]} to have it back, or give the new operator another name",
                    flow=self._graph.flow,
                    operator=name,
                )

    def check_sinks(self, record: OperatorRecord, operator: OperatorId) -> None:
        """A sink is known to its table by its name: one that was named after its operator keeps that name."""
        now = self._graph.sinks_of(operator)
        for sink in record.sinks:
            called_now = f"{operator}{sink.removeprefix(record.operator)}"
            if sink not in now and sink.startswith(f"{record.operator}-") and called_now in now:
                raise RecoveryError(
                    f"the sink {sink} would be called {called_now}, and its table would not know it",
                    next_step=f'name it as before: flow.sink({operator}, …, name="{sink}")',
                    flow=self._graph.flow,
                    operator=operator,
                )
