"""Garbage in the remote tier of a stopped flow."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.config.options import Options
from cutline.coordinator.factory import on_ladder
from cutline.errors import DamagedRecordError
from cutline.maintenance.findings import WHY, Collected, Garbage, OnFound, _ignore
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch
from cutline.ports.inspection import CoordinatorRecords
from cutline.ports.objects import ObjectInfo
from cutline.protocol.history.remote_retention import kept_when_stopped, progress_when_stopped
from cutline.tiers import early_upload
from cutline.tiers.remote_tier import RemoteTier


def collect_remote(
    tier: RemoteTier,
    known: CoordinatorRecords,
    *,
    here: Collection[Epoch],
    options: Options,
    generations: Sequence[GenerationRecord],
    grace_ms: int,
    is_dry_run: bool,
    on_found: OnFound = _ignore,
) -> Collected:
    """Collect the remote tier of a stopped flow; the caller holds its lock. Raises FencedError if another host runs.

    ``here``: the checkpoints of this host.
    """
    there = tier.checkpoints.epochs()
    # An interrupted start has taken a generation, perhaps recorded it in the remote tier, but not here.
    generation = max([known.generation, *(record.generation for record in generations)])
    try:
        # Without the coordinator's records, neither pins nor the progress of sinks are known: every checkpoint stays.
        keep = set(there)
        if not known.problem:
            pins = known.pins | on_ladder(options, lambda: map(tier.checkpoints.load_manifest, there), generations)
            keep = kept_when_stopped(there, here=here, pins=pins, retain=options.retain_checkpoints)
        gone = tier.collector.collect(
            keep,
            progress=progress_when_stopped(known.published, known.seen),
            now_ms=now_ms(),
            grace_ms=grace_ms,
            check_fence=lambda: tier.fence.check_fence(generation),
            is_dry_run=is_dry_run,
        )
    except DamagedRecordError as error:
        return Collected(findings=[], in_doubt=[f"the remote tier: {error}"])
    findings = [remote_finding(info) for info in gone]
    for finding in findings:
        on_found(finding)
    return Collected(findings=findings, in_doubt=[])


def remote_finding(info: ObjectInfo) -> Garbage:
    return Garbage(
        kind=_kind_of(info.path),
        path=info.path,
        size_bytes=info.size_bytes,
        why=WHY[_kind_of(info.path)],
        tier="remote",
    )


def _kind_of(path: str) -> str:
    parts = path.split("/")
    if durable.is_temporary(parts[-1]):
        return "temporary"
    if parts[0] == early_upload.FOLDER:
        return "ahead"
    if parts[0] == "published":
        return "published"
    if parts[0] == "checkpoints":
        return "manifest" if parts[-1] == "manifest.json" else "record"
    if parts[0] == "channels":
        return "segment" if parts[-2] == "data" else "entry"
    return "blob"
