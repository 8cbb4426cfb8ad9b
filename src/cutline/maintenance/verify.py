"""Verifies stored checkpoints by reading alone, also while the flow runs.

A running flow releases epochs during the verification. It always removes the manifest first, and a restart writes its
generation record first: so a problem of an epoch counts only if, read again afterwards, its manifest is still there and
still belongs to the present history.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from cutline.errors import CutlineError, UnknownEpochError
from cutline.maintenance.findings import BACKUP, EpochReport, Finding, Verdict
from cutline.maintenance.looking import Look, name_below, text_of
from cutline.maintenance.stored_generations import is_live, load_generations
from cutline.maintenance.verify_epoch import EpochCheck
from cutline.maintenance.verify_flow import FlowCheck
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.ports.inspection import CompletedEpoch, CoordinatorRecords, SnapshotInspector
from cutline.protocol.history.epochs import live_epochs
from cutline.protocol.history.known_checkpoints import generation_starts_of

_COLLECTION_SECONDS = 0.2


class Verifier:
    """Verifies the checkpoints of one flow. ``deep``: reads every byte, not only sizes."""

    def __init__(
        self,
        layout: Layout,
        snapshots: SnapshotInspector,
        coordinator: Callable[[], CoordinatorRecords],
        *,
        deep: bool = False,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``on_read`` is called with the bytes of every file that was checked."""
        self._layout = layout
        self._snapshots = snapshots
        self._coordinator = coordinator
        self._epoch = EpochCheck(layout, snapshots, deep=deep)
        self._on_read = on_read

    # ------------------------------------------------------------------ which epochs

    def every(self) -> Iterator[EpochReport]:
        """Every complete checkpoint, ascending, and those that are missing."""
        lost = {finding.epoch: finding for finding in self._lost_manifests()}
        for epoch in sorted({*self._snapshots.epochs(), *(epoch for epoch in lost if epoch is not None)}):
            report = self._lost(lost[epoch]) if epoch in lost else self._verify(epoch)
            if report.verdict != "gone":
                yield report

    def newest(self) -> Iterator[EpochReport]:
        """The newest checkpoint of the present history; in per-operator mode, the newest of every operator."""
        lost = {finding.epoch: finding for finding in self._lost_manifests()}
        current = load_generations(self._layout).newest
        wanted = set(current.spark_dirs) if current else None
        known = {*self._snapshots.epochs(), *(epoch for epoch in lost if epoch is not None)}
        for epoch in sorted(known, reverse=True):
            owners = self._owners(epoch)
            if wanted is not None and owners and wanted.isdisjoint(owners):
                continue
            report = self._lost(lost[epoch]) if epoch in lost else self._verify(epoch)
            if report.verdict in ("gone", "left"):
                continue
            yield report
            wanted = wanted - owners if wanted and owners else set()
            if not wanted:
                return

    def one(self, epoch: Epoch) -> EpochReport:
        """This checkpoint. Raises UnknownEpochError if it does not exist."""
        lost = next((finding for finding in self._lost_manifests() if finding.epoch == epoch), None)
        if lost is not None:
            return self._lost(lost)
        known = self._snapshots.epochs()
        report = self._verify(epoch) if epoch in known else None
        if report is None or report.verdict == "gone":
            kept = ", ".join(map(str, known)) or "none"
            raise UnknownEpochError(
                f"there is no complete checkpoint {epoch}, or it was released",
                next_step=f"available checkpoints: {kept}",
            )
        return report

    def _owners(self, epoch: Epoch) -> frozenset[OperatorId]:
        """The operators whose snapshots an epoch holds; by the record names if the manifest cannot be read."""
        try:
            return frozenset(self._snapshots.load_manifest(epoch).operators)
        except (CutlineError, OSError):
            return self._snapshots.recorded(epoch)

    def _lost(self, finding: Finding) -> EpochReport:
        return EpochReport(epoch=finding.epoch or Epoch(0), verdict="damaged", problems=[finding])

    def _lost_manifests(self) -> list[Finding]:
        """Complete checkpoints whose manifest is missing although the flow cannot have released them."""
        # Checked twice: the newest epoch of the database may have been released since the database was read.
        first = self._without_manifest()
        if not first:
            return []
        # Long enough for a collection to remove an epoch's records after its manifest.
        time.sleep(_COLLECTION_SECONDS)
        again = self._without_manifest()
        return [
            Finding(
                epoch=epoch,
                operator=None,
                path=name_below(self._layout, self._layout.manifest(epoch)),
                problem="the coordinator's records call this checkpoint complete, but its manifest is missing",
                next_step=f"{BACKUP}; without it the flow can restore only an older checkpoint",
            )
            for epoch in sorted(first & again)
        ]

    def _without_manifest(self) -> set[Epoch]:
        known = self._coordinator()
        generations = load_generations(self._layout)
        complete = [(one.epoch, one.generation) for one in known.completed]
        live = set(live_epochs(complete, generation_starts_of(generations.readable)))
        stored = {epoch: self._owners(epoch) for epoch in self._snapshots.epochs()}
        return {
            one.epoch
            for one in known.completed
            if one.epoch in live and one.epoch not in stored and self._cannot_be_released(one, stored, known, live)
        }

    def _cannot_be_released(
        self,
        one: CompletedEpoch,
        stored: Mapping[Epoch, frozenset[OperatorId]],
        known: CoordinatorRecords,
        live: set[Epoch],
    ) -> bool:
        """The flow keeps the newest checkpoint and releases the others from the oldest on, except pinned ones."""
        recorded = self._snapshots.recorded(one.epoch)
        owners = one.operators or recorded
        mine = [epoch for epoch, others in stored.items() if not others or not owners or owners & others]
        if not any(epoch > one.epoch for epoch in [*mine, *_of_same(known.completed, owners, live)]):
            return True
        is_older_kept = any(epoch < one.epoch and epoch not in known.pins for epoch in mine)
        return bool(recorded) and is_older_kept

    # ------------------------------------------------------------------ the flow as a whole

    def flow_problems(self) -> list[Finding]:
        """Damage that belongs to no single checkpoint."""
        return FlowCheck(self._layout).problems(self._coordinator())

    # ------------------------------------------------------------------ one epoch

    def _verify(self, epoch: Epoch) -> EpochReport:
        report = EpochReport(epoch=epoch)
        look = Look(report, self._on_read, self._layout)
        path = self._layout.manifest(epoch)
        try:
            manifest = self._snapshots.load_manifest(epoch)
            look.count(path)
            generations = load_generations(self._layout)  # after the manifest: its generation has a record by now
            if not is_live(manifest, generations):
                report.verdict = "left"
                return report
            self._epoch.check(look, manifest, generations)
        except (CutlineError, OSError) as error:
            # Also a manifest that makes no sense: the other checkpoints must still be verified.
            look.problem(path, text_of(error))
        if report.problems:
            report.verdict = self._look_again(epoch)
            if report.verdict != "damaged":
                report.problems.clear()
        return report

    def _look_again(self, epoch: Epoch) -> Verdict:
        """Whether an epoch that seems damaged still exists and belongs to the present history."""
        if epoch not in self._snapshots.epochs():
            return "gone"
        try:
            is_present = is_live(self._snapshots.load_manifest(epoch), load_generations(self._layout))
        except (CutlineError, OSError):
            # It may have been replaced by a tombstone, or removed, between the two reads.
            return "damaged" if epoch in self._snapshots.epochs() else "gone"
        return "damaged" if is_present else "left"


def _of_same(completed: Iterable[CompletedEpoch], owners: frozenset[OperatorId], live: set[Epoch]) -> Iterator[Epoch]:
    """The epochs that hold snapshots of any of these operators, or whose record does not name their operators."""
    for one in completed:
        if one.epoch in live and (not one.operators or not owners or one.operators & owners):
            yield one.epoch
