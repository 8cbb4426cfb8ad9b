"""``cutline pin`` and ``cutline unpin``."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from cutline.cli.failures import UsageError
from cutline.cli.flows_here import FlowHere, flow_here
from cutline.cli.options import Config, EpochNumber, FlowName, Json, Storage
from cutline.errors import ConfigError, UnknownEpochError
from cutline.model.ids import Epoch


def pin(
    flow: FlowName = None,
    *,
    epoch: EpochNumber,
    storage: Storage = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Keep a checkpoint until it is unpinned.

    The checkpoint itself is kept, and all that it needs here. What sources and sinks keep is their own affair; see
    cutline checkpoints.
    """
    _change(flow, storage, config, epoch, is_pinned=True, as_json=as_json)


def unpin(
    flow: FlowName = None,
    *,
    epoch: EpochNumber,
    storage: Storage = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Return a pinned checkpoint to normal retention."""
    _change(flow, storage, config, epoch, is_pinned=False, as_json=as_json)


def _change(
    flow: str | None, storage: str | None, config: Path | None, text: str, *, is_pinned: bool, as_json: bool
) -> None:
    from cutline.cli.asking import ask_running
    from cutline.cli.places import epoch_number, is_running

    epoch = epoch_number(text)
    if epoch is None:
        raise UsageError(f"{text!r} is not the number of a checkpoint", next_step="see cutline checkpoints")
    here = flow_here(flow, storage, config)
    if is_running(here.layout):
        verb = "pinning" if is_pinned else "unpinning"
        ask_running(here.layout, "pin", {"epoch": epoch, "is_pinned": is_pinned}, f"{verb} epoch {epoch}")
    else:
        _change_stopped(here, epoch, is_pinned=is_pinned)
    if as_json:
        typer.echo(json.dumps({"flow": here.flow, "epoch": epoch, "is_pinned": is_pinned}))
    else:
        typer.echo(f"epoch {epoch} of flow {here.flow} is {'pinned' if is_pinned else 'no longer pinned'}")


def _change_stopped(here: FlowHere, epoch: Epoch, *, is_pinned: bool) -> None:
    from cutline.cli.places import kept_checkpoints
    from cutline.runtime.lock import FlowLock
    from cutline.storage.local import LocalStore
    from cutline.storage.metadata.inspector import inspect_coordinator
    from cutline.storage.metadata.sqlite import change_pin

    lock = FlowLock(here.layout.lock, here.flow)
    lock.acquire(is_noted=False)  # the flow is not started meanwhile
    try:
        known = inspect_coordinator(here.layout.metadata)
        if known.problem:
            raise ConfigError(known.problem, next_step=f"see cutline verify {here.flow}", flow=here.flow)
        kept = [one.epoch for one in kept_checkpoints(LocalStore.reading(here.layout))]
        if is_pinned and epoch not in kept:
            shown = ", ".join(map(str, kept)) or "none"
            raise UnknownEpochError(
                f"epoch {epoch} is not a complete checkpoint that is kept",
                next_step=f"available checkpoints: {shown}",
                flow=here.flow,
            )
        if not is_pinned and epoch not in known.pins:
            shown = ", ".join(map(str, sorted(known.pins))) or "none"
            raise UnknownEpochError(
                f"epoch {epoch} is not pinned", next_step=f"pinned checkpoints: {shown}", flow=here.flow
            )
        change_pin(here.layout.metadata, epoch, is_pinned=is_pinned)
    finally:
        lock.release()
