"""Whether sources can still read the input that a flow needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cutline.errors import CutlineError, StoreError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord, LostInput
from cutline.model.ids import Generation, OperatorId
from cutline.protocol.history.log_histories import names_in_last_run
from cutline.protocol.recovery.facts import InputAhead, InputProblem, InputSince, NeedInputSince
from cutline.recovery.at_rest import FlowAtRest


def ran_in(
    flow: FlowAtRest, last: GenerationRecord, manifest: Manifest, new_names: Mapping[OperatorId, OperatorId]
) -> dict[OperatorId, Path]:
    """The directories that operators have run in since a checkpoint, by their names in it.

    ``last``: the newest generation. ``new_names``: the names in the code; empty: as in the checkpoint.
    """
    live = flow.layout.live_dirs(last.spark_dirs)
    names = names_in_last_run(last, manifest.generation, new_names or {name: name for name in manifest.operators})
    return {old: live[name] for old, name in names.items()}


def input_since(flow: FlowAtRest, need: NeedInputSince, folders: Mapping[OperatorId, Path]) -> InputSince:
    """The input that sources cannot read again.

    ``folders``: the directories that they have run in since, by their names in the checkpoint.
    """
    manifest = need.manifest
    found = InputSince(epoch=manifest.epoch, operators=need.operators, tier=need.tier)
    lost: list[LostInput] = []
    for name in sorted(need.operators):
        if name not in manifest.operators or name not in folders:
            continue
        try:
            lost += flow.query_dirs.lost_input(flow.checkpoints.load_record(manifest, name), folders[name])
        except StoreError as error:
            unknown = InputProblem(operator=name, what=error.what, next_step=error.next_step)
            return replace(found, lost=tuple(lost), unknown=unknown)
        except (CutlineError, OSError) as error:
            return replace(found, lost=tuple(lost), damage=str(error))
    return replace(found, lost=tuple(lost))


def input_ahead(flow: FlowAtRest, spark_dirs: Mapping[OperatorId, Generation]) -> InputAhead:
    """The input that continuing sources would read next, but cannot."""
    lost: list[LostInput] = []
    unknown: list[InputProblem] = []
    for name in flow.graph.names:
        if flow.graph.node(name).inputs or name not in spark_dirs:
            continue
        try:
            lost += flow.query_dirs.lost_ahead(name, flow.layout.spark_checkpoint_dir(name, spark_dirs[name]))
        except StoreError as error:
            unknown.append(InputProblem(operator=name, what=str(error)))
    return InputAhead(lost=tuple(lost), unknown=tuple(unknown))
