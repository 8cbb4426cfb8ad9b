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

    def published_everywhere(self) -> Epoch:
        return self.publisher.published_everywhere(self.epochs)

    def publish(self, now_ms: int) -> list[CommitSink]:
        """The commits to begin now."""
        return self.publisher.due(self.epochs, now_ms, pins=self._pins)

    def release(self, now_ms: int, open_from: Epoch) -> list[ReleaseEpochs]:
        """Release old epochs that every sink has published and no pin keeps.

        ``open_from``: epochs from here on may be pending.
        """
        drop = self._retention.expendable(
            self.epochs, published_everywhere=self.published_everywhere(), pins=self._pins, now_ms=now_ms
        )
        if not drop:
            return []
        self.epochs = tuple(item for item in self.epochs if item.epoch not in drop)
        retained = tuple(item.epoch for item in self.epochs)
        return [ReleaseEpochs(drop=drop, retained=retained, open_from=open_from)]

    def next_expiry_ms(self, now_ms: int) -> int | None:
        return self._retention.next_expiry_ms(self.epochs, self._pins, now_ms)
