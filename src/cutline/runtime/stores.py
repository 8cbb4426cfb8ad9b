"""Opens the stores that the options name: the remote tier, the rows between operators, exported savepoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cutline.channels.segment_store import SegmentStore, choose_place
from cutline.config.compatibility import BUCKET_SCHEMES
from cutline.config.options import Options
from cutline.connectors.replay_guard import ReplayGuard
from cutline.model.graph import FlowGraph
from cutline.model.ids import FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.objects.waiting import wait_for_store
from cutline.ports.executors import Executors
from cutline.ports.objects import ObjectStore
from cutline.runtime.parts import Definition, Stores
from cutline.savepoints.store import Savepoints
from cutline.storage.local import LocalStore
from cutline.storage.metadata.sqlite import SqliteMetadata
from cutline.tiers.driver_transfer import PARALLELISM, DriverTransfer, Transfer
from cutline.tiers.executor_transfer import ExecutorTransfer
from cutline.tiers.remote_at_start import RemoteAtStart
from cutline.tiers.remote_tier import RemoteTier

#: The driver uploads this much in about the time that a job takes to start (benchmarks/uploads.py).
_WORTH_A_JOB_BYTES = 64 << 20


def open_stores(what: Definition, executors: Executors | None) -> Stores:
    graph, options, layout = what.graph, what.options, what.layout
    metadata = SqliteMetadata(layout.metadata)
    local = LocalStore.open(
        layout,
        ReplayGuard(),
        live_dirs=what.engine.live_dirs(),
        sources={name: plan.sources for name, plan in what.plans.items()},
    )
    remote = open_remote_tier(graph, options, layout, executors)
    settle_segments(options, layout, graph.flow)
    return Stores(
        metadata=metadata,
        query_dirs=local.query_dirs,
        checkpoints=local.checkpoints,
        generations=local.generations,
        remote=remote,
        remote_at_start=RemoteAtStart(remote, graph.flow) if remote is not None else None,
        savepoints=Savepoints(layout, partial(store_at, remote_options=options.remote_options)),
    )


def store_at(place: str, remote_options: Mapping[str, str] | None = None, *, creates: bool = True) -> ObjectStore:
    """A folder, or the address of a bucket, as an object store. ``creates``: a folder that is missing is created."""
    return _opening_of(place, remote_options)(creates=creates)


def _opening_of(place: str, remote_options: Mapping[str, str] | None = None) -> Callable[..., ObjectStore]:
    """A picklable function that opens the store, also on an executor."""
    from cutline.objects import open_store

    return partial(open_store, place, dict(remote_options or {}) if place.startswith(BUCKET_SCHEMES) else {})


def open_remote_tier(
    graph: FlowGraph, options: Options, layout: Layout, executors: Executors | None
) -> RemoteTier | None:
    if not options.remote:
        return None
    open_remote = _opening_of(f"{options.remote.rstrip('/')}/{graph.flow}", options.remote_options)
    store = open_remote()
    transfer: Transfer = (driver := DriverTransfer(store, layout.root, PARALLELISM))
    least_bytes = _least_for(executors, options)
    # Executors cannot reach the memory of this process.
    if executors is not None and least_bytes and not store.url.startswith("memory:"):
        # An executor may run in another folder, so it needs an absolute path.
        open_there = _opening_of(store.url) if store.url.startswith("file:") else open_remote
        transfer = ExecutorTransfer(executors, open_there, layout, driver, least_bytes=least_bytes)
    return RemoteTier.open(store, layout, transfer=transfer)


def _least_for(executors: Executors | None, options: Options) -> int:
    """The least number of bytes that is worth a job; 0: no transfer is."""
    if executors is None or options.executor_transfer_bytes is not None:
        return options.executor_transfer_bytes or 0
    return _WORTH_A_JOB_BYTES if executors.are_elsewhere() else 0


def settle_segments(options: Options, layout: Layout, flow: FlowName) -> None:
    base = options.channel_store.rstrip("/")
    is_bucket = base.startswith(BUCKET_SCHEMES)
    choose_place(layout.channels, f"{base}/{flow}" if base else "", options.remote_options if is_bucket else {})
    # An epoch must not count as damaged because a store is briefly unavailable.
    wait_for_store(SegmentStore.of(layout.channel(OperatorId("any"))).check_reachable, flow=flow)
