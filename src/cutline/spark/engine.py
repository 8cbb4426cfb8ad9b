"""The engine: one Spark streaming query per operator, rows moved by executors."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cutline.base import durable
from cutline.base.decoding import decoder_of
from cutline.config.options import Options
from cutline.connectors.generator.spark_reader import GeneratorSource
from cutline.connectors.kafka.spark_reader import KafkaSource
from cutline.connectors.nats.spark_reader import NatsSource
from cutline.connectors.postgres.spark_reader import PostgresSource
from cutline.errors import JvmLostError
from cutline.model.graph import FlowGraph, OperatorNode
from cutline.model.ids import BatchId, FlowName, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports import BatchHandler, LiveDirs, OperatorPlan, StagedTask, StageJob
from cutline.protocol.history.lineage import Lineage
from cutline.spark import query_plan as planning
from cutline.spark.channel_source import FORMAT, ChannelSource
from cutline.spark.executor_staging import REPORT_SCHEMA, stage_rows
from cutline.spark.remote_dirs import settle_live_dirs
from cutline.spark.session import query_session, settle_python_sources
from cutline.spark.source_discovery import planned_sources

_QUERY_LOGGER = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"


@contextlib.contextmanager
def _asking_jvm(flow: FlowName) -> Iterator[None]:
    """Whatever py4j makes of a JVM that is gone becomes one error; what the JVM itself answers stays as it is."""
    try:
        yield
    except Py4JJavaError:
        raise
    except (Py4JError, ConnectionError, EOFError) as error:
        raise JvmLostError(
            "the JVM that runs the queries has ended",
            next_step="see why (its own output, the kernel's log); start the flow again: it resumes where it stopped",
            flow=flow,
        ) from error


class SparkBatch:
    """A micro-batch inside ``foreachBatch``: Spark has written its offsets and not yet its commit."""

    def __init__(
        self, frame: DataFrame, batch: BatchId, spark_checkpoint_dir: Path, live_dirs: LiveDirs | None
    ) -> None:
        self._frame = frame
        self._batch = batch
        self._spark_checkpoint_dir = spark_checkpoint_dir
        self._live_dirs = live_dirs

    @property
    def batch(self) -> BatchId:
        return self._batch

    def positions(self) -> Mapping[OperatorId, Position]:
        """From Spark's own offset log, which is what a re-run of the batch would read too."""
        offsets = [json.loads(line) for line in self._offsets_lines()[2:] if line.startswith("{")]
        return {
            OperatorId(offset["channel"]): Position(offset["position"]) for offset in offsets if "channel" in offset
        }

    def watermark_ms(self) -> int:
        return int(json.loads(self._offsets_lines()[1]).get("batchWatermarkMs", 0))

    def _offsets_lines(self) -> list[str]:
        if self._live_dirs is not None:
            return self._live_dirs.read(self._spark_checkpoint_dir, f"offsets/{self._batch}").decode().splitlines()
        return (self._spark_checkpoint_dir / "offsets" / str(self._batch)).read_text().splitlines()

    def stage(self, job: StageJob) -> list[StagedTask]:
        rows = self._frame.mapInArrow(stage_rows(job), REPORT_SCHEMA).collect()
        return [decoder_of(StagedTask).decode(row["report"]) for row in rows]

    def run_to_end(self) -> None:
        self._frame.write.format("noop").mode("overwrite").save()


class SparkQuery:
    """A running query. See ``cutline.ports.Query``."""

    def __init__(self, query: StreamingQuery, flow: FlowName) -> None:
        self._query = query
        self._flow = flow

    def is_active(self) -> bool:
        try:
            with _asking_jvm(self._flow):
                return self._query.isActive
        except JvmLostError:
            return False

    def is_idle(self) -> bool:
        with _asking_jvm(self._flow):
            status = self._query.status
            return not status["isTriggerActive"] and not status["isDataAvailable"]

    def failure(self) -> str | None:
        """Raises JvmLostError when there is nobody left to ask, and nothing that another start of it could help."""
        with _asking_jvm(self._flow):
            error = self._query.exception()
            return str(error) if error else None

    def stop(self) -> None:
        with contextlib.suppress(JvmLostError), _asking_jvm(self._flow):
            self._query.stop()

    def wait_processed(self) -> None:
        # ``failure`` tells what was wrong; the supervisor sees to it.
        with contextlib.suppress(StreamingQueryException, JvmLostError), _asking_jvm(self._flow):
            self._query.processAllAvailable()

    def progress(self) -> dict[str, Any]:
        latest = self._query.lastProgress
        return json.loads(latest.json) if latest is not None else {}


class SparkEngine:
    """Plans and starts the queries of one flow. See ``cutline.ports.Engine``."""

    def __init__(
        self,
        session: SparkSession,
        graph: FlowGraph,
        functions: Mapping[OperatorId, Callable[..., DataFrame]],
        layout: Layout,
        options: Options,
    ) -> None:
        self._session = session
        self._graph = graph
        self._functions = functions
        self._layout = layout
        self._options = options
        self._frames: dict[OperatorId, DataFrame] = {}
        self._lock = threading.Lock()
        #: Operators whose queries are started again after each batch.
        self._restarting: set[OperatorId] = set()
        self._live_dirs: LiveDirs | None = settle_live_dirs(
            session, layout, options.spark_dirs, graph.flow, are_names_final=options.state_backend != "heap"
        )
        # Once, on the session that every operator's is copied from.
        for source in (ChannelSource, GeneratorSource, KafkaSource, NatsSource, PostgresSource):
            session.dataSource.register(source)

    def live_dirs(self) -> LiveDirs | None:
        return self._live_dirs

    # ------------------------------------------------------------------ planning

    def plan(self) -> dict[OperatorId, OperatorPlan]:
        plans: dict[OperatorId, OperatorPlan] = {}
        for node in self._graph.operators:
            frame = planning.check_streaming(self._graph.flow, node.operator, self._build(node))
            settle_python_sources(frame.sparkSession)
            mode = self._graph.output_modes[node.operator]
            planning.check_output_mode(self._graph.flow, node.operator, frame, mode)
            stateful = planning.is_stateful(frame)
            partitions = int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or "1")
            self._frames[node.operator] = frame
            plans[node.operator] = OperatorPlan(
                operator=node.operator,
                subtasks=partitions if stateful else 1,
                is_stateful=stateful,
                schema_ipc=planning.schema_message(frame),
                sources=planned_sources(frame),
            )
        return plans

    def _build(self, node: OperatorNode) -> Any:
        session = query_session(self._session, state_backend=self._options.state_backend, subtasks=node.subtasks)
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

        # No scheduler pool per operator: Spark breaks ties between pools by their names, which on few cores starves the
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

    def expect_restarts(self, operator: OperatorId, are_expected: bool) -> None:
        with self._lock:
            before = bool(self._restarting)
            (self._restarting.add if are_expected else self._restarting.discard)(operator)
            if bool(self._restarting) != before:
                self._set_query_log_level("OFF" if self._restarting else "ERROR")

    def begin_stop(self) -> None:
        self._set_query_log_level("OFF")

    def close(self) -> None:
        """The session belongs to whoever made it; only our log setting is taken back."""
        self._set_query_log_level("ERROR")

    def _set_query_log_level(self, level: str) -> None:
        with contextlib.suppress(JvmLostError), _asking_jvm(self._graph.flow):
            jvm: Any = self._session._jvm
            levels = jvm.org.apache.logging.log4j.Level
            jvm.org.apache.logging.log4j.core.config.Configurator.setLevel(_QUERY_LOGGER, levels.toLevel(level))
