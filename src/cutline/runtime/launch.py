"""Starts a flow: options, lock, Spark session, then the assembly of its parts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.base import durable
from cutline.base.outages import DISK, outage_of
from cutline.base.storage_errors import in_words
from cutline.config.compatibility import check_options
from cutline.config.loading import load_options
from cutline.config.options import Options
from cutline.config.spark_settings import SparkStart
from cutline.errors import ConfigError, NotDone, RecoveryError, StorageError
from cutline.fingerprint.definition import code_of
from cutline.flow import Flow
from cutline.model.graph import FlowGraph
from cutline.model.ids import FlowName
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest
from cutline.ports.engine import Engine
from cutline.ports.executors import Executors
from cutline.ports.progress import NoProgress, Progress, Step
from cutline.runtime.assembly import FlowAssembly
from cutline.runtime.handle import RunningFlow
from cutline.runtime.lock import FlowLock
from cutline.runtime.parts import Definition
from cutline.runtime.process.state import noted_start
from cutline.storage.restore_requests import stored_request, waiting_request
from cutline.worker.immediate_publishing import with_immediate_sinks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start_flow(
    flow: Flow,
    *,
    spark: SparkSession | None,
    settings: Mapping[str, Any],
    config_file: Path | None = None,
    restore_to: int | str | None = None,
    rename: Mapping[str, str] | None = None,
    allow_dropped: bool = False,
    rejoin: bool = False,
    spark_start: SparkStart | None = None,
    progress: Progress | None = None,
) -> RunningFlow:
    """Check, recover, run. ``restore_to``: the epoch or savepoint to which the whole flow is restored first.

    ``rename`` (old name → new name) and ``allow_dropped`` describe how its operators have changed since then.
    ``rejoin``: if another storage has the flow's newest history, set the state of this one aside as a savepoint and
    continue from the remote tier. ``spark_start``: how to create a session, if there is none.
    ``progress``: told what the start does.
    """
    progress = progress or NoProgress()
    begun = time.monotonic()
    graph = flow.graph()
    options = load_options(settings, config_file=config_file)
    check_options(options, flow=graph.flow, own=graph.own_options(options))
    layout = Layout(Path(options.storage).resolve(), flow.name)

    def restore() -> RestoreRequest | None:
        return current_request(layout, restore_to, rename, allow_dropped=allow_dropped, flow=flow.name)

    def open_spark(note_jvm: Callable[[int], None], told: Progress) -> tuple[Engine, Executors]:
        session = _open_session(flow, spark, spark_start, told)
        return _open_spark(layout, flow, graph, options, session=session, note_jvm=note_jvm)

    run = _start_in(
        layout, flow, graph, options, open_spark=open_spark, restore=restore, rejoin=rejoin, progress=progress
    )
    run.metrics.recovered(run.status().recovery.path, time.monotonic() - begun)
    return run


def _start_in(
    layout: Layout,
    flow: Flow,
    graph: FlowGraph,
    options: Options,
    *,
    open_spark: Callable[[Callable[[int], None], Progress], tuple[Engine, Executors]],
    restore: Callable[[], RestoreRequest | None],
    rejoin: bool,
    progress: Progress,
) -> RunningFlow:
    """Lock the folder, open Spark, recover, run."""
    lock = FlowLock(layout.lock, flow.name)
    with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as starting:
        with in_words(flow=flow.name, path=layout.root):
            durable.make_dir(layout.root)
            lock.acquire()
            on_failure.callback(lock.release)
            note = starting.enter_context(noted_start(layout, progress))
            request = restore()
            note.restores(request.to if request is not None else "")
            engine, executors = open_spark(lock.note_jvm, note)
        run = run_on(
            engine,
            flow,
            graph,
            options,
            layout,
            executors=executors,
            release_lock=lock.release,
            request=request,
            rejoin=rejoin,
            progress=note,
        )
        on_failure.pop_all()
    return run


def _open_session(flow: Flow, spark: SparkSession | None, start: SparkStart | None, progress: Progress) -> SparkSession:
    # Spark is imported only here: checking a flow's graph or reading its records needs no JVM.
    progress.begin(Step.JAVA)
    from cutline.spark.session import open_session

    return open_session(flow.name, spark, start, progress)


def _open_spark(
    layout: Layout,
    flow: Flow,
    graph: FlowGraph,
    options: Options,
    *,
    session: SparkSession,
    note_jvm: Callable[[int], None],
) -> tuple[Engine, Executors]:
    from cutline.connectors.spark_sources import ADDRESS_OPTIONS, SETTINGS, SOURCES
    from cutline.spark.engine import SparkEngine
    from cutline.spark.executor_jobs import SparkExecutors
    from cutline.spark.session import jvm_pid
    from cutline.spark.source_discovery import KnownSources

    note_jvm(jvm_pid(session))
    sources = KnownSources(classes=SOURCES, settings=SETTINGS, address_options=ADDRESS_OPTIONS)
    engine = SparkEngine(session, graph, flow.functions, layout, options, sources=sources)
    return engine, SparkExecutors(session, flow.name)


def current_request(
    layout: Layout,
    restore_to: int | str | None,
    rename: Mapping[str, str] | None,
    *,
    allow_dropped: bool,
    flow: FlowName,
) -> RestoreRequest | None:
    """The request given to this start, else the stored one; None: the flow resumes. Two that differ are refused."""
    stored = stored_request(layout)
    if restore_to is not None:
        given = RestoreRequest(to=str(restore_to), rename=dict(rename or {}), allow_dropped=allow_dropped)
        if stored not in (None, given):
            raise ConfigError(
                f"two restores are requested: this start was told to restore {given.to}, and one of {stored.to} waits",
                next_step=f"withdraw the one that waits (cutline restore {flow} --cancel), or start without a target",
                flow=flow,
            )
        return given
    if rename or allow_dropped:
        raise ConfigError(
            "operators are renamed and dropped only when a checkpoint or savepoint is restored",
            next_step="name it with restore_to (--restore-to); a flow that only resumes keeps its operators",
            flow=flow,
        )
    return stored


def run_on(
    engine: Engine,
    flow: Flow,
    graph: FlowGraph,
    options: Options,
    layout: Layout,
    *,
    executors: Executors | None = None,
    release_lock: Callable[[], None],
    request: RestoreRequest | None = None,
    rejoin: bool = False,
    progress: Progress | None = None,
) -> RunningFlow:
    """Recover the flow and start it on an engine; the caller holds the flow's lock.

    ``executors``: transfer large files between the tiers; None: threads of this process transfer all files.
    """
    sinks = with_immediate_sinks(graph, flow.sinks, renamed=request.rename.values() if request is not None else ())
    definition = Definition(
        graph=graph,
        plans=engine.plan(),
        sinks=sinks,
        options=options,
        layout=layout,
        engine=engine,
        code=code_of(graph, flow.functions, flow.sinks),
    )
    assembly = FlowAssembly(
        definition=definition,
        executors=executors,
        request=request,
        rejoin=rejoin,
        progress=progress or NoProgress(),
    )
    with in_words(flow=flow.name, path=layout.root):
        try:
            return assembly.start(release_lock)
        except RecoveryError as error:
            if request is not None and request == waiting_request(layout):
                error.add_next_step(f"to start without it, withdraw the request: cutline restore {flow.name} --cancel")
            raise
        except NotDone as error:
            outage = outage_of(error)
            if outage is None or outage.resource not in (DISK, layout.metadata.name):
                raise
            raise StorageError(
                f"the flow's storage cannot be used: {outage.problem}",
                next_step=error.next_step or "make room on its disk, then run it again; nothing complete is lost",
                flow=flow.name,
                path=layout.root,
            ) from error
