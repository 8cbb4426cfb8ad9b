"""The paths and stores of a flow that commands use."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from cutline.config.loading import load_options
from cutline.config.options import Options
from cutline.errors import ConfigError, CutlineError, StorageError
from cutline.model.checkpoint import Manifest
from cutline.model.graph import check_name
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.protocol.history.known_checkpoints import of_present_history
from cutline.runtime.lock import running_pid
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoints
from cutline.storage.local import LocalStore

#: SQLite holds numbers of 63 bits.
_MOST_DIGITS = 18


def layout_in(options: Options, flow: str) -> Layout:
    """The layout of a flow, whether it exists or not. Refuses a name that no flow can have."""
    check_name("a flow", flow)
    storage = Path(options.storage).resolve()
    if storage.exists() and not storage.is_dir():
        raise StorageError(
            "the storage is a file, not a folder", next_step="name a folder with --storage", flow=flow, path=storage
        )
    return Layout(storage, flow)


def flow_layout(flow: str, storage: str | None) -> Layout:
    """The layout of a flow that has run here."""
    options = load_options({"storage": storage})
    layout = layout_in(options, flow)
    if not layout.identity.exists():
        raise no_flow(flow, options)
    return layout


def no_flow(flow: str, options: Options) -> ConfigError:
    return ConfigError(f"there is no flow {flow!r} in {options.storage}", next_step="check --storage and the name")


def epoch_number(text: str | None) -> Epoch | None:
    """The epoch that a person wrote; None: not a number, so it is the name of a savepoint."""
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    if len(text) > _MOST_DIGITS:
        raise ConfigError(f"{text[:_MOST_DIGITS]}… is too large for an epoch", next_step="see cutline verify --all")
    return Epoch(int(text))


def savepoints_of(flow: str, storage: str | None) -> Savepoints:
    return savepoints_in(flow_layout(flow, storage), load_options({"storage": storage}))


def savepoints_in(layout: Layout, options: Options) -> Savepoints:
    return Savepoints(layout, partial(store_at, remote_options=options.remote_options))


def is_running(layout: Layout) -> bool:
    return running_pid(layout.lock) is not None


def kept_checkpoints(store: LocalStore) -> list[Manifest]:
    """The readable checkpoints of the flow's present history, ascending."""
    found = []
    for epoch in store.checkpoints.epochs():
        with contextlib.suppress(CutlineError):
            found.append(store.checkpoints.load_manifest(epoch))
    return of_present_history(found, store.generations.load_all())
