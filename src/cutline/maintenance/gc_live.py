"""Garbage collection in a running flow, on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from cutline.channels.log import ChannelLog
from cutline.coordinator.retention import Janitor
from cutline.errors import ConfigError
from cutline.maintenance.findings import Collected
from cutline.maintenance.gc_local import CollectionScope, LocalCollector
from cutline.maintenance.gc_remote import remote_finding
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.generation_store import GenerationStore
from cutline.ports.metadata import MetadataStore
from cutline.ports.objects import ObjectInfo
from cutline.protocol.history.retention import EpochNeeds


class LiveRemoteTier(Protocol):
    """The part of the replicator that a collection needs."""

    @property
    def url(self) -> str: ...

    def collect_now(self, *, grace_ms: int, is_dry_run: bool) -> list[ObjectInfo]: ...


class LiveCollection:
    """Serves a shell's request to a running flow: the janitor collects under its lock, the replicator on its thread."""

    def __init__(
        self,
        layout: Layout,
        janitor: Janitor,
        replicator: LiveRemoteTier | None,
        *,
        metadata: MetadataStore,
        generations: GenerationStore,
        started_ms: int,
        channels: Mapping[OperatorId, ChannelLog],
        live_needs: Callable[[], Iterable[EpochNeeds]],
    ) -> None:
        """``channels``: the present logs. ``live_needs``: what operators that are behind their own logs need."""
        self._layout = layout
        self._janitor = janitor
        self._replicator = replicator
        self._metadata = metadata
        self._generations = generations
        self._started_ms = started_ms
        self._channels = channels
        self._live_needs = live_needs

    def collect(self, grace_ms: int, dry_run: bool = False, remote: str | None = None) -> dict[str, Any]:
        """``remote``: the address of a remote tier to collect too, which must be the flow's own."""
        if remote is not None and (self._replicator is None or self._replicator.url != remote):
            raise ConfigError(
                "the running flow has another remote tier, or none",
                next_step="pass the flow's own remote tier with --remote, or stop the flow first",
                flow=self._layout.root.name,
            )

        def collect(checkpoints: CheckpointStore, check_fence: Callable[[], None]) -> Collected:
            last = self._metadata.last_epoch()  # first: epochs that begin afterwards are above it
            open_from = min((one.epoch for one in self._metadata.pending()), default=Epoch(last + 1))
            return LocalCollector(
                self._layout,
                checkpoints,
                self._generations,
                CollectionScope(
                    open_from=open_from,
                    grace_ms=grace_ms,
                    is_dry_run=dry_run,
                    running_since_ms=self._started_ms,
                ),
                check_fence=check_fence,
            ).collect(self._channels, self._live_needs())

        collected = self._janitor.while_at_rest(collect)
        if remote is not None and self._replicator is not None:
            gone = self._replicator.collect_now(grace_ms=grace_ms, is_dry_run=dry_run)
            collected.findings += [remote_finding(info) for info in gone]
        built: dict[str, Any] = msgspec.to_builtins(collected)
        return built
