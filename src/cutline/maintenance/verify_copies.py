"""Verifies copies of checkpoints: in the remote tier, or in a savepoint.

The most reliable test is to download the copy into a temporary folder, with the code that a restore uses, and to verify
it like any other checkpoint. Every byte is read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from cutline.errors import CutlineError
from cutline.maintenance.findings import EpochReport, Finding
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.tiers.remote_tier import RemoteTier

#: Verifies one checkpoint in a folder.
Look = Callable[[Layout, Epoch], EpochReport]


def verify_copies(
    tier_in: Callable[[Layout], RemoteTier], flow: str, look: Look, epochs: Iterable[Epoch] | None = None
) -> list[EpochReport]:
    """``tier_in``: opens the copies as a tier for a folder. ``epochs``: None means all.

    Raises StoreError if the copies cannot be listed.
    """
    with tempfile.TemporaryDirectory(prefix="cutline-verify-") as folder:
        known = tier_in(Layout(Path(folder), flow)).checkpoints.epochs()
    wanted = known if epochs is None else list(epochs)
    return [_one(tier_in, flow, epoch, look, is_there=epoch in known) for epoch in wanted]


def _one(
    tier_in: Callable[[Layout], RemoteTier], flow: str, epoch: Epoch, look: Look, *, is_there: bool
) -> EpochReport:
    if not is_there:
        return _damaged(epoch, f"checkpoints/{epoch:012d}/manifest.json", "there is no such checkpoint")
    # One folder per epoch: content that one epoch lacks must not be found because another one has downloaded it.
    with tempfile.TemporaryDirectory(prefix="cutline-verify-") as folder:
        layout = Layout(Path(folder), flow)
        tier = tier_in(layout)
        try:
            manifest = tier.checkpoints.load_manifest(epoch)
            tier.downloader.download_records()
            tier.downloader.download_content(manifest)
        except CutlineError as error:
            return _damaged(epoch, str(error.where.get("path", tier.url)), error.what)
        return look(layout, epoch)


def _damaged(epoch: Epoch, path: str, problem: str) -> EpochReport:
    finding = Finding(epoch=epoch, operator=None, path=path, problem=problem)
    return EpochReport(epoch=epoch, verdict="damaged", problems=[finding])
