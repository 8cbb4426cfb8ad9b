"""One flow's remote tier, opened: its parts share one place in an object store."""

from __future__ import annotations

from dataclasses import dataclass

from cutline.model.layout import Layout
from cutline.ports.objects import ObjectStore
from cutline.tiers.download import Downloader
from cutline.tiers.driver_transfer import PARALLELISM, DriverTransfer, Transfer
from cutline.tiers.fencing import RemoteFence
from cutline.tiers.remote_checkpoints import RemoteCheckpoints
from cutline.tiers.remote_gc import RemoteCollector
from cutline.tiers.upload import Uploader


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTier:
    """Callers use only the part that they need."""

    store: ObjectStore
    checkpoints: RemoteCheckpoints
    fence: RemoteFence
    uploader: Uploader
    downloader: Downloader
    collector: RemoteCollector
    transfer: Transfer

    @classmethod
    def open(
        cls, store: ObjectStore, layout: Layout, *, has_rivals: bool = True, transfer: Transfer | None = None
    ) -> RemoteTier:
        """``has_rivals``: other hosts may write to the same place, each in generations that it has claimed.

        ``transfer``: transfers the content; None: threads of this process.
        """
        transfer = transfer or DriverTransfer(store, layout.root, PARALLELISM)
        checkpoints = RemoteCheckpoints(store, layout)
        fence = RemoteFence(store, layout, checkpoints, has_rivals=has_rivals)
        uploader = Uploader(store, layout, checkpoints=checkpoints, fence=fence, transfer=transfer)
        collector = RemoteCollector(
            store, layout, checkpoints=checkpoints, present=uploader.present, early=uploader.early
        )
        return cls(
            store=store,
            checkpoints=checkpoints,
            fence=fence,
            uploader=uploader,
            downloader=Downloader(store, layout, transfer),
            collector=collector,
            transfer=transfer,
        )

    @property
    def url(self) -> str:
        return self.store.url

    def give_up(self) -> None:
        """Make running transfers end soon with NotDone. Repeat the call until they have ended."""
        self.transfer.give_up()
