"""Epochs that an earlier process left open."""

from __future__ import annotations

from cutline.base.clock import now_ms
from cutline.coordinator.history import statistics
from cutline.model.checkpoint import Manifest
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.metadata import EpochOutcome, MetadataStore, PendingRecord
from cutline.protocol.checkpoint.setup import StoredPending
from cutline.protocol.history.epochs import is_resumable
from cutline.recovery.start import Recovered


def settle_pending(recovered: Recovered, metadata: MetadataStore, checkpoints: CheckpointStore) -> list[StoredPending]:
    """The epochs that an earlier generation left open; those whose end is known get their outcome here.

    One whose manifest exists is complete, whatever the coordinator's records say. If the manifest is unusable, because
    it cannot be read or the flow was restored to an earlier epoch, the pending epoch must not be resumed either.
    """
    complete = {manifest.epoch: manifest for manifest in recovered.manifests}
    stored = set(checkpoints.epochs())
    pending = []
    for record in recovered.pending:
        manifest = complete.get(record.epoch)
        if manifest is not None:
            metadata.store_outcome(completed(manifest))
        elif record.epoch in stored:
            metadata.store_outcome(_given_up(record))
        else:
            # An operator that has joined does not know the epoch.
            resumable = is_resumable(record.generation, recovered.generation_starts) and not recovered.evolution.added
            pending.append(StoredPending(epoch=record.epoch, terms=record.terms, is_resumable=resumable))
    return pending


def completed(manifest: Manifest, reason: str = "") -> EpochOutcome:
    """The outcome of an epoch whose manifest exists."""
    return EpochOutcome(
        epoch=manifest.epoch,
        generation=manifest.generation,
        started_ms=manifest.started_ms,
        ended_ms=manifest.completed_ms,
        outcome="completed",
        reason=reason,
        details=statistics(manifest),
        code=manifest.code,
    )


def _given_up(record: PendingRecord) -> EpochOutcome:
    return EpochOutcome(
        epoch=record.epoch,
        generation=record.generation,
        started_ms=record.terms.started_ms,
        ended_ms=max(now_ms(), record.terms.started_ms),
        outcome="aborted",
        reason="complete, but unusable or given up by a restore",
        details={},
    )
