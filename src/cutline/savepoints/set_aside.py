"""Sets a flow's state aside, so that the flow can continue from the newest history instead of its own.

What the storage did alone stays as a savepoint. The rest is removed, unless no savepoint could be made of it. A marker
is stored first and deleted last: killed in between, the next start completes what was begun.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.errors import CutlineError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import FileName
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.savepoints.store import Savepoint, Savepoints

log = get_logger(__name__)

_KIND = "set-aside"


class SetAside(msgspec.Struct, frozen=True, kw_only=True):
    """The flow's state is being moved into this folder."""

    folder: FileName
    #: No savepoint could be made: the folder stays, for a person to look at.
    is_kept: bool


def set_aside(
    layout: Layout, manifests: Iterable[Manifest], savepoints: Savepoints, *, now_ms: int
) -> Savepoint | None:
    """Leave the storage as if the flow had never run here, but for its savepoints; returns the new one.

    ``manifests``: the complete checkpoints of its history, ascending. The flow does not run, and its stores are closed.
    """
    name = f"before-rejoin-{datetime.fromtimestamp(now_ms / 1000, UTC):%Y%m%d-%H%M%S-%f}"
    manifests = list(manifests)
    made = _saved(name, manifests, savepoints, layout)
    crashpoint("aside-saved")
    durable.create(
        layout.set_aside, records.encode(_KIND, SetAside(folder=name, is_kept=made is None and bool(manifests)))
    )
    finish(layout)
    return made


def finish(layout: Layout) -> None:
    """Complete what an earlier process may have begun; without a marker, do nothing."""
    if not layout.set_aside.exists():
        return
    marker = records.load(_KIND, layout.set_aside, SetAside, flow=layout.flow)
    target = layout.aside(marker.folder)
    durable.make_dir(target)
    for path in sorted(layout.root.iterdir()):
        if path not in layout.kept_when_set_aside():
            os.rename(path, target / path.name)
            crashpoint("aside-moved")
    durable.fsync_dir(target)
    durable.fsync_dir(layout.root)
    if not marker.is_kept:
        shutil.rmtree(target)
    layout.set_aside.unlink()
    durable.fsync_dir(layout.root)


def readable(checkpoints: CheckpointStore) -> Iterator[Manifest]:
    """All manifests of a storage, but for damaged ones."""
    for epoch in checkpoints.epochs():
        with contextlib.suppress(CutlineError, OSError):
            yield checkpoints.load_manifest(epoch)


def _saved(name: str, manifests: Iterable[Manifest], savepoints: Savepoints, layout: Layout) -> Savepoint | None:
    """The newest checkpoint that is whole, as a savepoint; None if there is none."""
    for manifest in reversed(list(manifests)):
        try:
            return savepoints.create(name, manifest, is_drained=False, note="what this storage did alone")
        except (CutlineError, OSError) as error:
            log.warning("not_set_aside", flow=layout.flow, epoch=manifest.epoch, problem=str(error))
    return None
