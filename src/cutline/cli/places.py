"""What commands open of a flow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cutline.cli.failures import UsageError
from cutline.cli.flows_here import FlowHere
from cutline.errors import CutlineError
from cutline.model.ids import Epoch
from cutline.model.layout import Layout

if TYPE_CHECKING:
    from cutline.model.checkpoint import Manifest
    from cutline.savepoints.store import Savepoints
    from cutline.storage.local import LocalStore

#: SQLite holds numbers of 63 bits.
_MOST_DIGITS = 18


def epoch_number(text: str | None) -> Epoch | None:
    """The epoch that a person wrote; None: not a number, so it is the name of a savepoint."""
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    if len(text) > _MOST_DIGITS:
        raise UsageError(f"{text[:_MOST_DIGITS]}… is too large for an epoch", next_step="see cutline checkpoints")
    return Epoch(int(text))


def savepoints_of(here: FlowHere) -> Savepoints:
    from cutline.runtime.stores import store_at
    from cutline.savepoints.store import Savepoints

    opens = partial(store_at, remote_options=here.options.remote_options)
    return Savepoints(here.layout, opens, open_source=partial(opens, creates=False))


def is_running(layout: Layout) -> bool:
    """Whether a process has the flow, also while it starts; what a person is told: ``state_of``."""
    from cutline.runtime.lock import running_pid

    return running_pid(layout.lock) is not None


def kept_checkpoints(store: LocalStore, unreadable: list[Epoch] | None = None) -> list[Manifest]:
    """The readable checkpoints of the flow's present history, ascending. ``unreadable`` gets those that are damaged."""
    from cutline.protocol.history.known_checkpoints import of_present_history

    found = []
    for epoch in store.checkpoints.epochs():
        try:
            found.append(store.checkpoints.load_manifest(epoch))
        except CutlineError:
            if unreadable is not None and epoch in store.checkpoints.epochs():
                unreadable.append(epoch)
    return of_present_history(found, store.generations.load_all())


def damage_note(flow: str, unreadable: Sequence[Epoch]) -> str:
    """What a person is told of checkpoints whose manifest cannot be read."""
    one = len(unreadable) == 1
    names = ", ".join(map(str, unreadable))
    told = f"the manifest of epoch {names}" if one else f"the manifests of epochs {names}"
    return f"{told} cannot be read: see cutline verify {flow}{f' {names}' if one else ' --all'}"
