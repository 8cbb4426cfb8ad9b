"""The paths and stores of a flow that commands use."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from cutline.config.loading import load_options
from cutline.config.options import Options
from cutline.errors import ConfigError, CutlineError
from cutline.model.checkpoint import Manifest
from cutline.model.layout import Layout
from cutline.protocol.history.known_checkpoints import of_present_history
from cutline.runtime.lock import running_pid
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoints
from cutline.storage.local import LocalStore


def flow_layout(flow: str, storage: str | None) -> Layout:
    """The layout of a flow that has run here."""
    options = load_options({"storage": storage})
    layout = Layout(Path(options.storage).resolve(), flow)
    if not layout.identity.exists():
        raise ConfigError(f"there is no flow {flow!r} in {options.storage}", next_step="check --storage and the name")
    return layout


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
