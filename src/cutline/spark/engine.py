"""The engine: one Spark streaming query per operator, rows moved by executors."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession

from cutline.base import durable
from cutline.config.options import Options
from cutline.errors import JvmLostError
from cutline.model.graph import FlowGraph, OperatorNode
from cutline.model.ids import BatchId, OperatorId, Position
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.ports.engine import BatchHandler, LiveDirs
from cutline.protocol.history.lineage import Lineage
from cutline.spark import query_plan as planning
from cutline.spark.batch import SparkBatch
from cutline.spark.channel_source import FORMAT, ChannelSource
from cutline.spark.failures import failing_function
from cutline.spark.query import SparkQuery, _asking_jvm
from cutline.spark.remote_dirs import settle_live_dirs
from cutline.spark.session import (
    QUERY_LOGGER,
    check_file_manager,
    is_own_session,
    query_session,
    set_log_level,
    settle_python_sources,
)
from cutline.spark.source_discovery import KnownSources, planned_sources
from cutline.spark.versions import PythonSources


class SparkEngine:
    """Plans and starts the queries of one flow. See ``cutline.ports.Engine``."""

    def __init__(
        self,
        session: SparkSession,
        graph: FlowGraph,
        functions: Mapping[OperatorId, Callable[..., DataFrame]],
        layout: Layout,
        options: Options,
        *,
        sources: KnownSources,
    ) -> None:
        self._session = session
        self._graph = graph
        self._functions = functions
        self._layout = layout
        self._options = options
        self._sources = sources
        self._frames: dict[OperatorId, DataFrame] = {}
        self._lock = threading.Lock()
        #: In a session of ours, errors of queries are reported by us alone: see ``open_session``.
        self._log_level = "OFF" if is_own_session(session) else "ERROR"
        #: Operators whose queries are restarted after each batch.
        self._restarting: set[OperatorId] = set()
        check_file_manager(session, graph.flow)
        self._live_dirs: LiveDirs | None = settle_live_dirs(
            session, layout, options.spark_dirs, graph.flow, are_names_final=options.state_backend != "heap"
        )
        self._python_sources = PythonSources(session, (ChannelSource, *sources.classes), self._start_path)

    def live_dirs(self) -> LiveDirs | None:
        return self._live_dirs

    # ------------------------------------------------------------------ planning

    def plan(self) -> dict[OperatorId, OperatorPlan]:
        plans: dict[OperatorId, OperatorPlan] = {}
        for node in self._graph.operators:
            with failing_function(self._graph.flow, node.operator, self._layout.traces):
                plans[node.operator] = self._plan_of(node)
        return plans

    def _plan_of(self, node: OperatorNode) -> OperatorPlan:
        frame = planning.check_streaming(self._graph.flow, node.operator, self._build(node))
        planning.check_columns(self._graph.flow, node.operator, frame.schema)
        settle_python_sources(frame.sparkSession)
        mode = self._graph.output_modes[node.operator]
        planning.check_output_mode(self._graph.flow, node.operator, frame, mode)
        stateful = planning.is_stateful(frame)
        partitions = int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or "1")
        self._frames[node.operator] = frame
        return OperatorPlan(
            operator=node.operator,
            subtasks=partitions if stateful else 1,
            is_stateful=stateful,
            schema_ipc=planning.schema_message(frame),
            sources=planned_sources(frame, self._sources),
        )

    def _build(self, node: OperatorNode) -> Any:
        session = query_session(
            self._session,
            state_backend=self._options.state_backend,
            subtasks=node.subtasks,
            is_local_dir=self._live_dirs is None or self._options.spark_dirs.startswith("file:"),
        )
        self._python_sources.register(session, node.operator)
        function = self._functions[node.operator]
        inputs = [self._input(session, node.operator, name) for name in node.inputs]
        if not node.inputs:
            return function(session)
        wants_session = "spark" in inspect.signature(function).parameters
        return function(*inputs, **({"spark": session} if wants_session else {}))

    def _input(self, session: SparkSession, consumer: OperatorId, channel: OperatorId) -> DataFrame:
        return (
            session.readStream.format(FORMAT)
            .schema(planning.channel_schema(self._frames[channel]))
            .option("channel", channel)
            .option("folder", str(self._layout.channel(channel)))
            .option("gate", str(self._gate_path(consumer, channel)))
            .option("parallelism", str(session.sparkContext.defaultParallelism))
            .load()
        )

    # ------------------------------------------------------------------ running

    def start(self, operator: OperatorId, spark_checkpoint_dir: Path, handler: BatchHandler) -> SparkQuery:
        frame = self._frames[operator]

        def on_batch(rows: DataFrame, batch: int) -> None:
            handler(SparkBatch(rows, BatchId(batch), spark_checkpoint_dir, self._live_dirs))

        location = str(spark_checkpoint_dir)
        if self._live_dirs is not None:
            self._live_dirs.publish(spark_checkpoint_dir)
            location = self._live_dirs.url(spark_checkpoint_dir)
        self._python_sources.store_start(operator, spark_checkpoint_dir, self._live_dirs)

        # No scheduler pool per operator: Spark breaks ties between pools by name, which on few cores starves the
        # operators late in the alphabet. First come, first served is fair to short batches.
        with _asking_jvm(self._graph.flow):
            query = (
                frame.writeStream.outputMode(self._graph.output_modes[operator])
                .queryName(f"{self._graph.flow}.{operator}")
                .option("checkpointLocation", location)
                .foreachBatch(on_batch)
                .start()
            )
        return SparkQuery(query, self._graph.flow)

    def set_gate(
        self, operator: OperatorId, channel: OperatorId, admit: Position, lineage: Lineage, first: Position
    ) -> None:
        path = self._gate_path(operator, channel)
        path.parent.mkdir(parents=True, exist_ok=True)
        gate = {
            "admit": admit,
            "first": first,
            "lineage": [[span.generation, span.start] for span in lineage.spans],
            "max_bytes": self._options.max_batch_bytes,
        }
        durable.replace(path, msgspec.json.encode(gate), sync=False)

    def _gate_path(self, operator: OperatorId, channel: OperatorId) -> Path:
        return self._layout.gates / operator / f"{channel}.json"

    def _start_path(self, operator: OperatorId) -> Path:
        return self._layout.gates / operator / "start"  # no channel's: those end in .json

    def expect_restarts(self, operator: OperatorId, are_expected: bool) -> None:
        with self._lock:
            before = bool(self._restarting)
            (self._restarting.add if are_expected else self._restarting.discard)(operator)
            if bool(self._restarting) != before:
                self._set_query_log_level("OFF" if self._restarting else self._log_level)

    def begin_stop(self) -> None:
        self._set_query_log_level("OFF")

    def close(self) -> None:
        """Resets only Cutline's log setting: the session belongs to the code that created it."""
        self._set_query_log_level(self._log_level)

    def _set_query_log_level(self, level: str) -> None:
        with contextlib.suppress(JvmLostError), _asking_jvm(self._graph.flow):
            set_log_level(self._session, QUERY_LOGGER, level)
