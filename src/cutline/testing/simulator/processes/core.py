"""The coordinator's core, as the product's own factory builds it, from what a simulated disk holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutline.model.ids import NO_EPOCH, Generation, OperatorId
from cutline.protocol.checkpoint.coordinator import Coordinator
from cutline.protocol.checkpoint.per_operator import FlowCoordinator, PerOperatorCoordinator
from cutline.protocol.checkpoint.setup import EpochNumbers, Settings, Topology
from cutline.protocol.checkpoint.trigger import TriggerPolicy
from cutline.protocol.history.known_checkpoints import complete_epoch
from cutline.testing.simulator.storage.checkpoints import Checkpoint
from cutline.testing.simulator.storage.sinks import FLOW

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow


def coordinator_core(flow: SimulatedFlow, generation: Generation, now_ms: int) -> FlowCoordinator:
    numbers = EpochNumbers(max([flow.last_epoch(), *flow.disk.manifests]))
    live = flow.live()
    if not flow.settings.is_per_operator:
        return _core(flow, generation, now_ms, numbers, live=live, alone=None)
    return PerOperatorCoordinator(
        {name: _core(flow, generation, now_ms, numbers, live=live, alone=name) for name in flow.graph.operators},
        numbers,
    )


def _core(
    flow: SimulatedFlow,
    generation: Generation,
    now_ms: int,
    numbers: EpochNumbers,
    *,
    live: list[Checkpoint],
    alone: OperatorId | None,
) -> Coordinator:
    operators = flow.graph.operators if alone is None else (alone,)
    own = [one.manifest for one in live if alone is None or alone in one.manifest.operators]
    newest = own[-1].epoch if own else NO_EPOCH
    return Coordinator(
        topology=Topology(
            flow=FLOW,
            subtasks={name: flow.graph.subtasks[name] for name in operators},
            sources=frozenset(flow.graph.sources if alone is None else operators),
            sinks={name: flow.graph.sinks_of(name) for name in operators},
            alone=alone,
        ),
        generation=generation,
        generations={name: flow.lineage(name).generation for name in flow.graph.operators},
        settings=_settings(flow, now_ms, alone),
        numbers=numbers,
        complete=[replace(complete_epoch(one), completed_ms=min(one.completed_ms, now_ms)) for one in own],
        published={
            sink: min(flow.published(sink), newest)
            for sink, target in flow.sinks.items()
            if target.operator in operators
        },
        pins=flow.disk.pins & {one.epoch for one in own},
    )


def _settings(flow: SimulatedFlow, now_ms: int, alone: OperatorId | None) -> Settings:
    settings, trigger = flow.settings, flow.settings.trigger
    if alone is not None:
        trigger = replace(trigger, interval_ms=settings.own_intervals_ms[alone])
    return Settings(
        timeout_ms=settings.timeout_ms,
        operator_timeouts_ms=settings.operator_timeouts_ms,
        alignment_limit_ms=settings.alignment_limit_ms,
        retention=settings.retention,
        trigger=TriggerPolicy(trigger, first_ms=now_ms),
        tolerable_failures=settings.tolerable_failures,
        ask_again_ms=150,
        ask_again_limit=5,
        sink_retry_ms=20,
        sink_retry_limit_ms=300,
        sink_silence_ms=500,
    )
