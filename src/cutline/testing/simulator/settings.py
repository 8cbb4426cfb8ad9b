"""How one simulated flow is configured, as its seed has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from cutline.model.ids import OperatorId, SinkId
from cutline.protocol.checkpoint.trigger import TriggerSettings
from cutline.protocol.cut.agent import AS_FLOW
from cutline.protocol.history.retention import RetentionPolicy, Rung
from cutline.testing.simulator.graphs import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Times are virtual milliseconds."""

    interval_ms: int
    timeout_ms: int
    patience_ms: int
    alignment_limit_ms: int | None
    own_limits_ms: Mapping[OperatorId, int | None]
    operator_timeouts_ms: Mapping[OperatorId, int]
    trigger: TriggerSettings
    retention: RetentionPolicy
    tolerable_failures: int | None
    capacity_entries: int
    rows_per_source: int
    batch_ms: tuple[int, int]
    #: Every operator is checkpointed by itself, each at its own interval.
    is_per_operator: bool = False
    own_intervals_ms: Mapping[OperatorId, int] = field(default_factory=dict)
    #: Sinks that publish every batch as soon as it has happened.
    immediate: frozenset[SinkId] = frozenset()
    #: The targets of the sinks lose their power with the host.
    are_sinks_local: bool = False
    has_remote: bool = False
    #: A checkpoint must be in the remote tier before it counts.
    is_remote_first: bool = False
    upload_interval_ms: int = 0
    #: Operators whose content is uploaded more often than checkpoints are sealed; all or none.
    own_upload_intervals_ms: Mapping[OperatorId, int] = field(default_factory=dict)
    remote_retain: int = 1

    @property
    def needs_progress(self) -> bool:
        return self.trigger.needs_progress()


def random_settings(rng: Random, graph: Graph, *, is_per_operator: bool) -> FlowSettings:
    interval, timeout = rng.choice([60, 120, 250]), rng.choice([700, 1_500, 3_000])
    size = len(graph.operators)
    has_remote = not is_per_operator and rng.random() < 0.6
    has_early = has_remote and rng.random() < 0.4
    return FlowSettings(
        own_intervals_ms={name: interval * (1 + n % 4) * (1 + size // 6) for n, name in enumerate(graph.operators)},
        interval_ms=interval,
        timeout_ms=timeout,
        patience_ms=rng.choice([timeout, timeout, timeout // 10]),
        alignment_limit_ms=rng.choice([None, 0, 0, 20, 80]),
        own_limits_ms={name: rng.choice([None, 0, 30]) if rng.random() < 0.1 else AS_FLOW for name in graph.operators},
        operator_timeouts_ms={name: 600 for name in graph.operators if rng.random() < 0.05},
        trigger=TriggerSettings(
            interval_ms=interval,
            min_pause_ms=rng.choice([0, 0, 30]),
            max_concurrent=rng.choice([1, 1, 2, 3]),
            every_batches=rng.choice([0, 0, 0, 7]),
            every_rows=rng.choice([0, 0, 0, 20]),
            event_time_ms=rng.choice([0, 0, 0, 100]),
            backlog_interval_ms=rng.choice([0, 0, 2 * interval]),
        ),
        retention=_retention(rng, is_per_operator=is_per_operator),
        tolerable_failures=rng.choice([None, 0, 2]),
        capacity_entries=rng.choice([1, 4, 64]),
        rows_per_source=rng.choice([30, 80, 150]),
        batch_ms=(4, 18) if size <= 10 else (15, 60),
        is_per_operator=is_per_operator,
        immediate=frozenset(sink for sink in graph.sinks if rng.random() < 0.25),
        are_sinks_local=not has_remote and rng.random() < 0.5,
        has_remote=has_remote,
        is_remote_first=has_remote and rng.random() < 0.2,
        upload_interval_ms=rng.choice([400, 900] if has_early else [0, 0, 100, 400]),
        own_upload_intervals_ms={name: rng.choice([50, 200]) for name in graph.operators if has_early},
        remote_retain=rng.choice([1, 1, 2]),
    )


def _retention(rng: Random, *, is_per_operator: bool) -> RetentionPolicy:
    count, age_ms = rng.choice([1, 1, 2, 3]), rng.choice([None, None, 300])
    has_ladder = age_ms is not None and not is_per_operator
    ladder = (Rung(until_ms=200, every_ms=0), Rung(until_ms=4_000, every_ms=400)) if has_ladder else ()
    return RetentionPolicy(count=count, age_ms=age_ms, ladder=ladder, detaches=not is_per_operator, pause_ms=1_000)
