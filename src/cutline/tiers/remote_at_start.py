"""The remote tier during a start: requests are retried while it is unavailable, and a restore is announced first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from cutline.base.crashpoints import crashpoint
from cutline.errors import RecoveryError, StoreError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import Epoch, FlowName, Generation
from cutline.model.remote import SinkProgress
from cutline.objects.waiting import wait_for_store
from cutline.protocol.history.remote_claims import generation_to_take
from cutline.tiers.download import OnBytes
from cutline.tiers.remote_tier import RemoteTier

T = TypeVar("T")


class RemoteAtStart:
    """The remote tier as a start uses it. Operations are idempotent. Raises StoreError when retries are exhausted."""

    def __init__(self, tier: RemoteTier, flow: FlowName) -> None:
        self._tier = tier
        self._flow = flow

    def claim(
        self, take: Callable[[Generation], Generation], newest_here: Generation, *, is_needed: bool
    ) -> Generation:
        """A generation that no other host has; ``take`` returns an unused one that is at least its argument.

        ``is_needed``: this host has no records of the flow, so it cannot recover without the remote tier. Otherwise,
        if the tier is unavailable, the generation is claimed later, before the first upload.
        """

        def newest_there() -> Generation:
            return self._tier.checkpoints.newest_generation()

        newest = newest_here
        with contextlib.suppress(StoreError):
            newest = max(newest, self._waiting(newest_there) if is_needed else newest_there())
        generation = take(generation_to_take(newest, are_records_lost=is_needed))
        with contextlib.suppress(StoreError):
            while not self._claimed(generation, is_needed=is_needed):
                generation = take(generation_to_take(newest_there(), are_records_lost=is_needed))
        self._tier.fence.begin(generation)
        return generation

    def _claimed(self, generation: Generation, *, is_needed: bool) -> bool:
        def claim() -> bool:
            return self._tier.fence.claim(generation)

        return self._waiting(claim) if is_needed else claim()

    def announce(self, record: GenerationRecord) -> None:
        """Announce a restore before it happens.

        Otherwise the replacement of a host that is lost right afterwards would recover the abandoned history, whose
        output the sinks have rewound. A kill between announcement and restore only makes that replacement restore an
        older epoch than necessary.
        """
        try:
            self._waiting(lambda: self._tier.fence.enter(record))
        except StoreError as error:
            raise RecoveryError(
                f"the restore to epoch {record.restored_epoch} cannot be announced in the remote tier: {error}",
                next_step="make the remote tier reachable, then restart the flow; nothing has been changed",
                flow=self._flow,
            ) from error

    def upload(self, manifests: Sequence[Manifest], generation: Generation, published: SinkProgress) -> None:
        """Upload an evolved checkpoint before the flow continues from it.

        Otherwise a host that is lost right afterwards would leave only checkpoints of operators that have other names.
        It counts once ``announce`` has stored the generation. It is the last of ``manifests``; the ones before it are
        those that sinks have yet to publish.
        """

        def upload() -> None:
            # Of checkpoints that were downloaded, this host may have only the records.
            there = set(self._tier.checkpoints.epochs())
            for manifest in (one for one in manifests if one.epoch not in there):
                self._tier.uploader.send(manifest, generation)
                self._tier.uploader.seal(manifest, generation, published)

        try:
            self._waiting(upload)
        except StoreError as error:
            raise RecoveryError(
                f"epoch {manifests[-1].carried_from} has other operators than the flow, and the checkpoint made from "
                f"it cannot be uploaded to the remote tier: {error}",
                next_step="make the remote tier reachable, then restart the flow; nothing has been changed",
                flow=self._flow,
            ) from error
        crashpoint("remote-carried")

    def epochs(self) -> list[Epoch]:
        """The epochs in the remote tier; none while it is unavailable."""
        with contextlib.suppress(StoreError):
            return self._tier.checkpoints.epochs()
        return []

    def history(
        self,
        is_known: Callable[[GenerationRecord], bool],
        is_live: Callable[[Manifest, list[GenerationRecord]], bool],
        *,
        is_needed: bool,
    ) -> tuple[list[GenerationRecord], list[tuple[Epoch, Generation]]]:
        """The newest generations, back to the first known one, and the newest checkpoints, back to the first live one.

        ``is_live`` gets these generations too.
        """
        there = self._tier.checkpoints

        def ask() -> tuple[list[GenerationRecord], list[tuple[Epoch, Generation]]]:
            generations = there.newest_generations(is_known)
            return generations, there.newest_epochs(lambda manifest: is_live(manifest, generations))

        return self._waiting(ask) if is_needed else ask()

    def remember(self, known: frozenset[Identity]) -> None:
        """The generations of this flow's history: uploads stop if the remote tier has others."""
        self._tier.fence.remember(known)

    def download_records(self, *, is_needed: bool = True) -> list[Epoch]:
        download = self._tier.downloader.download_records
        return self._waiting(download) if is_needed else download()

    def download_content(self, manifest: Manifest, on_bytes: OnBytes) -> int:
        return self._waiting(lambda: self._tier.downloader.download_content(manifest, on_bytes))

    def published_before(self, epoch: Epoch) -> SinkProgress:
        return self._waiting(lambda: self._tier.checkpoints.progress_at(epoch))

    def _waiting(self, ask: Callable[[], T]) -> T:
        return wait_for_store(ask, flow=self._flow)
