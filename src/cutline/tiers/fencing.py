"""Decides which host may write to a flow's remote tier: claims, and the records of generations that have begun."""

from __future__ import annotations

import uuid

from cutline.base import records
from cutline.errors import FencedError
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import Generation
from cutline.model.layout import Layout
from cutline.ports.objects import ObjectStore
from cutline.protocol.history.histories import identity_of
from cutline.protocol.history.remote_claims import claims_needed, has_diverged, is_replaced, is_won
from cutline.tiers.remote_checkpoints import GENERATION, RemoteCheckpoints

#: A claim is the name of a process.
_MOST_CLAIM_BYTES = 1 << 16


class RemoteFence:
    """The claims of one process."""

    def __init__(self, store: ObjectStore, layout: Layout, checkpoints: RemoteCheckpoints, *, has_rivals: bool) -> None:
        """``has_rivals``: other hosts may write to the same place, each in generations that it has claimed."""
        self._store = store
        self._layout = layout
        self._checkpoints = checkpoints
        self._has_rivals = has_rivals
        #: Distinguishes this process's claims from those of others.
        self._token = str(uuid.uuid4()).encode()
        self._claimed: set[Generation] = set()
        self._begun: Generation | None = None
        #: The generations of this flow's history; None: already compared with those of the remote tier, or not needed.
        self._known: frozenset[Identity] | None = None

    def claim(self, generation: Generation) -> bool:
        """Claim a generation for this process; False if another has it. A process that writes in an older one stops.

        Claim before listing the checkpoints: a checkpoint that an older process still seals is then either in the list,
        or that process sees the claim and publishes nothing of it.
        """
        if generation in self._claimed or not self._has_rivals:
            return True
        path = f"claims/{generation:06d}.json"
        is_created = self._store.create(path, self._token)
        if not is_won(
            self._token, is_created=is_created, found=None if is_created else self._store.read(path, _MOST_CLAIM_BYTES)
        ):
            return False
        self._claimed.add(generation)
        return True

    def begin(self, generation: Generation) -> None:
        """From this generation on, this process runs the flow."""
        self._begun = generation

    def remember(self, known: frozenset[Identity]) -> None:
        """Before the next write the remote tier must have no generation of another history before this one."""
        self._known = known

    def enter(self, record: GenerationRecord) -> None:
        """Announce what a generation starts from: epochs after the one it restored are obsolete from now on."""
        if not self.claim(record.generation):
            raise fenced(record.generation)
        self._check_history(record.generation)
        path = self._layout.name(self._layout.generation(record.generation))
        data = records.encode(GENERATION, record)
        if not self._store.create(path, data) and self._store.read(path) != data:
            raise fenced(record.generation)
        self.check_fence(record.generation)

    def check_claim(self, generation: Generation) -> None:
        """Raise FencedError unless this process has claimed the generation and it is the newest."""
        for needed in claims_needed(self._begun, generation):
            if not self.claim(needed):
                raise fenced(generation)
        self.check_fence(generation)
        self._check_history(generation)

    def _check_history(self, generation: Generation) -> None:
        """The start compares histories too, unless the remote tier was unavailable."""
        known, begun = self._known, self._begun
        if known is None or begun is None or not self._has_rivals:
            return
        newest = self._checkpoints.newest_generations(lambda one: one.generation < begun and identity_of(one) in known)
        if has_diverged(newest, known, begun):
            raise fenced(generation)
        self._known = None

    def check_fence(self, generation: Generation) -> None:
        """Raise FencedError if there is a newer generation."""
        if self._has_rivals and is_replaced(generation, self._checkpoints.newest_generation()):
            raise fenced(generation)


def fenced(generation: Generation) -> FencedError:
    return FencedError(
        "another host runs this flow: a newer generation has begun in the remote tier",
        next_step="stop this process",
        generation=generation,
    )
