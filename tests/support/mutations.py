"""Small, wrong changes to the protocol. The simulator must notice each of them.

Each is a function that patches one rule for as long as the context lasts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from cutline.model.ids import NO_EPOCH, BatchId, Epoch, OperatorId, Position
from cutline.protocol.checkpoint import coordinator, per_operator
from cutline.protocol.checkpoint import pending_epoch as checkpoint
from cutline.protocol.cut import agent, gate
from cutline.protocol.history import epochs, lineage, retention
from cutline.protocol.messages.agent import AppendBarrier, BarrierAppeared, TakeSnapshot
from cutline.protocol.messages.coordinator import StoreManifest
from cutline.protocol.publish import commit, publishing
from cutline.protocol.recovery import region as recovery_region
from cutline.testing.simulator.processes import collector
from cutline.testing.simulator.processes import coordinator as coordinator_process
from cutline.testing.simulator.processes import flow as simulated_flow
from cutline.testing.simulator.processes import query as simulated_query

Mutation = Callable[[], Any]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    MUTATIONS[function.__name__] = contextmanager(function)
    return function


def all_mutations() -> dict[str, Mutation]:
    """By name, those of ``recovery_mutations`` and ``history_mutations`` too."""
    importlib.import_module("tests.support.recovery_mutations")
    importlib.import_module("tests.support.history_mutations")
    return MUTATIONS


@mutation
def gate_admits_past_an_uncut_barrier() -> Iterator[None]:
    with (
        patch.object(gate.InputGate, "admit", lambda self: self.end),
        patch.object(agent.Agent, "check", lambda self, event: None),
    ):
        yield


@mutation
def acks_are_counted_instead_of_remembered() -> Iterator[None]:
    def acknowledge(self: Any, ack: Any) -> Any:
        if self.state is not checkpoint.EpochState.COLLECTING:
            return checkpoint.AckOutcome.UNKNOWN
        self.parts.setdefault(ack.operator, []).append(ack)
        return checkpoint.AckOutcome.ACCEPTED

    def is_acknowledged_by_all(self: Any) -> bool:
        return sum(len(parts) for parts in self.parts.values()) >= len(self.awaiting)

    with (
        patch.object(checkpoint.PendingEpoch, "acknowledge", acknowledge),
        patch.object(checkpoint.PendingEpoch, "is_acknowledged_by_all", is_acknowledged_by_all),
    ):
        yield


@mutation
def a_missing_operator_is_overlooked() -> Iterator[None]:
    def is_acknowledged_by_all(self: Any) -> bool:
        return sum(1 for subtasks in self.awaiting.values() if subtasks) <= 1

    with patch.object(checkpoint.PendingEpoch, "is_acknowledged_by_all", is_acknowledged_by_all):
        yield


@mutation
def sinks_commit_before_the_manifest() -> Iterator[None]:
    original = coordinator.Coordinator._store_next_manifest

    def eager(self: Any) -> list[Any]:
        actions = original(self)
        for action in actions:
            if isinstance(action, StoreManifest):
                complete = publishing.CompleteEpoch(
                    epoch=action.epoch,
                    generation=self._generation,
                    previous_epoch=action.previous_epoch,
                    batches={name: ack.cut.batch for name, ack in action.acks.items()},
                )
                return [*self._publisher.due([*self._complete.epochs, complete], 0), *actions]
        return actions

    with patch.object(coordinator.Coordinator, "_store_next_manifest", eager):
        yield


@mutation
def epochs_are_used_again_after_a_restore() -> Iterator[None]:
    original = coordinator.Coordinator.__init__

    def forgetful(self: Any, **arguments: Any) -> None:
        complete = list(arguments.get("complete", ()))
        arguments["numbers"].last = complete[-1].epoch if complete else NO_EPOCH
        original(self, **{**arguments, "complete": complete})

    with patch.object(coordinator.Coordinator, "__init__", forgetful):
        yield


@mutation
def a_stale_generation_is_accepted() -> Iterator[None]:
    """Epochs of a history that was given up count as live."""
    with (
        patch.object(epochs, "live_epochs", lambda complete, _: sorted(e for e, _ in complete)),
        patch.object(epochs, "is_of_history", lambda *_: True),
    ):
        yield


@mutation
def what_an_old_life_completed_in_its_own_logs_is_taken_over() -> Iterator[None]:
    with (
        patch.object(epochs, "is_of_history", lambda *_: True),
    ):
        yield


@mutation
def truncation_goes_one_entry_too_far() -> Iterator[None]:
    original = retention.truncation_points

    def further(*values: Any) -> dict[OperatorId, Position]:
        return {name: Position(below + 1) for name, below in original(*values).items()}

    with patch.object(collector, "truncation_points", further):
        yield


@mutation
def a_pinned_epoch_is_collected() -> Iterator[None]:
    original = retention.RetentionPolicy.expendable

    def expendable(self: Any, complete: Any, *, pins: Any, **more: Any) -> Any:
        return original(self, complete, pins=(), **more)

    with patch.object(retention.RetentionPolicy, "expendable", expendable):
        yield


@mutation
def an_epoch_is_collected_while_it_is_read() -> Iterator[None]:
    original = collector.Collector.hold

    def hold(self: Any, epoch: Epoch) -> bool:
        is_there = original(self, epoch)
        self._held.clear()
        return is_there

    with patch.object(collector.Collector, "hold", hold):
        yield


@mutation
def claimed_content_is_collected() -> Iterator[None]:
    original = retention.unreachable
    with patch.object(collector, "unreachable", lambda stored, reached, _: original(stored, reached, ())):
        yield


@mutation
def an_epoch_is_collected_before_all_sinks_have_published_it() -> Iterator[None]:
    original = retention.RetentionPolicy.expendable

    def expendable(self: Any, complete: Any, *, published_everywhere: Any, **more: Any) -> Any:
        return original(self, complete, published_everywhere=Epoch(10**9), **more)

    with patch.object(retention.RetentionPolicy, "expendable", expendable):
        yield


@mutation
def the_barrier_is_placed_before_the_entry_of_its_batch() -> Iterator[None]:
    """The cut names the batch under way, whose entry comes after the barrier."""
    original = agent.Agent._cut_what_is_ready

    def early(self: Any, now_ms: int) -> list[Any]:
        return [
            replace(action, batch=BatchId(action.batch + 1))
            if isinstance(action, AppendBarrier | TakeSnapshot)
            else action
            for action in original(self, now_ms)
        ]

    with patch.object(agent.Agent, "_cut_what_is_ready", early):
        yield


@mutation
def a_cut_claims_to_have_read_what_is_only_admitted() -> Iterator[None]:
    original = agent.Agent._cut_what_is_ready

    def greedy(self: Any, now_ms: int) -> list[Any]:
        return [
            replace(action, positions={name: one.admit() for name, one in self._gates.items()})
            if isinstance(action, AppendBarrier | TakeSnapshot)
            else action
            for action in original(self, now_ms)
        ]

    with patch.object(agent.Agent, "_cut_what_is_ready", greedy):
        yield


@mutation
def an_abort_leaves_the_gate_shut() -> Iterator[None]:
    def close(self: Any, epoch: Any) -> None:
        self._closed.add(epoch)
        self._aligning.pop(epoch, None)
        self._cut.discard(epoch)

    with patch.object(agent.Agent, "_close", close):
        yield


@mutation
def a_restarted_agent_forgets_its_cuts() -> Iterator[None]:
    original = agent.Agent.__init__

    def forgetful(self: Any, **arguments: Any) -> None:
        original(self, **{**arguments, "found_cuts": ()})

    with patch.object(agent.Agent, "__init__", forgetful):
        yield


@mutation
def a_missed_epoch_is_cut_later() -> Iterator[None]:
    original = agent.Agent._miss

    def forgetful(self: Any, epoch: Any, reason: str) -> list[Any]:
        actions = original(self, epoch, reason)
        del self._missed[epoch]
        self._last_cut = NO_EPOCH
        return actions[:0]

    with patch.object(agent.Agent, "_miss", forgetful):
        yield


@mutation
def the_newest_epoch_is_published_first() -> Iterator[None]:
    original = publishing.Publisher.due

    def impatient(self: Any, complete: Any, now_ms: int, **more: Any) -> list[Any]:
        return original(self, list(complete)[-1:], now_ms, **more)

    with patch.object(publishing.Publisher, "due", impatient):
        yield


@mutation
def a_permit_covers_the_batch_before_its_first() -> Iterator[None]:
    def covers(self: Any, batch: int) -> bool:
        return bool(self.after_batch <= batch <= self.through_batch)

    with patch.object(commit.CommitPermit, "covers", covers):
        yield


@mutation
def an_epoch_begins_with_the_first_batch_when_the_one_before_is_gone() -> Iterator[None]:
    original = publishing.Publisher._permit

    def permit(self: Any, sink: Any, state: Any, epoch: Any, before: Any) -> Any:
        return original(self, sink, state, replace(epoch, after_batches={}), before)

    with patch.object(publishing.Publisher, "_permit", permit):
        yield


@mutation
def an_aborted_epoch_counts_as_published() -> Iterator[None]:
    original = commit.StagedOutput.closed

    def closed(self: Any, epoch: Any, *, completed: bool) -> None:
        original(self, epoch, completed=True)

    with patch.object(commit.StagedOutput, "closed", closed):
        yield


@mutation
def a_fork_drops_the_last_entry() -> Iterator[None]:
    original = lineage.Lineage.fork

    def fork(self: Any, generation: Any, at: int) -> Any:
        return original(self, generation, Position(max(at - 1, 0)))

    with patch.object(lineage.Lineage, "fork", fork):
        yield


@mutation
def only_the_failed_operator_goes_back() -> Iterator[None]:
    with patch.object(recovery_region, "region_of", lambda failed, _: frozenset(failed)):
        yield


@mutation
def an_epoch_pending_before_a_restore_is_resumed() -> Iterator[None]:
    with (
        patch.object(coordinator_process, "is_resumable", lambda *_: True),
        patch.object(simulated_flow, "is_resumable", lambda *_: True),
    ):
        yield


@mutation
def an_inherited_epoch_is_not_barred() -> Iterator[None]:
    original = coordinator.Coordinator._new_pending

    def new_pending(self: Any, *values: Any, **more: Any) -> Any:
        return original(self, *values, **{**more, "is_inherited": False})

    with patch.object(coordinator.Coordinator, "_new_pending", new_pending):
        yield


@mutation
def a_silent_sink_is_waited_for_forever() -> Iterator[None]:
    original = publishing.Publisher.__init__

    def patient(self: Any, *values: Any, **more: Any) -> None:
        original(self, *values, **{**more, "silence_ms": 10**9})

    with (
        patch.object(publishing.Publisher, "__init__", patient),
        patch.object(publishing.Publisher, "restarted", lambda *_: None),
    ):
        yield


@mutation
def a_batch_in_the_log_is_planned_anew_when_it_is_repeated() -> Iterator[None]:
    def anew(self: Any, _: BatchId) -> Any:
        return self.plan() or ({}, 0)

    with patch.object(simulated_query.Query, "logged_plan", anew):
        yield


@mutation
def a_barrier_of_one_operator_alone_stops_its_consumers() -> Iterator[None]:
    original = agent.Agent.handle

    def handle(self: Any, event: Any, *, now_ms: int) -> list[Any]:
        if isinstance(event, BarrierAppeared):
            event = replace(event, terms=replace(event.terms, alone=None, alignment_limit_ms=None))
        return original(self, event, now_ms=now_ms)

    with patch.object(agent.Agent, "handle", handle):
        yield


@mutation
def logs_are_truncated_although_somebody_has_no_snapshot() -> Iterator[None]:
    def eager(retained: Any, touched_by: Any) -> dict[OperatorId, Position]:
        needs = list(retained)
        named = {name for need in needs for name in need.channels if name in touched_by}
        return {name: min(need.channels[name] for need in needs if name in need.channels) for name in sorted(named)}

    with patch.object(collector, "truncation_points", eager):
        yield


@mutation
def operators_let_go_one_by_one_of_what_others_retain() -> Iterator[None]:
    original = per_operator.PerOperatorCoordinator._joined

    def one_by_one(self: Any, actions: Any) -> list[Any]:
        return [done for action in actions for done in original(self, [action])]

    with patch.object(per_operator.PerOperatorCoordinator, "_joined", one_by_one):
        yield
