"""Figures of complete and aborted checkpoints, for the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutline.coordinator.manifests import operator_cut
from cutline.model.checkpoint import Manifest, OperatorCut
from cutline.model.ids import OperatorId
from cutline.protocol.checkpoint.pending_epoch import PendingEpoch


def statistics(manifest: Manifest, rows: Mapping[OperatorId, int | None] | None = None) -> dict[str, Any]:
    """Figures of a complete checkpoint; those of the subtasks are in the manifest only.

    ``rows``: what each operator has produced since the checkpoint before; None: not known.
    """
    in_flight = [flight for cut in manifest.channels.values() for flight in cut.in_flight.values()]
    measured = [flight for flight in in_flight if flight.rows is not None]
    cuts = manifest.operators
    return {
        "duration_ms": manifest.completed_ms - manifest.started_ms,
        "size_bytes": sum(cut.size_bytes for cut in cuts.values()),
        "new_bytes": sum(cut.new_bytes for cut in cuts.values()),
        "in_flight_entries": sum(flight.entries or 0 for flight in measured),
        "in_flight_rows": sum(flight.rows or 0 for flight in measured),
        "in_flight_bytes": sum(flight.size_bytes or 0 for flight in measured),
        # Inputs whose amounts were not measured; the sums do not include them.
        "in_flight_unmeasured": len(in_flight) - len(measured),
        "unaligned_operators": sorted(name for name, cut in cuts.items() if cut.mode == "unaligned"),
        "operators": {name: {**_figures(cut), "rows": (rows or {}).get(name)} for name, cut in cuts.items()},
    }


def abort_details(pending: PendingEpoch, *, ended_ms: int) -> dict[str, Any]:
    """Figures of an aborted checkpoint: what each operator had acknowledged, and what is missing."""
    return {
        "duration_ms": max(ended_ms - pending.started_ms, 0),
        "operators": {name: _figures(operator_cut(ack)) for name, ack in pending.merged_acks().items()},
        "missing": {name: list(subtasks) for name, subtasks in pending.missing().items()},
    }


def _figures(cut: OperatorCut) -> dict[str, Any]:
    return {
        "generation": cut.generation,
        "batch": cut.batch,
        "mode": cut.mode,
        "subtasks": len(cut.subtasks),
        "files": cut.files,
        "size_bytes": cut.size_bytes,
        "new_bytes": cut.new_bytes,
        "start_delay_ms": cut.start_delay_ms,
        "alignment_ms": cut.alignment_ms,
        "sync_ms": cut.sync_ms,
        "async_ms": cut.async_ms,
        "total_ms": cut.total_ms,
    }
