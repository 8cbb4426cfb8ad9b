"""Evolution: which operators of a checkpoint are which operators of the code, and which changes are refused."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cutline.errors import FlowDefinitionError, RecoveryError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.graph import FlowGraph
from cutline.model.ids import FlowName, OperatorId, SinkId
from cutline.protocol.history.renaming import Renaming

#: Per operator: the channels it reads, in their order.
Inputs = Mapping[OperatorId, Sequence[OperatorId]]
Fate = Literal["kept", "renamed", "dropped", "added"]

_NEW_NAME = "or give the changed flow a new name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The flow as the code declares it."""

    flow: FlowName
    #: Per operator, in an order in which inputs come before consumers.
    inputs: Inputs
    #: Per operator: the Arrow schema of its rows, as an IPC message.
    schemas: Mapping[OperatorId, bytes]
    #: Per sink: the operator that it takes its rows from.
    sinks: Mapping[SinkId, OperatorId] = field(default_factory=dict)
    is_per_operator: bool = False

    @property
    def names(self) -> tuple[OperatorId, ...]:
        return tuple(self.inputs)

    def consumers(self) -> dict[OperatorId, tuple[OperatorId, ...]]:
        """Per operator: the operators that read it."""
        return {name: tuple(other for other, read in self.inputs.items() if name in read) for name in self.inputs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How operators have changed since a checkpoint was taken, as the user declares."""

    #: Old name → new name.
    rename: Mapping[str, str] = field(default_factory=dict)
    #: Whether operators that the code no longer has may be dropped, with all their state.
    allow_dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolvedOperator:
    """How one operator evolves."""

    fate: Fate
    #: Its name in the checkpoint; None: it is new.
    was: OperatorId | None
    #: Its name in the code; None: it is dropped.
    now: OperatorId | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolution:
    """Every operator of the checkpoint and of the code, once."""

    operators: tuple[EvolvedOperator, ...]

    @property
    def renaming(self) -> Renaming:
        return Renaming({one.was: one.now for one in self.operators if one.was is not None and one.now is not None})

    @property
    def added(self) -> tuple[OperatorId, ...]:
        return tuple(one.now for one in self.operators if one.was is None and one.now is not None)

    @property
    def is_unchanged(self) -> bool:
        return all(one.fate == "kept" for one in self.operators)

    def with_notes(self, notes: Mapping[OperatorId, str]) -> Evolution:
        """``notes``: of operators of the code."""
        found = (
            EvolvedOperator(fate=one.fate, was=one.was, now=one.now, note=notes.get(one.now, one.note))
            if one.now is not None
            else one
            for one in self.operators
        )
        return Evolution(operators=tuple(found))


def match_operators(recorded: Inputs, declared: Inputs, *, flow: FlowName, where: str, changes: Changes) -> Evolution:
    """Match operators by name, and renamed ones by ``changes``.

    ``recorded``: the operators in storage, ``where`` names their place; ``declared``: the operators of the code. Raises
    RecoveryError for a change that is contradictory or would lose state.
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
            next_step="restore a checkpoint or savepoint and rename or drop them with their state "
            "(cutline restore --to … --rename OLD=NEW --allow-dropped); or run the former operators",
            flow=flow,
        )
    for old, new in new_names.items():
        _check_inputs(old, new, recorded[old], declared[new], new_names, flow=flow)
    kept = [
        EvolvedOperator(fate="kept" if old == new else "renamed", was=old, now=new, note=f"continues from {where}")
        for old, new in new_names.items()
    ]
    gone = [EvolvedOperator(fate="dropped", was=old, now=None, note="its state is dropped") for old in dropped]
    fresh = [EvolvedOperator(fate="added", was=None, now=name, note="begins without state") for name in added]
    return Evolution(operators=(*kept, *gone, *fresh))


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
    """Spark identifies sources by number: it would read one channel from the position of another."""
    gone = [name for name in before if name not in new_names]
    if gone:
        raise RecoveryError(
            f"{gone[0]} no longer exists, but this operator was reading it",
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
    """The inputs in the order of the code."""
    return {node.operator: node.inputs for node in graph.operators}


def check_mode(definition: Definition, current: GenerationRecord) -> None:
    """Raise RecoveryError if the flow last ran in the other mode."""
    if current.is_per_operator != definition.is_per_operator:
        was, will_be = ("per-operator", "coordinated") if current.is_per_operator else ("coordinated", "per-operator")
        raise RecoveryError(
            f"the flow was checkpointed in {was} mode, and cannot go on in {will_be} mode",
            next_step="set mode as it was, or give the flow a new name",
            flow=definition.flow,
        )


def since_last_run(definition: Definition, current: GenerationRecord) -> Evolution:
    """Operators of the last run continue; new ones may join them."""
    evolution = _from_record(definition, current, Changes(), "the last run")
    if definition.is_per_operator and not evolution.is_unchanged:
        raise RecoveryError(
            f"in per-operator mode no operator can join a flow that has run: {', '.join(evolution.added)}",
            next_step="run the operators it was stopped with, or give the changed flow a new name",
            flow=definition.flow,
        )
    return evolution


def since_checkpoint(
    definition: Definition, manifest: Manifest, generations: Iterable[GenerationRecord], changes: Changes
) -> Evolution:
    """``generations``: all of them; the one that took the checkpoint records what its operators read."""
    where = f"epoch {manifest.epoch}"
    record = next((one for one in generations if one.generation == manifest.generation), None)
    if record is not None:
        return _from_record(definition, record, changes, where)
    # Without the record the inputs of that time are unknown. That is tolerable if nothing else has changed.
    if changes.rename or set(manifest.operators) != set(definition.names):
        raise RecoveryError(
            f"{where} has other operators than the flow, and the record of generation {manifest.generation}, "
            "which says what they read, is missing",
            next_step="run the former operators, or choose another checkpoint",
            flow=definition.flow,
        )
    return match_operators(definition.inputs, definition.inputs, flow=definition.flow, where=where, changes=changes)


def _from_record(definition: Definition, record: GenerationRecord, changes: Changes, where: str) -> Evolution:
    flow = definition.flow
    evolution = match_operators(record.inputs, definition.inputs, flow=flow, where=where, changes=changes)
    for operator, encoded in evolution.renaming.keys(record.schemas).items():
        if base64.b64decode(encoded) != definition.schemas[operator]:
            raise FlowDefinitionError(
                "the schema of this operator's channel has changed since the flow last ran",
                next_step=f"restore the old columns and types, {_NEW_NAME}",
                flow=flow,
                operator=operator,
            )
    return evolution


def refuse_returning_names(definition: Definition, evolution: Evolution, manifests: Iterable[Manifest]) -> None:
    """Refuse a new operator with the name of a former one whose state is kept: it would be taken for its own."""
    kept = list(manifests)
    for name in evolution.added:
        epochs = [manifest.epoch for manifest in kept if name in manifest.operators]
        if epochs:
            raise RecoveryError(
                f"there was an operator of this name before, and epoch {epochs[-1]}, which is kept, has its state",
                next_step=f"restore epoch {epochs[-1]} to use that state, or give the new operator another name",
                flow=definition.flow,
                operator=name,
            )


def check_sink_names(definition: Definition, sinks: Iterable[SinkId], *, old: OperatorId, new: OperatorId) -> None:
    """A target identifies a sink by its name: a sink that was named after its operator ``old`` must keep that name.

    ``sinks``: of ``old``, as the checkpoint names them.
    """
    now = {sink for sink, operator in definition.sinks.items() if operator == new}
    for sink in sinks:
        called_now = f"{new}{sink.removeprefix(old)}"
        if sink not in now and sink.startswith(f"{old}-") and called_now in now:
            raise RecoveryError(
                f"the sink {sink} would be called {called_now}, and its table would not know it",
                next_step=f'name it as before: flow.sink({new}, …, name="{sink}")',
                flow=definition.flow,
                operator=new,
            )
