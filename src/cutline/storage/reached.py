"""What complete epochs hold, read once: manifests and records never change, and there may be hundreds of epochs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cutline.model.ids import Epoch


class ReachedContent:
    """The blobs that the complete epochs reach, each with the number of epochs that do."""

    def __init__(self, load: Callable[[Epoch], Iterable[str]]) -> None:
        """``load``: the blobs of a complete epoch; raises if a record cannot be read."""
        self._load = load
        self._of: dict[Epoch, tuple[str, ...]] = {}
        self._counts: dict[str, int] = {}
        #: Every digest once: hundreds of epochs name mostly the same ones.
        self._names: dict[str, str] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._counts

    def update(self, epochs: Collection[Epoch]) -> set[str]:
        """These are the complete epochs now. Returns content that no epoch reaches any more.

        What is new is read first: if that fails, nothing counts as released.
        """
        now = set(epochs)
        for epoch in sorted(now.difference(self._of)):
            self._add(epoch, set(self._load(epoch)))
        lost: set[str] = set()
        for epoch in set(self._of).difference(now):
            lost.update(self._remove(epoch))
        return lost

    def _add(self, epoch: Epoch, digests: Collection[str]) -> None:
        named = tuple(self._names.setdefault(digest, digest) for digest in digests)
        for digest in named:
            self._counts[digest] = self._counts.get(digest, 0) + 1
        self._of[epoch] = named

    def _remove(self, epoch: Epoch) -> list[str]:
        lost = []
        for digest in self._of.pop(epoch):
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest], self._names[digest]
                lost.append(digest)
        return lost
