"""The remote tier as a start needs it: asked again while it is away for a moment, and told first what is given up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from cutline.base.crashpoints import crashpoint
from cutline.errors import RecoveryError, StoreError
from cutline.model.ids import Epoch, FlowName, Generation
from cutline.objects.waiting import patiently
from cutline.ports import GenerationRecord, Manifest
from cutline.tiers.upload import Published, Replica

T = TypeVar("T")


class RemoteTier:
    """Whatever it is asked for may be asked for as often as one likes. Raises StoreError when its patience is over."""

    def __init__(self, replica: Replica, flow: FlowName) -> None:
        self._replica = replica
        self._flow = flow

    def claim(
        self, take: Callable[[Generation], Generation], newest_here: Generation, *, is_needed: bool
    ) -> Generation:
        """A generation that no other host has; ``take`` gives one that is no smaller, and was never given before.

        ``is_needed``: the flow cannot come back without the remote tier. If it can and the tier is away, the generation
        is claimed before anything is copied.
        """

        def newest_there() -> Generation:
            return self._replica.newest_generation()

        newest = newest_here
        with contextlib.suppress(StoreError):
            newest = max(newest, self._patiently(newest_there) if is_needed else newest_there())
        generation = take(Generation(newest + 1))
        with contextlib.suppress(StoreError):
            while not self._claimed(generation, is_needed=is_needed):
                generation = take(Generation(newest_there() + 1))
        self._replica.begin(generation)
        return generation

    def _claimed(self, generation: Generation, *, is_needed: bool) -> bool:
        def claim() -> bool:
            return self._replica.claim(generation)

        return self._patiently(claim) if is_needed else claim()

    def tell(self, record: GenerationRecord) -> None:
        """Make known that the flow goes back, before it does.

        Otherwise a host that is lost right afterwards would come back to what was given up, and what sinks have taken
        back would be missing. Told and not done, which a kill in between may leave, only makes a lost host go back
        further than it had to.
        """
        try:
            self._patiently(lambda: self._replica.enter(record))
        except StoreError as error:
            raise RecoveryError(
                f"the flow would go back to epoch {record.restored_epoch}, but the remote tier cannot be told: {error}",
                next_step="see to it that it can be reached, and start again; nothing has been changed",
                flow=self._flow,
            ) from error

    def bring(self, manifests: Sequence[Manifest], generation: Generation, published: Published) -> None:
        """Put a checkpoint there that was carried over, before the flow goes on from it.

        Otherwise a host that is lost right afterwards would leave only checkpoints of operators that have other names.
        It counts once ``tell`` has made the generation known. It is the last one of these; those before it are what
        sinks have yet to publish.
        """

        def bring() -> None:
            # Of those that were fetched from there this host may have the records only.
            there = set(self._replica.epochs())
            for manifest in (one for one in manifests if one.epoch not in there):
                self._replica.send(manifest, generation)
                self._replica.seal(manifest, generation, published)

        try:
            self._patiently(bring)
        except StoreError as error:
            raise RecoveryError(
                f"epoch {manifests[-1].carried_from} has other operators than the flow, and what it was made into "
                f"cannot be brought to the remote tier: {error}",
                next_step="see to it that it can be reached, and start again; nothing has been changed",
                flow=self._flow,
            ) from error
        crashpoint("remote-carried")

    def epochs(self) -> list[Epoch]:
        """As far as they can be listed at this moment."""
        with contextlib.suppress(StoreError):
            return self._replica.epochs()
        return []

    def fetch_records(self, *, is_needed: bool = True) -> list[Epoch]:
        return self._patiently(self._replica.fetch_records) if is_needed else self._replica.fetch_records()

    def fetch_content(self, manifest: Manifest) -> int:
        return self._patiently(lambda: self._replica.fetch_content(manifest))

    def published_before(self, epoch: Epoch) -> Published:
        return self._patiently(lambda: self._replica.published_before(epoch))

    def _patiently(self, ask: Callable[[], T]) -> T:
        return patiently(ask, flow=self._flow)


def to_publish(
    manifest: Manifest, fetched: Iterable[Manifest], *, published: Epoch, problem: Callable[[str], None]
) -> list[Manifest] | None:
    """An epoch, and before it those that some sink has yet to publish; None if one of these is missing.

    Of the latter a host has the records only: they say what is to be published; nothing is restored from them.
    ``published``: how far the slowest sink is.
    """
    chain = [*(one for one in fetched if published < one.epoch < manifest.epoch), manifest]
    before = published
    for one in chain:
        if one.epoch > published and one.previous_epoch > before:
            problem(f"epoch {one.epoch}: not published, and epoch {one.previous_epoch} before it is missing")
            return None
        before = one.epoch
    return chain
