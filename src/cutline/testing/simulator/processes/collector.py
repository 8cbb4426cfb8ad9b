"""Collects, step by step, what retained epochs no longer need: manifests, entries, records, content."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator
from typing import TYPE_CHECKING, cast

from cutline.channels.log import ChannelLog
from cutline.model.checkpoint import Manifest, Tombstone
from cutline.model.ids import Epoch, OperatorId
from cutline.protocol.history.retention import EpochNeeds, truncation_points, unreachable
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.testing.simulator.storage import checks, savepoints
from cutline.testing.simulator.storage.log import Data, View
from cutline.testing.simulator.world import Steps, Violation
from cutline.worker.log_replay import needs_behind_log

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.coordinator import CoordinatorProcess


class LoggedBatches:
    """A log as the product's own code asks it for batches."""

    def __init__(self, operator: OperatorId, view: View) -> None:
        self.operator = operator
        self.last_batch = view.last_batch
        self.find_batch = view.find_batch
        self.positions_after = view.positions_after


class Collector:
    """One collection after the other; each can be killed anywhere."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._coordinator = coordinator
        self._world = coordinator.world
        self._disk = coordinator.disk
        self._releases: deque[ReleaseEpochs] = deque()
        self._is_busy = False
        #: Epochs that may go and are not gone yet.
        self._doomed: set[Epoch] = set()
        #: Epochs that are read at this moment, whatever may be said of them.
        self._held: Counter[Epoch] = Counter()
        #: What the collection under way drops: the product's lock keeps others from holding it meanwhile.
        self._dropping: set[Epoch] = set()

    def release(self, action: ReleaseEpochs) -> None:
        self._releases.append(action)
        if not self._is_busy:
            self._is_busy = True
            self._world.spawn(self._run(), self._coordinator)

    def collect_now(self) -> None:
        core = self._coordinator.core
        retained = tuple(item.epoch for item in core.complete)
        open_from = min(core.pending, default=Epoch(core.last_epoch + 1))
        self.release(ReleaseEpochs(drop=(), retained=retained, open_from=open_from))

    def hold(self, epoch: Epoch) -> bool:
        """Keep a checkpoint, and all it needs; False if it, or the logs it needs, may be gone already."""
        if self._disk.checkpoint(epoch) is None or epoch in self._dropping or epoch in self._disk.detached:
            return False
        self._held[epoch] += 1
        return True

    def end_hold(self, epoch: Epoch) -> None:
        self._held -= Counter([epoch])

    def _run(self) -> Steps:
        while self._releases:
            yield from self._collect(self._releases.popleft())
        self._is_busy = False

    def _collect(self, release: ReleaseEpochs) -> Steps:
        disk = self._disk
        kept = [one for epoch in {*release.retained, *self._held} if (one := disk.checkpoint(epoch)) is not None]
        if len(kept) < len({*release.retained, *self._held}) or not kept:
            return
        self._doomed.update(release.drop)
        self._doomed.update(one.manifest.epoch for one in disk.complete() if not checks.is_live(disk, one))
        self._dropping = self._doomed - set(self._held)
        for epoch in release.detach:
            yield self._world.between(0, 2)
            checkpoint = disk.checkpoint(epoch)
            if checkpoint is None or epoch in disk.only_records or epoch in disk.detached:
                continue
            if self._held[epoch] or epoch in self._dropping:
                continue
            if self._coordinator.is_fenced():
                return
            if self._world.strikes("gc_killed"):
                self._coordinator.die("killed while it detaches")
                return
            disk.detached[epoch] = savepoints.in_flight(disk, checkpoint)
            self._world.counts["detached"] += 1
        # Manifests first: killed half-way, an epoch is either whole or not there.
        for epoch in sorted(self._dropping):
            yield self._world.between(0, 2)
            if self._coordinator.is_fenced():
                return
            self._doomed.discard(epoch)
            self._drop(epoch)
            if self._world.strikes("gc_killed"):
                self._coordinator.die("killed while it collects")
                return
        if not (yield from self._truncate([one.needs for one in kept if one.manifest.epoch not in disk.detached])):
            return
        complete = {one.manifest.epoch for one in disk.complete()}
        for key in [key for key in disk.records if key[0] not in complete and key[0] < release.open_from]:
            disk.remove_record(key)
        self._collect_blobs()

    def _drop(self, epoch: Epoch) -> None:
        checkpoint = self._disk.checkpoint(epoch)
        if checkpoint is None:
            return
        manifest: Manifest = checkpoint.manifest
        self._disk.remove_manifest(epoch)
        if manifest.is_inherited:
            self._disk.put_manifest(Tombstone(epoch=epoch, generation=manifest.generation, reason="collected"))
        # A host that was replaced collects what it has published, also what its successor has rewound since.
        if not self._coordinator.flow.is_replaced:
            checks.check_released(self._disk, checkpoint, list(self._coordinator.flow.sinks.values()))

    def _truncate(self, needs: list[EpochNeeds]) -> Generator[int, None, bool]:
        """False: it was killed."""
        disk, coordinator = self._disk, self._coordinator
        lineage = coordinator.lineage
        for name, below in truncation_points([*needs, *self._live_needs()], disk.graph.touched_by()).items():
            log = disk.logs[name]
            # One entry always stays, so that the log knows its own end and the last batch.
            for entry in list(log.view(lineage[name]).entries[:-1]):
                if entry.seq >= below or coordinator.is_fenced():
                    break
                if self._world.strikes("gc_killed"):
                    coordinator.die("killed while it truncates")
                    return False
                checks.check_truncation(disk, name, entry.seq)
                if isinstance(entry, Data):
                    self._check_read_by_all(name, entry)
                log.delete(lineage[name], entry.seq)
            yield 1
        return True

    def _live_needs(self) -> list[EpochNeeds]:
        """What operators need that are behind their own logs, perhaps by more than their newest snapshot."""
        if not self._coordinator.flow.settings.is_per_operator:
            return []
        needs = []
        for name in self._disk.graph.operators:
            process = self._coordinator.flow.operators.get(name)
            if process is not None:
                log = cast("ChannelLog", LoggedBatches(name, process.view()))
                needs.append(needs_behind_log(log, process.query.spark.committed))
        return [one for one in needs if one is not None]

    def _check_read_by_all(self, channel: OperatorId, entry: Data) -> None:
        flow = self._coordinator.flow
        for consumer in flow.graph.consumers[channel]:
            if entry.content and flow.position_of(consumer, channel) <= entry.seq:
                raise Violation(f"entry {entry.seq} of {channel} was deleted before {consumer} had read it")

    def _collect_blobs(self) -> None:
        disk = self._disk
        # A record of a pending epoch may have been acknowledged: what it names is needed, whatever refers to it.
        reached = [record.blobs for record in disk.records.values()]
        referenced = self._coordinator.flow.references()
        for blob in sorted(unreachable(disk.blobs, reached, referenced)):  # type: ignore[arg-type]
            disk.remove_blob(blob)  # type: ignore[arg-type]
            checks.check_unneeded(disk, blob)  # type: ignore[arg-type]
