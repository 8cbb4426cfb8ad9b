"""The ports of a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cutline.base.outages import Outages
from cutline.model.checkpoint import Manifest
from cutline.model.history import Identity
from cutline.model.ids import Epoch
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.metadata import MetadataStore
from cutline.ports.telemetry import Telemetry
from cutline.protocol.history.retention import EpochNeeds
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.transport.in_process import Wire
from cutline.transport.mailbox import LinkSettings

#: Receives the manifest once the checkpoint is uploaded, or None and the reason why the upload failed for good.
OnUploaded = Callable[[Manifest | None, str], None]
#: Receives what the remaining checkpoints need after a collection.
OnCollected = Callable[[Iterable[EpochNeeds]], None]


def _ignore(_: Epoch) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPorts:
    metadata: MetadataStore
    checkpoints: CheckpointStore
    wire: Wire
    link: LinkSettings
    metrics: Telemetry
    #: Collects checkpoints in the background, then reports which log entries the remaining ones need.
    release: Callable[[ReleaseEpochs, OnCollected], None]
    on_fatal: Callable[[BaseException], None]
    outages: Outages = field(default_factory=Outages)
    #: Uploads a checkpoint before it is complete; None: a checkpoint completes without an upload.
    upload_first: Callable[[Manifest, OnUploaded], None] | None = None
    #: The generation in which this process has started; manifests name it.
    history: Identity = ""
    #: Called for each complete checkpoint.
    on_complete: Callable[[Epoch], None] = _ignore
