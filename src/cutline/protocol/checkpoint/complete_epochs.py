"""The retained complete checkpoints: which sinks have published them, which are pinned, and which are released."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.history.retention import RetentionPolicy
from cutline.protocol.messages.coordinator import CommitSink, PinChanged, ReleaseEpochs
from cutline.protocol.publish.publishing import CompleteEpoch, Publisher


class CompleteEpochs:
    """The complete epochs of one history, ascending."""

    def __init__(
        self, epochs: Iterable[CompleteEpoch], publisher: Publisher, retention: RetentionPolicy, pins: Iterable[Epoch]
    ) -> None:
        self.epochs = tuple(epochs)
        self.publisher = publisher
        self._retention = retention
        self._pins = set(pins)
        #: Those that were to be detached in this process.
        self._detached: set[Epoch] = set()
        #: Nothing is to release until this changes or the time comes: there may be hundreds of epochs and many events.
        self._settled_for: tuple[tuple[CompleteEpoch, ...], Epoch] | None = None
        self._expiry_ms: int | None = None

    @property
    def newest(self) -> Epoch:
        return self.epochs[-1].epoch if self.epochs else NO_EPOCH

    @property
    def oldest(self) -> Epoch:
        return self.epochs[0].epoch if self.epochs else NO_EPOCH

    @property
    def pins(self) -> frozenset[Epoch]:
        return frozenset(self._pins)

    def has(self, epoch: Epoch) -> bool:
        return any(item.epoch == epoch for item in self.epochs)

    def add(self, epoch: CompleteEpoch) -> None:
        self.epochs = (*self.epochs, epoch)

    def pin_changed(self, event: PinChanged) -> None:
        if event.is_pinned:
            self._pins.add(event.epoch)
        else:
            self._pins.discard(event.epoch)
        self._settled_for = None

    def published_everywhere(self) -> Epoch:
        return self.publisher.published_everywhere(self.epochs)

    def publish(self, now_ms: int) -> list[CommitSink]:
        """The commits to begin now."""
        return self.publisher.due(self.epochs, now_ms, pins=self._pins)

    def release(self, now_ms: int, open_from: Epoch) -> list[ReleaseEpochs]:
        """Release old epochs that every sink has published and no pin keeps; detach those that stay.

        ``open_from``: epochs from here on may be pending.
        """
        published = self.published_everywhere()
        if self._is_settled(published, now_ms):
            return []
        drop = self._retention.expendable(self.epochs, published_everywhere=published, pins=self._pins, now_ms=now_ms)
        self.epochs = tuple(item for item in self.epochs if item.epoch not in drop)
        detach = self._retention.detachable(self.epochs, published_everywhere=published)
        self._settled_for = (self.epochs, published)
        self._expiry_ms = self._retention.next_expiry_ms(self.epochs, self._pins, now_ms)
        if not drop and self._detached.issuperset(detach):
            return []
        self._detached = set(detach)
        retained = tuple(item.epoch for item in self.epochs)
        return [ReleaseEpochs(drop=drop, retained=retained, open_from=open_from, detach=detach)]

    def next_expiry_ms(self, now_ms: int) -> int | None:
        if self._is_settled(self.published_everywhere(), now_ms):
            return self._expiry_ms
        return self._retention.next_expiry_ms(self.epochs, self._pins, now_ms)

    def _is_settled(self, published: Epoch, now_ms: int) -> bool:
        """Whether the last release still holds."""
        if self._settled_for is None or self._settled_for[0] is not self.epochs or self._settled_for[1] != published:
            return False
        return self._expiry_ms is None or now_ms < self._expiry_ms
