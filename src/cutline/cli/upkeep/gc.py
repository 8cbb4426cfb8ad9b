"""``cutline gc``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cutline.cli.failures import as_wrong_use
from cutline.cli.flows_here import flow_here
from cutline.cli.options import Config, FlowName, Json, Storage
from cutline.cli.words import counted, size
from cutline.config.options import Options
from cutline.config.values import parse_duration_ms
from cutline.errors import ConfigError, FlowLockedError
from cutline.model.layout import Layout

if TYPE_CHECKING:
    from rich.console import Console

    from cutline.maintenance.findings import Collected, Garbage
    from cutline.tiers.remote_tier import RemoteTier

_ANSWER_SECONDS = 600.0
#: How long a collector waits for another one.
_LOCK_SECONDS = 120.0


def gc(
    flow: FlowName = None,
    storage: Storage = None,
    config: Config = None,
    remote: Annotated[str | None, typer.Option(help="The remote tier, if it is to be collected too.")] = None,
    grace: Annotated[str, typer.Option(help="Files changed within this time stay.")] = "1h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be collected, and change nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Collect what interrupted work has left and no checkpoint needs. A running flow does this itself, on request."""
    from rich.console import Console

    is_number = grace.isascii() and grace.isdigit()
    with as_wrong_use():
        grace_ms = parse_duration_ms(float(grace) if is_number else grace, option="--grace")
    here = flow_here(flow, storage, config, remote=remote)
    layout, options = here.layout, here.options
    tier = _remote_tier(layout, options)
    with _progress(Console(stderr=True), is_shown=not as_json) as on_found:
        collected = _collect(layout, options, tier, grace_ms=grace_ms, is_dry_run=dry_run, on_found=on_found)
    if as_json:
        typer.echo(json.dumps(_as_json(here.flow, collected, is_dry_run=dry_run)))
    else:
        _print(Console(), collected, is_dry_run=dry_run)


def _remote_tier(layout: Layout, options: Options) -> RemoteTier | None:
    from cutline.runtime.stores import store_at
    from cutline.tiers.remote_tier import RemoteTier

    if not options.remote:
        return None
    place = f"{options.remote.rstrip('/')}/{layout.root.name}"
    return RemoteTier.open(store_at(place, options.remote_options, creates=False), layout)


def _collect(
    layout: Layout,
    options: Options,
    tier: RemoteTier | None,
    *,
    grace_ms: int,
    is_dry_run: bool,
    on_found: Callable[[Garbage], None],
) -> Collected:
    """Ask a running flow to collect; hold the lock of a stopped flow, so that it is not started meanwhile."""
    from cutline.runtime.lock import FlowLock, running_pid

    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        if running_pid(layout.lock) is not None:
            return _ask(layout, tier, grace_ms=grace_ms, is_dry_run=is_dry_run)
        lock = FlowLock(layout.lock, layout.root.name)
        try:
            if not is_dry_run:  # a dry run takes no lock
                lock.acquire(is_noted=False)
            return _collect_stopped(layout, options, tier, grace_ms=grace_ms, is_dry_run=is_dry_run, on_found=on_found)
        except FlowLockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        finally:
            lock.release()


def _ask(layout: Layout, tier: RemoteTier | None, *, grace_ms: int, is_dry_run: bool) -> Collected:
    from cutline.maintenance.findings import Collected
    from cutline.runtime.lock import running_pid
    from cutline.transport.request_files import ask

    def check_running() -> None:
        if running_pid(layout.lock) is None:
            raise ConfigError("the flow has just stopped", next_step="run the command again", flow=layout.root.name)

    arguments = {"grace_ms": grace_ms, "dry_run": is_dry_run, "remote": tier.url if tier else None}
    answer = ask(layout.requests, "gc", arguments, seconds=_ANSWER_SECONDS, wait=check_running)
    return msgspec.convert(answer, Collected)


def _collect_stopped(
    layout: Layout,
    options: Options,
    tier: RemoteTier | None,
    *,
    grace_ms: int,
    is_dry_run: bool,
    on_found: Callable[[Garbage], None],
) -> Collected:
    from cutline.maintenance.gc_local import collect_stopped
    from cutline.maintenance.gc_remote import collect_remote
    from cutline.storage.local import LocalStore
    from cutline.storage.metadata.inspector import inspect_coordinator

    store = LocalStore.reading(layout)
    known = inspect_coordinator(layout.metadata)
    collected = collect_stopped(
        layout,
        store.query_dirs,
        store.checkpoints,
        store.generations,
        open_from=known.open_from,
        grace_ms=grace_ms,
        is_dry_run=is_dry_run,
        on_found=on_found,
    )
    if known.problem:
        collected.in_doubt.append(known.problem)
    if tier is not None:
        local = store.checkpoints.epochs() if layout.checkpoints.is_dir() else []
        there = collect_remote(
            tier,
            known,
            here=local,
            options=options,
            generations=store.generations.load_all(),
            grace_ms=grace_ms,
            is_dry_run=is_dry_run,
            on_found=on_found,
        )
        collected.findings += there.findings
        collected.in_doubt += there.in_doubt
    return collected


@contextmanager
def _progress(console: Console, *, is_shown: bool) -> Iterator[Callable[[Garbage], None]]:
    """Show how much was found so far; the total is not known in advance."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as view:
        task = view.add_task("looking", total=None)
        count = size_bytes = 0

        def on_found(finding: Garbage) -> None:
            nonlocal count, size_bytes
            count, size_bytes = count + 1, size_bytes + finding.size_bytes
            view.update(task, description=f"{count:,} found, {size(size_bytes)}")

        yield on_found


def _as_json(flow: str, collected: Collected, *, is_dry_run: bool) -> dict[str, object]:
    return {
        "flow": flow,
        "is_dry_run": is_dry_run,
        "findings": msgspec.to_builtins(collected.findings),
        "count": len(collected.findings),
        "size_bytes": sum(one.size_bytes for one in collected.findings),
        "in_doubt": collected.in_doubt,
    }


def _print(console: Console, collected: Collected, *, is_dry_run: bool) -> None:
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from cutline.maintenance.findings import WHY, found

    if collected.findings:
        table = Table("tier", "kind", "count", "bytes", "why")
        for tier, kind, count, size_bytes in found(collected):
            table.add_row(*map(Text, (tier, kind, f"{count:,}", f"{size_bytes:,}", WHY[kind])))
        console.print(table)
    for one in collected.findings if is_dry_run else ():
        console.print(f"{one.tier} {one.kind} {escape(one.path)} {one.size_bytes:,}", highlight=False, soft_wrap=True)
    for text in collected.in_doubt:
        console.print(f"[yellow]kept, in doubt:[/] {escape(text)}", highlight=False, soft_wrap=True)
    size_bytes = sum(one.size_bytes for one in collected.findings)
    verb = "would be collected" if is_dry_run else "collected"
    console.print(f"{len(collected.findings):,} {verb}, {counted(size_bytes, 'byte')}", highlight=False)
