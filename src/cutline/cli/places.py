"""Where things of a flow lie, as commands ask for them."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from cutline.config.options import Options
from cutline.coordinator.manifests import of_present_history
from cutline.errors import ConfigError, CutlineError
from cutline.model.layout import Layout
from cutline.ports import Manifest
from cutline.runtime.launch import load_options
from cutline.runtime.lock import running_pid
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoints
from cutline.storage.checkpoints import LocalSnapshotStore


def flow_layout(flow: str, storage: str | None) -> Layout:
    """Of a flow that has run here."""
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


def kept_checkpoints(store: LocalSnapshotStore) -> list[Manifest]:
    """The checkpoints that can be read and that the flow goes on from, ascending."""
    found = []
    for epoch in store.epochs():
        with contextlib.suppress(CutlineError):
            found.append(store.load_manifest(epoch))
    return of_present_history(found, store.generations())
