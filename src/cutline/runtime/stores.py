"""Object stores as the options name them: the remote tier, the rows between operators, savepoints elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from cutline.channels.segment_store import SegmentStore, choose_place
from cutline.config.options import Options
from cutline.errors import ConfigError
from cutline.model.graph import FlowGraph
from cutline.model.ids import FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.objects.waiting import patiently
from cutline.ports import Executors, ObjectStore
from cutline.tiers.executor_transfer import PARALLELISM, Carrier, ExecutorCarrier, ThreadCarrier
from cutline.tiers.upload import Replica

BUCKET_SCHEMES = ("s3://", "gs://", "az://")
#: Names of options that no file of ours may hold.
_SECRET = re.compile(r"secret|token|password|credential|access_?key|account_?key|sas", re.IGNORECASE)
#: Sending less than this takes the driver about as long as a job takes to begin (benchmarks/uploads.py).
_WORTH_A_JOB_BYTES = 64 << 20


def store_at(place: str, remote_options: Mapping[str, str] | None = None) -> ObjectStore:
    """A folder, or the address of a bucket, as an object store."""
    return _opening_of(place, remote_options)()


def _opening_of(place: str, remote_options: Mapping[str, str] | None = None) -> Callable[[], ObjectStore]:
    """How to open it, as something that can be pickled and done by an executor too."""
    from cutline.objects import open_store

    return partial(open_store, place, dict(remote_options or {}) if place.startswith(BUCKET_SCHEMES) else {})


def open_replica(graph: FlowGraph, options: Options, layout: Layout, executors: Executors | None) -> Replica | None:
    if not options.remote:
        if options.durable == "remote":
            raise ConfigError(
                "durable: there is no remote tier", next_step='set remote, or durable = "local"', flow=graph.flow
            )
        return None
    if options.is_per_operator:
        raise ConfigError(
            "remote: a checkpoint of one operator alone is of no use on another host",
            next_step="choose another mode, or leave remote out",
            flow=graph.flow,
        )
    open_remote = _opening_of(f"{options.remote.rstrip('/')}/{graph.flow}", options.remote_options)
    store = open_remote()
    carrier: Carrier = (driver := ThreadCarrier(store, layout.root, PARALLELISM))
    least_bytes = _least_for(executors, options)
    # What is in the memory of this process no executor can reach.
    if executors is not None and least_bytes and not store.url.startswith("memory:"):
        # An executor may run in another folder: for it the place must not be a relative one.
        open_there = _opening_of(store.url) if store.url.startswith("file:") else open_remote
        carrier = ExecutorCarrier(executors, open_there, layout, driver, least_bytes=least_bytes)
    return Replica(store, layout, carrier=carrier)


def _least_for(executors: Executors | None, options: Options) -> int:
    """How much is worth a job; 0: nothing is."""
    if executors is None or options.executor_transfer_bytes is not None:
        return options.executor_transfer_bytes or 0
    return _WORTH_A_JOB_BYTES if executors.are_elsewhere() else 0


def settle_segments(options: Options, layout: Layout, flow: FlowName) -> None:
    base = options.channel_store.rstrip("/")
    if base and not base.startswith((*BUCKET_SCHEMES, "file://")):
        raise ConfigError(
            f"channel_store: {base!r} is not the URL of an object store",
            next_step='write for example "s3://bucket/prefix"; a folder that all machines share belongs into storage',
            flow=flow,
        )
    is_bucket = base.startswith(BUCKET_SCHEMES)
    secret = next((name for name in options.remote_options if is_bucket and _SECRET.search(name)), None)
    if secret is not None:
        raise ConfigError(
            f"channel_store: {secret} would have to be written down for the executors",
            next_step="give credentials in the environment of the driver and of the executors",
            flow=flow,
        )
    choose_place(layout.channels, f"{base}/{flow}" if base else "", options.remote_options if is_bucket else {})
    # An epoch must not be taken for damaged because a store is away for a moment.
    patiently(SegmentStore.of(layout.channel(OperatorId("any"))).check_reachable, flow=flow)
