"""Asks the servers of sources, beside the running flow, how far behind it is and how long they keep its input."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cutline.base.clock import now_ms
from cutline.base.logs import get_logger
from cutline.base.redaction import without_secrets
from cutline.errors import CutlineError
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId
from cutline.model.plan import PlannedSource
from cutline.model.status import PartitionLag, SourceLag
from cutline.ports.inspection import SourceProgress
from cutline.ports.source_guard import SourceGuard, SourceKind, Today
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.parts import FlowParts
from cutline.spark_dir.recorded_sources import load_recorded
from cutline.spark_dir.source_check import newest_positions
from cutline.storage.recorded_positions import recorded_positions

log = get_logger(__name__)

#: The first look is soon: a flow that was down for long may be about to lose input.
_FIRST_SECONDS = 1.0


class SourceWatch:
    """Knows the lag of every operator that reads from servers. Nothing depends on it: it is shown, and a metric."""

    def __init__(self, parts: FlowParts, guard: SourceGuard, lifecycle: Lifecycle) -> None:
        self._parts = parts
        self._guard = guard
        self._is_over = lifecycle.is_over
        self._interval_s = parts.definition.options.source_check_interval_ms / 1000
        self._found: dict[OperatorId, list[SourceLag]] = {}
        self._thread = threading.Thread(target=self._run, name="cutline-sources", daemon=True)

    def start(self) -> None:
        if self._interval_s > 0 and any(self._planned(name) for name in self._parts.definition.graph.names):
            self._thread.start()

    def stop(self) -> None:
        """The thread ends by itself; it may be waiting for a server."""

    def of(self, operator: OperatorId) -> list[SourceLag]:
        return self._found.get(operator, [])

    def _planned(self, operator: OperatorId) -> tuple[PlannedSource, ...]:
        return self._parts.definition.plans[operator].sources

    def _run(self) -> None:
        pause_s = _FIRST_SECONDS
        while not self._is_over.wait(pause_s):
            pause_s = self._interval_s
            for name in self._parts.definition.graph.names:
                if self._planned(name) and not self._is_over.is_set():
                    try:
                        self._look(name)
                    except Exception:  # looking must never disturb the flow
                        log.debug("source_not_looked_at", operator=name, exc_info=True)

    def _look(self, operator: OperatorId) -> None:
        spark_dir = self._parts.settled.recovered.spark_dirs[operator]
        live = self._parts.definition.layout.spark_checkpoint_dir(operator, spark_dir)
        self._parts.stores.query_dirs.record_sources(operator, live)
        epoch, stored = self._oldest(operator)
        found = []
        for name, newest in newest_positions(live).items():
            kind = None if newest is None else self._guard.kind_of(newest, live / "sources" / name)
            if newest is None or kind is None or kind.progress is None:
                continue
            lag = self._asked(operator, kind, newest, stored.get(name), live)
            if lag is not None:
                found.append(lag if lag.restorable_until_ms is None else _with_epoch(lag, epoch))
        self._found[operator] = found
        self._parts.metrics.sources_looked_at(operator, found)

    def _asked(
        self, operator: OperatorId, kind: SourceKind, newest: bytes, stored: bytes | None, live: Path
    ) -> SourceLag | None:
        today = Today(newest, self._planned(operator), load_recorded(live))
        try:
            progress = kind.progress(newest, [] if stored is None else [stored], today) if kind.progress else None
            ahead = kind.check(newest, live / "sources", today).problems
        except CutlineError as error:
            return SourceLag(source=kind.name, problem=without_secrets(str(error)), at_ms=now_ms())
        if progress is None:
            return None
        lost = f"{ahead[0].path} cannot be read: {ahead[0].problem}" if ahead else ""
        return msgspec.structs.replace(lag_of(progress), problem=without_secrets(lost))

    def _oldest(self, operator: OperatorId) -> tuple[Epoch, Mapping[str, bytes | None]]:
        """The oldest checkpoint to which this operator can be restored, and its positions there."""
        layout, checkpoints = self._parts.definition.layout, self._parts.stores.checkpoints
        for epoch in sorted(self._parts.coordinator.snapshot().checkpoints.complete):
            try:
                manifest = checkpoints.load_manifest(epoch)
                if operator in manifest.operators:
                    return epoch, recorded_positions(checkpoints.load_record(manifest, operator), layout)
            except (CutlineError, OSError):
                continue  # it has just been released
        return NO_EPOCH, {}


def lag_of(progress: SourceProgress) -> SourceLag:
    partitions = [
        PartitionLag(name=one.name, position=one.position, end=one.end, lag=max(one.end - one.position, 0))
        for one in progress.partitions
    ]
    ends = [one for one in progress.expiries if one.at_ms is not None]
    first = min(ends, key=lambda one: one.at_ms or 0, default=None)
    return SourceLag(
        source=progress.what,
        lag=sum(one.lag for one in partitions),
        partitions=partitions,
        restorable_until_ms=None if first is None else first.at_ms,
        limited_by="" if first is None else first.limit,
        at_ms=now_ms(),
    )


def _with_epoch(lag: SourceLag, epoch: Epoch) -> SourceLag:
    return msgspec.structs.replace(lag, oldest_epoch=epoch)
