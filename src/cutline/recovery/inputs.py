"""Whether sources can still read the input that a flow needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cutline.errors import CutlineError, StoreError
from cutline.model.generation import LostInput
from cutline.model.ids import Generation, OperatorId
from cutline.protocol.recovery.facts import InputAhead, InputProblem, InputSince, NeedInputSince
from cutline.recovery.at_rest import FlowAtRest


def ran_in(live_dirs: Mapping[OperatorId, Path], new_names: Mapping[OperatorId, OperatorId]) -> dict[OperatorId, Path]:
    """Where operators have run since a checkpoint, under their former or their present names."""
    today = {old: live_dirs[new] for old, new in new_names.items() if new in live_dirs}
    return {**today, **live_dirs}


def input_since(flow: FlowAtRest, need: NeedInputSince, live_dirs: Mapping[OperatorId, Path]) -> InputSince:
    """The input that sources cannot read again; ``live_dirs`` say what they have read since the checkpoint."""
    manifest = need.manifest
    found = InputSince(epoch=manifest.epoch, operators=need.operators, tier=need.tier)
    folders = ran_in(live_dirs, need.new_names)
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
