"""The ports of a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from cutline.base.outages import Outages
from cutline.model.checkpoint import Manifest
from cutline.model.history import Identity
from cutline.model.ids import NO_CODE, BatchId, CodeHash, Epoch, OperatorId
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
#: The rows of an operator's batches after the first one, up to the second; None: its log does not tell.
RowsBetween = Callable[[OperatorId, BatchId, BatchId], int | None]


def _ignore(_: Epoch) -> None:
    pass


def _not_known(_: OperatorId, after: BatchId, last: BatchId) -> int | None:
    return None


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
    #: The code that this process runs; manifests name it.
    code: CodeHash = NO_CODE
    #: The epochs of savepoints and of the remote tier: sinks can be rewound to them, too. None: not known.
    saved_epochs: Callable[[], Collection[Epoch] | None] = tuple
    #: Called for each complete checkpoint.
    on_complete: Callable[[Epoch], None] = _ignore
    #: For the figures of a checkpoint: they outlive it.
    rows_between: RowsBetween = _not_known
