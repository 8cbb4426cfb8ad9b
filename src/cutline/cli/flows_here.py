"""Which flow a command is about: the one that was named, or the only one of the storage."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from cutline.base.storage_errors import in_words
from cutline.config.loading import load_options
from cutline.config.options import Options
from cutline.errors import ConfigError, StorageError
from cutline.model.graph import check_name
from cutline.model.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowHere:
    """A flow, its folder, and the options that hold for it."""

    layout: Layout
    options: Options

    @property
    def flow(self) -> str:
        return self.layout.flow


def flow_here(
    flow: str | None,
    storage: str | None,
    config: Path | None,
    *,
    must_have_run: bool = True,
    remote: str | None = None,
) -> FlowHere:
    """The named flow, or the only one of the storage. ``must_have_run``: refuses a flow that has never run here."""
    options = load_options({"storage": storage, "remote": remote}, config_file=config)
    layout = layout_in(options, flow) if flow is not None else only_flow(options)
    if must_have_run and not layout.identity.exists():
        raise no_flow(layout.flow, options)
    return FlowHere(layout=layout, options=options)


def layout_in(options: Options, flow: str) -> Layout:
    """The layout of a flow, whether it exists or not. Refuses a name that no flow can have."""
    check_name("a flow", flow)
    return Layout(_storage(options, flow=flow), flow)


def only_flow(options: Options) -> Layout:
    found = flows_in(options)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(nothing_in(options), next_step="check --storage and the working folder, or start a flow")
    names = ", ".join(one.flow for one in found)
    raise ConfigError(f"{options.storage} has {len(found)} flows: {names}", next_step="name one of them")


def flows_in(options: Options) -> list[Layout]:
    """Every flow that has anything in the storage, by name."""
    storage = _storage(options)
    with in_words(path=storage):
        names = sorted(path.name for path in storage.iterdir() if path.is_dir()) if storage.is_dir() else []
    layouts = [Layout(storage, name) for name in names]
    return [
        one
        for one in layouts
        if any(path.exists() for path in (one.identity, one.status, one.checkpoints, one.savepoints))
        or _is_starting(one)
    ]


def _is_starting(layout: Layout) -> bool:
    """For the first time: nothing is stored but the lock of the process."""
    if not layout.lock.exists():
        return False
    from cutline.runtime.lock import running_pid

    return running_pid(layout.lock) is not None


def no_flow(flow: str, options: Options) -> ConfigError:
    found = [one.flow for one in flows_in(options)]
    layout = Layout(_storage(options), flow)
    if flow in found and _is_starting(layout) and not layout.checkpoints.exists():
        return ConfigError(
            "the flow is starting for the first time: nothing is stored yet",
            next_step=f"wait until it runs: cutline status {flow}{storage_flag(options)}",
            flow=flow,
        )
    if flow in found:
        return ConfigError(
            f"flow {flow!r} in {options.storage} has no flow.json, which says whose folder it is",
            next_step=f"put it in place from a backup; what else is missing: cutline verify {flow}"
            f"{storage_flag(options)}",
            flow=flow,
        )
    others, meant = ", ".join(found), difflib.get_close_matches(flow, found, n=1)
    next_step = f"its flows are: {others}" if others else "check --storage and the name"
    if meant:
        next_step = f"did you mean {meant[0]}? {next_step}"
    return ConfigError(f"there is no flow {flow!r} in {options.storage}", next_step=next_step, flow=flow)


def storage_flag(options: Options) -> str:
    """What a command that is proposed needs, to find the same storage."""
    return f" --storage {options.storage}" if options.storage != Options().storage else ""


def nothing_in(options: Options) -> str:
    """For a storage without flows: a relative one is somewhere else in another working folder."""
    storage = _storage(options)
    return f"there is no flow in {storage}" + ("" if storage.is_dir() else ", which does not exist")


def _storage(options: Options, **where: str) -> Path:
    storage = Path(options.storage).resolve()
    if storage.exists() and not storage.is_dir():
        raise StorageError(
            "the storage is a file, not a folder", next_step="name a folder with --storage", path=storage, **where
        )
    return storage
