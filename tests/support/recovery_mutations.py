"""Small, wrong changes to the decisions about sinks, recovery, the remote tier and what is synced.

Registered beside those of ``mutations``. A few change a rule that the simulator has to model, because the product's
own code for it works on files: they stand where the model stands for the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from cutline.model.ids import Epoch
from cutline.protocol.checkpoint import pending_epoch
from cutline.protocol.cut import agent
from cutline.protocol.history import known_checkpoints, remote_retention, remote_schedule
from cutline.protocol.messages.agent import AppendBarrier, TakeSnapshot
from cutline.protocol.publish import immediate, sink_ledger
from cutline.protocol.recovery import checkpoints, choose, continuing, live_state, sink_rules
from cutline.testing.simulator.processes import operator as operator_process
from cutline.testing.simulator.processes import recovery as simulated_start
from cutline.testing.simulator.processes import remote_tier, uploader
from cutline.testing.simulator.processes import snapshots as simulated_snapshots
from cutline.testing.simulator.storage import bucket
from cutline.worker import immediate_publishing
from tests.support.mutations import mutation

# ------------------------------------------------------------------------------------------------- the ledger of sinks


@mutation
def the_claim_of_a_sink_is_not_looked_at() -> Iterator[None]:
    with patch.object(sink_ledger.SinkLedger, "is_held_by", lambda *_: True):
        yield


@mutation
def a_repeated_commit_is_published_again() -> Iterator[None]:
    original = sink_ledger.judge

    def judge(*values: Any, **more: Any) -> Any:
        verdict = original(*values, **more)
        return sink_ledger.Verdict.PUBLISH if verdict is sink_ledger.Verdict.ALREADY else verdict

    with patch.object(sink_ledger, "judge", judge):
        yield


@mutation
def a_sink_is_not_rewound() -> Iterator[None]:
    original = sink_rules.settle

    def settle(*values: Any, **more: Any) -> Any:
        return replace(original(*values, **more), rewind_to=None)

    with patch.object(sink_rules, "settle", settle):
        yield


@mutation
def a_rewind_goes_one_epoch_too_far() -> Iterator[None]:
    original = sink_rules.settle

    def settle(*values: Any, **more: Any) -> Any:
        found = original(*values, **more)
        return found if found.rewind_to is None else replace(found, rewind_to=Epoch(found.rewind_to - 1))

    with patch.object(sink_rules, "settle", settle):
        yield


@mutation
def a_sink_counts_as_having_published_what_it_has_not() -> Iterator[None]:
    original = sink_rules.settle

    def settle(*values: Any, **more: Any) -> Any:
        found = original(*values, **more)
        return replace(found, reached=found.newest, published=found.newest)

    with patch.object(sink_rules, "settle", settle):
        yield


# ------------------------------------------------------------------------------------------------- immediate publishing


@mutation
def batches_are_numbered_without_their_generation() -> Iterator[None]:
    def place_of(_: Any, batch: int) -> Epoch:
        return Epoch(immediate.BATCHES_PER_GENERATION + batch)

    with (
        patch.object(immediate, "place_of", place_of),
        patch.object(immediate_publishing, "place_of", place_of),
    ):
        yield


@mutation
def batches_that_were_given_up_stay_published() -> Iterator[None]:
    original = immediate.compare

    def compare(*values: Any, **more: Any) -> Any:
        found = original(*values, **more)
        is_ahead = found.standing is immediate.Standing.AHEAD
        return replace(found, standing=immediate.Standing.STANDS) if is_ahead else found

    with patch.object(immediate_publishing, "compare", compare):
        yield


@mutation
def the_end_of_a_log_is_the_batch_before_its_last() -> Iterator[None]:
    def end_of(entries: Any) -> Any:
        return immediate.place_of(entries[-1].generation, entries[-1].batch - 1) if entries else None

    with patch.object(immediate, "end_of", end_of):
        yield


# ------------------------------------------------------------------------------------------------- the recovery path


@mutation
def a_start_does_not_look_at_directories() -> Iterator[None]:
    original = live_state.damage_of

    def damage_of(*values: Any, **more: Any) -> Any:
        return replace(original(*values, **more), damaged=frozenset())

    with patch.object(continuing, "damage_of", damage_of):
        yield


@mutation
def a_start_does_not_look_at_logs() -> Iterator[None]:
    original = live_state.damage_of

    def damage_of(*values: Any, **more: Any) -> Any:
        return replace(original(*values, **more), are_logs_whole=True)

    with patch.object(continuing, "damage_of", damage_of):
        yield


@mutation
def a_start_restores_only_what_is_damaged() -> Iterator[None]:
    with patch.object(continuing, "region_of", lambda failed, _: frozenset(failed)):
        yield


@mutation
def a_new_host_does_not_ask_the_remote_tier() -> Iterator[None]:
    with (
        patch.object(choose, "_stored", lambda inquiry: inquiry.facts.stored),
        patch.object(checkpoints, "_remote_records", lambda _: None),
    ):
        yield


@mutation
def a_new_host_publishes_nothing_of_the_epochs_before() -> Iterator[None]:
    with patch.object(checkpoints, "to_publish", lambda manifest, *_, **__: (manifest,)):
        yield


@mutation
def a_flow_with_checkpoints_may_begin_anew() -> Iterator[None]:
    with patch.object(checkpoints, "_candidates", lambda *_: iter(())):
        yield


@mutation
def a_new_host_counts_epochs_from_what_it_has_restored() -> Iterator[None]:
    with (
        patch.object(known_checkpoints, "highest_epoch", lambda recorded, _: recorded),
        patch.object(simulated_start, "highest_epoch", lambda recorded, _: recorded),
    ):
        yield


# ------------------------------------------------------------------------------------------------- cuts


@mutation
def every_cut_says_that_it_is_aligned() -> Iterator[None]:
    original = agent.Agent._cut_what_is_ready

    def aligned(self: Any, now_ms: int) -> list[Any]:
        return [
            replace(action, aligned=True) if isinstance(action, AppendBarrier | TakeSnapshot) else action
            for action in original(self, now_ms)
        ]

    with patch.object(agent.Agent, "_cut_what_is_ready", aligned):
        yield


@mutation
def a_binding_alignment_limit_is_ignored() -> Iterator[None]:
    original = agent.Agent._begin_alignment

    def begin(self: Any, epoch: Any, terms: Any, now_ms: int) -> Any:
        actions = original(self, epoch, terms, now_ms)
        if epoch in self._aligning and terms.is_binding:
            self._aligning[epoch] = replace(self._aligning[epoch], limit_ms=0)
        return actions

    with patch.object(agent.Agent, "_begin_alignment", begin):
        yield


@mutation
def an_operators_own_limit_beats_a_binding_one() -> Iterator[None]:
    original = agent.Agent._begin_alignment

    def begin(self: Any, epoch: Any, terms: Any, now_ms: int) -> Any:
        actions = original(self, epoch, terms, now_ms)
        # Only longer waits: shorter ones break what an aligned checkpoint promises, which is another mutation.
        if epoch in self._aligning and terms.is_binding and self._limits.own_ms is None:
            self._aligning[epoch] = replace(self._aligning[epoch], limit_ms=None)
        return actions

    with patch.object(agent.Agent, "_begin_alignment", begin):
        yield


@mutation
def an_older_generation_may_acknowledge() -> Iterator[None]:
    original = pending_epoch.PendingEpoch.acknowledge

    def acknowledge(self: Any, ack: Any) -> Any:
        return original(self, replace(ack, generation=self.generations[ack.operator]))

    with patch.object(pending_epoch.PendingEpoch, "acknowledge", acknowledge):
        yield


# ------------------------------------------------------------------------------------------------- what is synced


@mutation
def a_barrier_is_acknowledged_before_it_is_synced() -> Iterator[None]:
    with patch.object(operator_process.OperatorProcess, "sync_log", lambda _: None):
        yield


@mutation
def what_a_dead_process_left_unsynced_stays_so() -> Iterator[None]:
    with patch.object(operator_process, "left_unsynced", lambda _: []):
        yield


@mutation
def content_is_not_synced_before_its_record() -> Iterator[None]:
    with patch.object(simulated_snapshots.Snapshots, "sync_blob", lambda *_: None):
        yield


# ------------------------------------------------------------------------------------------------- the remote tier


@mutation
def a_host_that_was_replaced_goes_on_uploading() -> Iterator[None]:
    with (
        patch.object(remote_tier, "is_replaced", lambda *_: False),
        patch.object(remote_tier, "is_won", lambda *_, **__: True),
    ):
        yield


@mutation
def only_the_newest_checkpoint_is_uploaded() -> Iterator[None]:
    original = remote_schedule.epochs_to_upload
    with patch.object(uploader, "epochs_to_upload", lambda *values, **more: original(*values, **more)[-1:]):
        yield


@mutation
def the_remote_tier_drops_what_a_sink_has_yet_to_publish() -> Iterator[None]:
    original = remote_retention.kept_while_running

    def kept(there: Any, **more: Any) -> Any:
        return original(there, **{**more, "published": Epoch(10**9)})

    with patch.object(remote_tier, "kept_while_running", kept):
        yield


@mutation
def the_remote_tier_collects_young_objects() -> Iterator[None]:
    original = remote_retention.unreferenced

    def unreferenced(objects: Any, **more: Any) -> Any:
        return original(objects, **{**more, "grace_ms": 0})

    with patch.object(remote_tier, "unreferenced", unreferenced):
        yield


@mutation
def the_remote_tier_collects_what_a_checkpoint_needs() -> Iterator[None]:
    original = remote_retention.unreferenced

    def unreferenced(objects: Any, *, needed: Any, **more: Any) -> Any:
        return original(objects, needed=sorted(needed)[1:], **more)

    with patch.object(remote_tier, "unreferenced", unreferenced):
        yield


@mutation
def content_that_was_uploaded_early_is_not_protected() -> Iterator[None]:
    with (
        patch.object(bucket.Bucket, "early", lambda *_: frozenset()),
        patch.object(bucket.Bucket, "has", lambda *_: True),
    ):
        yield
