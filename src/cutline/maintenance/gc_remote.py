"""Garbage in the remote tier of a stopped flow."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.errors import DamagedRecordError
from cutline.maintenance.findings import WHY, Collected, Garbage, OnFound, _ignore
from cutline.model.ids import Epoch, Generation
from cutline.ports.objects import ObjectInfo
from cutline.tiers import early_upload
from cutline.tiers.remote_tier import RemoteTier


def collect_remote(
    tier: RemoteTier,
    *,
    keep: Iterable[Epoch],
    generation: Generation,
    grace_ms: int,
    is_dry_run: bool,
    on_found: OnFound = _ignore,
) -> Collected:
    """Collect the remote tier of a stopped flow; the caller holds its lock. Raises FencedError if another host runs."""
    try:
        gone = tier.collector.collect(
            set(keep),
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
