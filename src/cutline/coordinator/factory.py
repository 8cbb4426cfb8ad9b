"""Builds the coordinator's core from a flow's options: one for the whole flow, or one for each operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cutline.base.clock import now_ms
from cutline.config.options import OperatorOptions, Options
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.graph import FlowGraph
from cutline.model.ids import Epoch, Generation, OperatorId, SinkId
from cutline.model.plan import OperatorPlan
from cutline.protocol.checkpoint.coordinator import Coordinator
from cutline.protocol.checkpoint.per_operator import FlowCoordinator, PerOperatorCoordinator
from cutline.protocol.checkpoint.setup import EpochNumbers, Settings, Topology
from cutline.protocol.checkpoint.trigger import TriggerPolicy, TriggerSettings
from cutline.protocol.history.known_checkpoints import complete_epoch, of_present_history
from cutline.protocol.history.remote_schedule import Cadence
from cutline.protocol.history.retention import RetentionPolicy, Rung

#: A longer time without a checkpoint is a pause of the flow, in which its history does not age …
_PAUSE_MS = 3_600_000
#: … or some intervals, if those are longer …
_PAUSE_INTERVALS = 3
#: … or a day, if checkpoints come by other rules than an interval.
_PAUSE_ON_REQUEST_MS = 24 * _PAUSE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStart:
    """Where a coordinator starts: what recovery has found."""

    generation: Generation
    #: The complete checkpoints of the present history, oldest first.
    manifests: Sequence[Manifest]
    #: The highest epoch number that was ever used.
    last_epoch: Epoch
    #: The newest epoch that each sink has published.
    published: Mapping[SinkId, Epoch]
    pins: frozenset[Epoch]
    #: Of these this host has only the records.
    only_records: frozenset[Epoch] = frozenset()


def own_options(graph: FlowGraph, options: Options, operator: OperatorId) -> OperatorOptions:
    """The operator's own options: configuration wins over code."""
    return options.of_operator(operator, graph.node(operator).options)


def cadence_of(graph: FlowGraph, options: Options) -> Cadence:
    """How often each operator is uploaded to the remote tier."""
    own_ms = {name: own_options(graph, options, name).replicate_interval_ms for name in graph.names}
    if all(one is None for one in own_ms.values()):
        return Cadence(options.replicate_interval_ms, {})
    return Cadence(
        options.replicate_interval_ms,
        {name: options.replicate_interval_ms if one is None else one for name, one in own_ms.items()},
    )


def trigger_settings(options: Options, own_interval_ms: int | None = None) -> TriggerSettings:
    return TriggerSettings(
        interval_ms=options.checkpoint_interval_ms if own_interval_ms is None else own_interval_ms,
        min_pause_ms=options.min_pause_ms,
        max_concurrent=options.max_concurrent_checkpoints,
        every_batches=options.checkpoint_every_batches,
        every_rows=options.checkpoint_every_rows,
        event_time_ms=options.checkpoint_event_time_ms,
        backlog_interval_ms=options.checkpoint_interval_backlog_ms,
    )


def retention_policy(options: Options) -> RetentionPolicy:
    """An operator that is checkpointed alone reads the logs up to now when it is restored: no ladder spares them."""
    is_alone = options.is_per_operator
    ladder = () if is_alone else tuple(Rung(until_ms=until, every_ms=every) for until, every in options.retain)
    intervals = [options.checkpoint_interval_ms, options.checkpoint_interval_backlog_ms]
    longest_ms = max(one or 0 for one in intervals)
    return RetentionPolicy(
        count=options.retain_checkpoints,
        age_ms=options.retain_age_ms,
        ladder=ladder,
        detaches=not is_alone,
        pause_ms=max(_PAUSE_MS, _PAUSE_INTERVALS * longest_ms) if longest_ms else _PAUSE_ON_REQUEST_MS,
    )


def on_ladder(
    options: Options, load_all: Callable[[], Iterable[Manifest]], generations: Sequence[GenerationRecord]
) -> set[Epoch]:
    """Of the checkpoints in the remote tier, those to keep for their age, whether this host has them or not.

    It may have taken over from another one, or have uploaded others than it keeps itself.
    """
    policy = retention_policy(options)
    if not policy.ladder:
        return set()
    manifests = of_present_history(load_all(), generations)
    return set(policy.on_ladder([complete_epoch(one) for one in manifests], now_ms()))


def _operator_timeouts_ms(graph: FlowGraph, options: Options) -> dict[OperatorId, int]:
    timeouts = {name: own_options(graph, options, name).checkpoint_timeout_ms for name in graph.names}
    return {
        name: timeout_ms
        for name, own_ms in timeouts.items()
        if (timeout_ms := options.operator_timeout_ms if own_ms is None else own_ms) is not None
    }


def coordinator_core(
    *,
    graph: FlowGraph,
    plans: Mapping[OperatorId, OperatorPlan],
    options: Options,
    start: CoordinatorStart,
) -> FlowCoordinator:
    numbers = EpochNumbers(start.last_epoch)

    def core(operators: Iterable[OperatorId], alone: OperatorId | None) -> Coordinator:
        return _core_of(
            operators=tuple(operators),
            alone=alone,
            graph=graph,
            plans=plans,
            options=options,
            start=start,
            numbers=numbers,
        )

    if not options.is_per_operator:
        return core(graph.names, None)
    return PerOperatorCoordinator({name: core([name], name) for name in graph.names}, numbers)


def _core_of(
    *,
    operators: tuple[OperatorId, ...],
    alone: OperatorId | None,
    graph: FlowGraph,
    plans: Mapping[OperatorId, OperatorPlan],
    options: Options,
    start: CoordinatorStart,
    numbers: EpochNumbers,
) -> Coordinator:
    # Checkpoints from before an operator joined or was renamed belong to the history: sinks may have to publish them.
    manifests = [manifest for manifest in start.manifests if alone in (None, *manifest.operators)]
    own_interval_ms = own_options(graph, options, alone).checkpoint_interval_ms if alone is not None else None
    return Coordinator(
        topology=Topology(
            flow=graph.flow,
            subtasks={name: plans[name].subtasks for name in operators},
            sources=graph.sources if alone is None else frozenset(operators),
            sinks={name: graph.sinks_of(name) for name in operators},
            alone=alone,
        ),
        generation=start.generation,
        settings=Settings(
            timeout_ms=options.checkpoint_timeout_ms,
            operator_timeouts_ms=_operator_timeouts_ms(graph, options),
            alignment_limit_ms=options.alignment_limit_ms(),
            retention=retention_policy(options),
            trigger=TriggerPolicy(
                trigger_settings(options, own_interval_ms),
                first_ms=now_ms(),
                awaited=None if manifests else [name for name in operators if graph.sinks_of(name)],
            ),
            tolerable_failures=options.tolerable_failures,
        ),
        numbers=numbers,
        complete=[
            replace(complete_epoch(manifest), is_restorable=manifest.epoch not in start.only_records)
            for manifest in manifests
        ],
        published={sink: start.published[sink] for name in operators for sink in graph.sinks_of(name)},
        pins=start.pins & {manifest.epoch for manifest in manifests} if alone is not None else start.pins,
    )
