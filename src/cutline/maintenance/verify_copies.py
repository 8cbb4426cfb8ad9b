"""Whether a checkpoint that lies elsewhere is whole: in the remote tier, or in a savepoint.

The surest test of a copy is to fetch it, into a folder that is thrown away and with the very code that a restore would
use, and then to look at it as at any other. Every byte is read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from cutline.errors import CutlineError
from cutline.maintenance.verify import EpochReport, Finding
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.tiers.upload import Replica

#: Looks at one checkpoint in a folder.
Look = Callable[[Layout, Epoch], EpochReport]


def verify_copies(
    replica_in: Callable[[Layout], Replica], flow: str, look: Look, epochs: Iterable[Epoch] | None = None
) -> list[EpochReport]:
    """``replica_in``: what is to be looked at, as a source for a folder. ``epochs``: None means all there are.

    Raises StoreError if it cannot be looked at.
    """
    with tempfile.TemporaryDirectory(prefix="cutline-verify-") as folder:
        known = replica_in(Layout(Path(folder), flow)).epochs()
    wanted = known if epochs is None else list(epochs)
    return [_one(replica_in, flow, epoch, look, is_there=epoch in known) for epoch in wanted]


def _one(
    replica_in: Callable[[Layout], Replica], flow: str, epoch: Epoch, look: Look, *, is_there: bool
) -> EpochReport:
    if not is_there:
        return _damaged(epoch, f"checkpoints/{epoch:012d}/manifest.json", "there is no such checkpoint")
    # A folder for each: what one epoch lacks must not be found because another one has brought it.
    with tempfile.TemporaryDirectory(prefix="cutline-verify-") as folder:
        layout = Layout(Path(folder), flow)
        replica = replica_in(layout)
        try:
            manifest = replica.load_manifest(epoch)
            replica.fetch_records()
            replica.fetch_content(manifest)
        except CutlineError as error:
            return _damaged(epoch, str(error.where.get("path", replica.url)), error.what)
        return look(layout, epoch)


def _damaged(epoch: Epoch, path: str, problem: str) -> EpochReport:
    finding = Finding(epoch=epoch, operator=None, path=path, problem=problem)
    return EpochReport(epoch=epoch, verdict="damaged", problems=[finding])
