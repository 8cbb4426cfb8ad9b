"""Enters the new generation: creating its record completes the recovery of a start or of a region of a running flow.

After a kill before it, the next start finds the former generation; after a kill behind it, it continues from this one.
"""

from __future__ import annotations

import base64
import socket
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.errors import FencedError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import Generation, OperatorId
from cutline.protocol.deploys import NamedSavepoints, code_since
from cutline.protocol.history.histories import identity_of
from cutline.protocol.history.lineage import Lineage, spans_of
from cutline.protocol.history.log_histories import log_histories
from cutline.protocol.recovery.plan import RestorePlan
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.retired_operators import channel_names

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a generation starts from."""

    generation: Generation
    identity: Identity
    #: Per operator: its log, with the lineage of this generation.
    lineages: Mapping[OperatorId, Lineage]
    #: Per operator: the generation whose spark_checkpoint_dir it runs on.
    spark_dirs: Mapping[OperatorId, Generation]
    #: The generations before, ascending; the newest is enough unless the whole flow is restored.
    generations: Sequence[GenerationRecord]
    #: Operators whose log begins anew.
    begun: Collection[OperatorId] = ()
    #: The checkpoint that the whole flow is restored to.
    restored: Manifest | None = None
    savepoints: NamedSavepoints = field(default_factory=NamedSavepoints)


def new_identity() -> Identity:
    return uuid.uuid4().hex


def enter(plan: RestorePlan, entry: Entry, flow: FlowAtRest, *, scope: str = "") -> GenerationRecord:
    """Make a built plan the present state of the flow. Raises FencedError if another process has taken over.

    ``scope``: the operator that failed, if only a region is restored.
    """
    begun, left = log_histories(
        entry.generations,
        generation=entry.generation,
        names=entry.lineages.keys(),
        begun_now=entry.begun,
        restored=entry.restored,
        existing=channel_names(flow.layout),
    )
    record = GenerationRecord(
        generation=entry.generation,
        started_ms=now_ms(),
        path=plan.path,
        restored_epoch=plan.epoch,
        reason=plan.reason,
        lineage={name: spans_of(one) for name, one in entry.lineages.items()},
        spark_dirs=dict(entry.spark_dirs),
        inputs={node.operator: list(node.inputs) for node in flow.graph.operators},
        schemas={name: base64.b64encode(one.schema_ipc).decode() for name, one in flow.plans.items()},
        is_per_operator=flow.is_per_operator,
        begun=begun,
        left=left,
        lost_input=list(plan.lost_input),
        identity=entry.identity,
        parent=identity_of(entry.generations[-1]) if entry.generations else "",
        host=socket.gethostname(),
        code=flow.code,
        code_since_ms=code_since(entry.generations, flow.code, now_ms()) if flow.code is not None else 0,
        saved=entry.savepoints.saved,
        restored_savepoint=entry.savepoints.restored,
    )
    if flow.remote is not None and plan.epoch is not None:
        # First: killed after the announcement, the next start must recognise it as its own.
        flow.metadata.store_announced(record.identity)
        flow.remote.announce(record)
        crashpoint("remote-told")
    if not flow.generations.create(record):
        raise FencedError("another process has taken this generation", generation=entry.generation)
    crashpoint("restore-generation", scope)
    for lost in plan.lost_input:
        log.warning("input_lost", flow=flow.graph.flow, operator=lost.operator, what=lost.what, why=lost.why)
    return record
