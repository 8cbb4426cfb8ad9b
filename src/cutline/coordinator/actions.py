"""Performs the actions of the coordinator's core: stores records, tells operators, returns the outcome as an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.base.redaction import without_secrets
from cutline.coordinator.history import abort_details, statistics
from cutline.coordinator.links import Links
from cutline.coordinator.manifests import build_manifest, found_manifest, why_not_stored
from cutline.coordinator.ports import CoordinatorPorts, OnCollected
from cutline.coordinator.requests import Requests
from cutline.errors import FencedError
from cutline.model.checkpoint import Manifest, Tombstone
from cutline.model.ids import Epoch, FlowName, OperatorId
from cutline.ports.metadata import EpochOutcome, PendingRecord
from cutline.protocol.checkpoint.per_operator import FlowCoordinator
from cutline.protocol.history.known_checkpoints import is_of_history
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    PendingStored,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    StoreAborted,
    StoreManifest,
    StorePending,
)
from cutline.protocol.messages.wire import AckRequested, BarrierRequested, EpochClosed
from cutline.protocol.publish.commit import CommitPermit

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A checkpoint was uploaded before it is complete; without a manifest: the upload failed for good."""

    epoch: Epoch
    manifest: Manifest | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Where the outcome goes of actions that end later."""

    uploaded: Callable[[Uploaded], None]
    collected: OnCollected
    requests: Requests


class Actions:
    """Performs one action at a time; the caller passes the returned event to the core."""

    def __init__(
        self,
        flow: FlowName,
        core: FlowCoordinator,
        ports: CoordinatorPorts,
        links: Links,
        *,
        lineages: Mapping[OperatorId, Lineage],
        replies: Replies,
    ) -> None:
        """``lineages``: of every operator's log, as the operators have reported."""
        self._flow = flow
        self._core = core
        self._ports = ports
        self._links = links
        self._lineages = lineages
        self._replies = replies
        self.health = ReportHealth(is_healthy=True, failures=0)

    def perform(self, action: CoordinatorAction) -> CoordinatorEvent | None:
        match action:
            case StorePending():
                return self._store_pending(action)
            case InjectBarrier():
                self._links.send(action.operator, BarrierRequested(epoch=action.epoch, terms=action.terms))
            case RequestAck():
                self._links.send(action.operator, AckRequested(epoch=action.epoch))
            case StoreManifest():
                return self._store_manifest(action)
            case StoreAborted():
                return self._store_aborted(action)
            case AnnounceClosed():
                self._announce(action)
            case CommitSink():
                self._links.send(action.permit.operator, self._with_saved(action.permit))
            case ReleaseEpochs():
                crashpoint("after-sink-commits")
                self._ports.release(action, self._replies.collected)
            case ReportHealth():
                self._report(action)
            case AnswerRequest():
                self._replies.requests.answer(action)
            case _:
                assert_never(action)
        return None

    def _with_saved(self, permit: CommitPermit) -> CommitPermit:
        saved = self._ports.saved_epochs()
        if permit.rewind_points is None or saved is None:
            return replace(permit, rewind_points=None)
        return replace(permit, rewind_points=tuple(sorted({*permit.rewind_points, *saved})))

    def _announce(self, action: AnnounceClosed) -> None:
        names = self._links.operators if action.operator is None else [action.operator]
        for name in names:
            self._links.send(name, EpochClosed(epoch=action.epoch, completed=action.completed))
        if not action.completed and not action.is_reminder:
            self._ports.checkpoints.discard(action.epoch)

    def _report(self, action: ReportHealth) -> None:
        self.health = action
        if action.is_healthy:
            log.info("checkpoints_healthy_again", flow=self._flow)
        else:
            log.error("checkpoints_unhealthy", flow=self._flow, failures=action.failures, reason=action.reason)

    # ------------------------------------------------------------------ durable steps

    def _store_pending(self, action: StorePending) -> CoordinatorEvent:
        self._ports.metadata.store_pending(
            PendingRecord(epoch=action.epoch, generation=self._core.generation, terms=action.terms)
        )
        crashpoint("after-pending")
        return PendingStored(epoch=action.epoch)

    def _store_manifest(self, action: StoreManifest) -> CoordinatorEvent | None:
        problem = why_not_stored(action, self._lineages)
        if problem:
            return ManifestRefused(epoch=action.epoch, reason=problem)
        before = next((item for item in self._core.complete if item.epoch == action.previous_epoch), None)
        manifest = build_manifest(
            self._flow,
            self._core.generation,
            action,
            self._lineages,
            before=before,
            completed_ms=now_ms(),
            history=self._ports.history,
            code=self._ports.code,
        )
        crashpoint("before-manifest")
        if self._ports.upload_first is not None:
            # Meanwhile no other epoch of this flow completes, and nothing that this epoch needs is collected.
            self._ports.upload_first(
                manifest, lambda there, problem: self._replies.uploaded(Uploaded(action.epoch, there, problem))
            )
            return None
        return self._create_manifest(manifest)

    def uploaded(self, uploaded: Uploaded) -> CoordinatorEvent:
        if uploaded.manifest is None:
            return ManifestRefused(epoch=uploaded.epoch, reason=uploaded.problem)
        return self._create_manifest(uploaded.manifest)

    def _create_manifest(self, manifest: Manifest) -> CoordinatorEvent:
        generation = self._core.generation
        there = self._ports.checkpoints.store_manifest(manifest)
        if isinstance(there, Tombstone) or there.generation > generation:
            raise FencedError(
                f"generation {there.generation} has decided about this epoch",
                next_step="stop this process: another one runs the flow",
                epoch=manifest.epoch,
                flow=self._flow,
            )
        if not is_of_history(there, self._lineages):
            reason = f"generation {there.generation} has completed it in a history of its own"
            return ManifestRefused(epoch=manifest.epoch, reason=reason)
        crashpoint("after-manifest")
        return self._completed(there)

    def _completed(self, manifest: Manifest) -> ManifestStored:
        """The checkpoint exists, possibly stored by an earlier coordinator."""
        duration_ms = manifest.completed_ms - manifest.started_ms
        self._ports.metadata.store_outcome(
            EpochOutcome(
                epoch=manifest.epoch,
                generation=manifest.generation,
                started_ms=manifest.started_ms,
                ended_ms=manifest.completed_ms,
                outcome="completed",
                reason="",
                details=statistics(manifest, self._rows_of(manifest)),
                code=manifest.code,
            )
        )
        self._ports.metrics.checkpoint_completed(manifest.epoch, duration_ms)
        log.info("checkpoint_completed", flow=self._flow, epoch=manifest.epoch, ms=duration_ms)
        self._ports.on_complete(manifest.epoch)
        by_us = manifest.generation == self._core.generation
        return ManifestStored(
            epoch=manifest.epoch,
            completed_ms=manifest.completed_ms,
            flow_ms=manifest.flow_ms,
            found=None if by_us else found_manifest(manifest),
        )

    def _rows_of(self, manifest: Manifest) -> dict[OperatorId, int | None]:
        """What each operator has produced for this checkpoint."""
        cuts = manifest.operators.items()
        return {name: self._ports.rows_between(name, cut.after_batch, cut.batch) for name, cut in cuts}

    def _store_aborted(self, action: StoreAborted) -> CoordinatorEvent:
        reason = without_secrets(action.reason)
        if action.is_inherited:
            tombstone = Tombstone(
                epoch=action.epoch, generation=self._core.generation, reason=without_secrets(action.reason)
            )
            there = self._ports.checkpoints.store_tombstone(tombstone)
            # A manifest of a history that was given up does not count.
            if isinstance(there, Manifest) and is_of_history(there, self._lineages):
                return self._completed(there)
        pending, ended_ms = self._core.pending[action.epoch], now_ms()
        self._ports.metadata.store_outcome(
            EpochOutcome(
                epoch=action.epoch,
                generation=self._core.generation,
                started_ms=pending.started_ms,
                ended_ms=ended_ms,
                outcome="aborted",
                reason=reason,
                details=abort_details(pending, ended_ms=ended_ms),
            )
        )
        self._ports.metrics.checkpoint_aborted()
        log.warning("checkpoint_aborted", flow=self._flow, epoch=action.epoch, reason=action.reason)
        return AbortStored(epoch=action.epoch)
