"""The coordinator's core as a flow's options want it: for the whole flow, or one for each operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cutline.base.clock import now_ms
from cutline.config.options import OperatorOptions, Options
from cutline.coordinator.manifests import complete_epoch
from cutline.errors import ConfigError
from cutline.model.graph import FlowGraph
from cutline.model.ids import Epoch, OperatorId, SinkId
from cutline.ports import OperatorPlan
from cutline.protocol.checkpoint.coordinator import Coordinator, EpochNumbers, Settings, Topology
from cutline.protocol.checkpoint.per_operator import FlowCoordinator, PerOperatorCoordinator
from cutline.protocol.checkpoint.trigger import TriggerPolicy, TriggerSettings
from cutline.protocol.history.remote_schedule import Cadence
from cutline.protocol.history.retention import RetentionPolicy
from cutline.recovery.start import Recovered


def check_operator_options(graph: FlowGraph, options: Options) -> None:
    """What is set for operators is meant for ones that are there, and means something in the flow's mode."""
    unknown = sorted(set(options.operators) - set(graph.names))
    if unknown:
        raise ConfigError(
            f"operators.{unknown[0]}: the flow has no such operator",
            next_step=f"its operators are: {', '.join(graph.names)}",
            flow=graph.flow,
        )
    if options.spark_dirs and "://" not in options.spark_dirs:
        raise ConfigError(
            f"spark_dirs: {options.spark_dirs!r} is not a URL",
            next_step='write for example "hdfs://host/path"; a folder that all machines share belongs into storage',
            flow=graph.flow,
        )
    if options.spark_dirs and options.is_per_operator:
        raise ConfigError(
            "spark_dirs: in per-operator mode Spark's directories lie in storage",
            next_step="choose another mode, or leave spark_dirs out",
            flow=graph.flow,
        )
    for name in graph.names:
        own = own_options(graph, options, name)
        if options.is_per_operator and own.sets_alignment():
            raise ConfigError(
                "mode and alignment_timeout of an operator mean nothing in per-operator mode",
                next_step="leave them out",
                flow=graph.flow,
                operator=name,
            )
        if own.checkpoint_interval_ms is not None and not options.is_per_operator:
            raise ConfigError(
                "checkpoint_interval of an operator is for per-operator mode: otherwise all cut together",
                next_step='set mode = "per-operator" for the flow, or checkpoint_interval for the flow',
                flow=graph.flow,
                operator=name,
            )
        if own.replicate_interval_ms is not None:
            _check_own_replication(graph, options, name)


def _check_own_replication(graph: FlowGraph, options: Options, operator: OperatorId) -> None:
    if options.is_per_operator:
        raise ConfigError(
            "replicate_interval of an operator means nothing in per-operator mode, which has no remote tier",
            next_step="leave it out",
            flow=graph.flow,
            operator=operator,
        )
    if options.durable == "remote":
        raise ConfigError(
            'replicate_interval of an operator means nothing with durable = "remote": each checkpoint is sent at once',
            next_step='leave it out, or set durable = "local"',
            flow=graph.flow,
            operator=operator,
        )


def own_options(graph: FlowGraph, options: Options, operator: OperatorId) -> OperatorOptions:
    """What an operator has for itself: configuration wins over code."""
    return options.operators.get(operator, OperatorOptions()).over(graph.node(operator).options)


def cadence_of(graph: FlowGraph, options: Options) -> Cadence:
    """How often what goes to the remote tier."""
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
    recovered: Recovered,
    last_epoch: Epoch,
    published: Mapping[SinkId, Epoch],
    pins: frozenset[Epoch],
) -> FlowCoordinator:
    numbers = EpochNumbers(last_epoch)

    def core(operators: Iterable[OperatorId], alone: OperatorId | None) -> Coordinator:
        return _core_of(
            operators=tuple(operators),
            alone=alone,
            graph=graph,
            plans=plans,
            options=options,
            recovered=recovered,
            numbers=numbers,
            published=published,
            pins=pins,
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
    recovered: Recovered,
    numbers: EpochNumbers,
    published: Mapping[SinkId, Epoch],
    pins: frozenset[Epoch],
) -> Coordinator:
    # Those from before an operator joined, or had its name, are of the history too: sinks may yet have to publish them.
    manifests = [manifest for manifest in recovered.manifests if alone in (None, *manifest.operators)]
    own_interval_ms = own_options(graph, options, alone).checkpoint_interval_ms if alone is not None else None
    return Coordinator(
        topology=Topology(
            flow=graph.flow,
            subtasks={name: plans[name].subtasks for name in operators},
            sources=graph.sources if alone is None else frozenset(operators),
            sinks={name: graph.sinks_of(name) for name in operators},
            alone=alone,
        ),
        generation=recovered.generation,
        settings=Settings(
            timeout_ms=options.checkpoint_timeout_ms,
            operator_timeouts_ms=_operator_timeouts_ms(graph, options),
            alignment_limit_ms=options.alignment_limit_ms(),
            retention=RetentionPolicy(count=options.retain_checkpoints, age_ms=options.retain_age_ms),
            trigger=TriggerPolicy(trigger_settings(options, own_interval_ms), first_ms=now_ms()),
            tolerable_failures=options.tolerable_failures,
        ),
        numbers=numbers,
        complete=[complete_epoch(manifest) for manifest in manifests],
        published={sink: published[sink] for name in operators for sink in graph.sinks_of(name)},
        pins=pins & {manifest.epoch for manifest in manifests} if alone is not None else pins,
    )
