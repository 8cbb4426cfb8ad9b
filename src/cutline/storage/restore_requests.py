"""The restore request that waits in a flow's folder for the next start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cutline.base import durable, records
from cutline.errors import CutlineError
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest, epoch_in

#: Kind of the stored record.
_RESTORE = "restore"


def store_request(layout: Layout, request: RestoreRequest) -> None:
    """Store a restore request for the next start."""
    durable.replace(layout.restore_request, records.encode(_RESTORE, request))


def stored_request(layout: Layout) -> RestoreRequest | None:
    """The request that the next start carries out; None: none is stored. Raises DamagedRecordError."""
    if not layout.restore_request.exists():
        return None
    return records.load(_RESTORE, layout.restore_request, RestoreRequest)


def withdraw_request(layout: Layout, request: RestoreRequest) -> bool:
    """Remove this request and no other, which another person may have stored meanwhile. False: it was not there.

    Durable on return: no power cut brings it back.
    """
    if waiting_request(layout) != request:
        return False
    taken = durable.temporary_beside(layout.restore_request)
    try:
        os.rename(layout.restore_request, taken)
    except FileNotFoundError:
        return False
    is_own = _readable(taken) == request
    if not is_own:
        with contextlib.suppress(FileExistsError):  # then a newer one is there
            os.link(taken, layout.restore_request)
    os.unlink(taken)
    durable.fsync_dir(layout.root)
    return is_own


def remove_request(layout: Layout) -> None:
    """Remove the request, whatever it says, or a damaged one. Durable on return."""
    layout.restore_request.unlink(missing_ok=True)
    durable.fsync_dir(layout.root)


def waiting_request(layout: Layout) -> RestoreRequest | None:
    """``stored_request``, to those that only look: None also if it cannot be read."""
    return _readable(layout.restore_request)


def requested_epochs(layout: Layout) -> frozenset[Epoch]:
    """Checkpoints that must stay until the next start, because it is to restore them."""
    request = waiting_request(layout)
    epoch = epoch_in(request.to) if request is not None else None
    return frozenset() if epoch is None else frozenset({epoch})


def requested_savepoints(layout: Layout) -> frozenset[str]:
    """Savepoints that must stay until the next start."""
    request = waiting_request(layout)
    return frozenset() if request is None or epoch_in(request.to) is not None else frozenset({request.to})


def _readable(path: Path) -> RestoreRequest | None:
    try:
        return records.load(_RESTORE, path, RestoreRequest)
    except (CutlineError, OSError):
        return None
