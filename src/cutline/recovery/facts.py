"""Which checkpoints there are to come back to: here and in the remote tier, readable, of the present history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.coordinator.manifests import highest_epoch, of_present_history
from cutline.errors import CutlineError, RecoveryError, StoreError
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_EPOCH, Epoch, Generation
from cutline.ports import GenerationRecord, Manifest, MetadataStore, SnapshotStore
from cutline.protocol.history.epochs import lost_behind
from cutline.recovery.sinks_at_start import SinksAtStart
from cutline.tiers.remote_at_start import RemoteTier, to_publish

log = get_logger(__name__)

_WHOLE_HISTORY = 1_000_000


class Inventory:
    """Asked once per start, by whoever holds the flow's lock."""

    def __init__(
        self,
        *,
        graph: FlowGraph,
        snapshots: SnapshotStore,
        metadata: MetadataStore,
        sinks: SinksAtStart,
        remote: RemoteTier | None,
        is_per_operator: bool,
        problem: Callable[[str], None],
    ) -> None:
        """``problem`` hears of what does not hold."""
        self._graph = graph
        self._flow = graph.flow
        self._snapshots = snapshots
        self._metadata = metadata
        self._sinks = sinks
        self._remote = remote
        self._is_per_operator = is_per_operator
        self._problem = problem
        self.generations: list[GenerationRecord] = []
        self.unreadable: list[Epoch] = []
        #: Epochs of which only the records have been fetched: what they name is elsewhere.
        self._only_records: set[Epoch] = set()

    # ------------------------------------------------------------------ here

    def read_generations(self) -> None:
        self.generations = self._snapshots.generations()

    def newest_generation(self) -> Generation:
        """By all records there are: the coordinator's own may be lost."""
        known = [record.generation for record in self._snapshots.generations()]
        for epoch in self._snapshots.epochs():
            with contextlib.suppress(CutlineError, OSError):
                known.append(self._snapshots.load_manifest(epoch).generation)
        return Generation(max(known, default=0))

    def fetch_records_if_lost(self) -> bool:
        """A host that knows nothing of the flow asks the remote tier: a checkpoint there must not be started over.

        Whether there is one.
        """
        if self._remote is None or self._snapshots.epochs():
            return False
        is_known_here = bool(self._snapshots.generations())
        try:
            epochs = self._remote.fetch_records(is_needed=not is_known_here)
        except StoreError as error:
            if is_known_here:
                self._problem(f"there is no checkpoint here, and the remote tier cannot be asked: {error}")
                return False
            raise RecoveryError(
                f"this host has nothing of the flow, and the remote tier does not say whether it has: {error}",
                next_step="see to it that it can be reached, or leave the option remote out",
                flow=self._flow,
            ) from error
        crashpoint("remote-fetched-records")
        self._only_records.update(epochs)
        if epochs:
            self._problem(f"this host has no checkpoint of the flow; the remote tier has epochs up to {epochs[-1]}")
        return bool(epochs)

    def live(self) -> list[Manifest]:
        """Readable manifests of the present history; unreadable ones are reported and left out."""
        manifests: dict[Epoch, Manifest] = {}
        for epoch in self._snapshots.epochs():
            try:
                manifest = self._snapshots.load_manifest(epoch)
                for node in self._graph.sinks:
                    # What a sink has yet to publish stands in the record; without it the epoch can never be published.
                    if node.operator in manifest.operators and epoch > self._sinks.published(node.sink):
                        self._snapshots.load_record(manifest, node.operator)
                manifests[epoch] = manifest
            except (CutlineError, OSError) as error:
                self._problem(f"epoch {epoch}: {error}")
                self.unreadable.append(epoch)
        live = of_present_history(manifests.values(), self.generations)
        return self._without_gaps(live)

    def _without_gaps(self, manifests: list[Manifest]) -> list[Manifest]:
        """The epochs that every sink can publish one after the other, from what it has published on."""
        recorded, pins = self._metadata.published(), self._metadata.pins()
        lost: dict[Epoch, Epoch] = {}
        # The epochs of one operator follow one another, and only its own sinks publish them.
        for group in [{name} for name in self._graph.names] if self._is_per_operator else [set(self._graph.names)]:
            published = [
                max(self._sinks.published(node.sink), recorded.get(node.sink, NO_EPOCH))
                for node in self._graph.sinks
                if node.operator in group and self._sinks.has(node.sink)
            ]
            live = [(one.epoch, one.previous_epoch) for one in manifests if not group.isdisjoint(one.operators)]
            lost.update(lost_behind(live, unreadable=self.unreadable, published=published, pins=pins))
        for epoch, before in lost.items():
            self._problem(f"epoch {epoch}: not published, and epoch {before} before it is lost")
        self.unreadable += lost
        return [manifest for manifest in manifests if manifest.epoch not in lost]

    def is_unreadable_after(self, manifests: list[Manifest]) -> bool:
        newest = manifests[-1].epoch if manifests else NO_EPOCH
        return any(epoch > newest for epoch in self.unreadable)

    def had_any(self) -> bool:
        """Whether anybody knows of a complete epoch, be it only the history."""
        known = self._snapshots.epochs() or any(
            item.outcome == "completed" for item in self._metadata.history(_WHOLE_HISTORY)
        )
        return bool(known)

    def free_epoch(self) -> Epoch:
        """A number that no checkpoint has had, wherever."""
        seen = [
            *self._snapshots.epochs(),
            self._sinks.highest(),
            *(self._remote.epochs() if self._remote is not None else ()),
        ]
        return Epoch(highest_epoch(self._metadata.last_epoch(), seen) + 1)

    # ------------------------------------------------------------------ here and there

    def usable(self, manifests: list[Manifest]) -> Iterator[tuple[str, list[Manifest]]]:
        """(tier, an epoch and those before it), the newest first, and each from this host before the remote tier."""
        here = {one.epoch: manifests[: index + 1] for index, one in enumerate(manifests)}
        for epoch in self._only_records:
            here.pop(epoch, None)
        newest = max(here, default=NO_EPOCH)
        if here:
            yield "local", here[newest]
        # Only now: whoever can go on with what is here waits for nobody.
        there, known = self._in_remote_tier()
        for manifest in reversed(known or manifests):
            if manifest.epoch in here and manifest.epoch != newest:
                yield "local", here[manifest.epoch]
            if manifest.epoch in there:
                chain = self._to_publish(manifest, known)
                if chain is not None and self._is_fetched(manifest):
                    yield "remote", chain

    def _to_publish(self, manifest: Manifest, known: list[Manifest]) -> list[Manifest] | None:
        """The epoch with those before it that sinks have yet to publish; None if one of them is missing."""
        if self._remote is None:
            return None
        try:
            noted = self._remote.published_before(manifest.epoch)
        except CutlineError as error:
            self._problem(f"epoch {manifest.epoch} of the remote tier cannot be used: {error}")
            return None
        if not self._metadata.seen():
            # What was published after it may have been taken back since, by whoever went back to it.
            seen = {sink: epoch for sink, epoch in noted.seen.items() if epoch <= manifest.epoch}
            self._sinks.refuse_behind(seen, restore_to=None)
        published = max(self._sinks.slowest(manifest, known), min(noted.everywhere, manifest.epoch))
        return to_publish(manifest, known, published=published, problem=self._problem)

    def _in_remote_tier(self) -> tuple[set[Epoch], list[Manifest]]:
        """The epochs there, and all that are known when their records are here."""
        if self._remote is None:
            return set(), []
        try:
            there = set(self._remote.fetch_records())
        except StoreError as error:
            self._problem(f"the remote tier cannot be asked: {error}")
            return set(), []
        self.read_generations()
        self.unreadable.clear()  # what was damaged here has been replaced
        return there, self.live()

    def _is_fetched(self, manifest: Manifest) -> bool:
        if self._remote is None:
            return False
        try:
            size = self._remote.fetch_content(manifest)
        except (CutlineError, OSError) as error:
            self._problem(f"epoch {manifest.epoch} of the remote tier cannot be used: {error}")
            return False
        crashpoint("remote-fetched")
        log.warning("checkpoint_fetched", flow=self._flow, epoch=manifest.epoch, bytes=size)
        return True
