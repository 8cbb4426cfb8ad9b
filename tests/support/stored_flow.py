"""A flow's storage folder, brought to any state by hand: everything real but Spark.

orders ── totals ── (sink table)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from cutline.channels.log import ChannelLog
from cutline.connectors.replay_guard import ReplayGuard
from cutline.coordinator.manifests import operator_cut
from cutline.model.checkpoint import (
    ChannelCut,
    Manifest,
    OperatorCut,
    OperatorRecord,
    SinkRecord,
    SubtaskRecord,
)
from cutline.model.cut import BarrierTerms, InFlight, Timings
from cutline.model.graph import FlowGraph, OperatorNode, SinkNode, build_graph
from cutline.model.ids import BatchId, Epoch, FlowName, OperatorId, Position, SinkId, Subtask
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.ports.metadata import EpochOutcome, PendingRecord
from cutline.ports.sinks import Sink
from cutline.protocol.recovery.facts import RestoreTo
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.start import Recovered, Recovery
from cutline.storage.local import LocalStore
from cutline.storage.metadata.sqlite import SqliteMetadata
from cutline.worker.snapshots import acknowledgement
from tests.support.channels import append_barrier, append_batch
from tests.support.spark_dirs import SparkDir

FLOW = FlowName("payments")
ORDERS, TOTALS, TABLE = OperatorId("orders"), OperatorId("totals"), SinkId("table")
SUBTASKS = 2


def flow_graph(edges: Mapping[OperatorId, tuple[OperatorId, ...]] | None = None) -> FlowGraph:
    """``edges``: inputs of every operator; what nobody reads gets a sink."""
    inputs = edges or {ORDERS: (), TOTALS: (ORDERS,)}
    read = {name for names in inputs.values() for name in names}
    return build_graph(
        FLOW,
        [
            OperatorNode(operator=name, inputs=names, subtasks=SUBTASKS, output_mode=None)
            for name, names in inputs.items()
        ],
        [
            SinkNode(sink=TABLE, operator=name, output_mode=None, supported_modes=frozenset({"append"}))
            for name in inputs
            if name not in read
        ],
    )


def plans_of(graph: FlowGraph, schemas: Mapping[OperatorId, bytes] | None = None) -> dict[OperatorId, OperatorPlan]:
    return {
        name: OperatorPlan(
            operator=name,
            subtasks=SUBTASKS,
            is_stateful=True,
            schema_ipc=(schemas or {}).get(name, f"schema of {name}".encode()),
        )
        for name in graph.names
    }


class StoredFlow:
    """Writes what a running flow would have written, and starts it again."""

    def __init__(self, storage: Path, graph: FlowGraph | None = None) -> None:
        self.graph = graph or flow_graph()
        self.layout = Layout(storage, FLOW)
        self.layout.root.mkdir(parents=True, exist_ok=True)
        self.store = LocalStore.open(self.layout, ReplayGuard())
        self.recovered: Recovered
        self.previous_epoch = Epoch(0)

    # ------------------------------------------------------------------ starting

    def start(
        self,
        graph: FlowGraph | None = None,
        schemas: Mapping[OperatorId, bytes] | None = None,
        sinks: Mapping[SinkId, Sink] | None = None,
        restore_to: Epoch | None = None,
    ) -> Recovered:
        """A new process comes and recovers the flow."""
        graph = graph or self.graph
        self.store = LocalStore.open(self.layout, ReplayGuard())
        with closing(SqliteMetadata(self.layout.metadata)) as metadata:
            at_rest = FlowAtRest(
                graph=graph,
                plans=plans_of(graph, schemas),
                layout=self.layout,
                query_dirs=self.store.query_dirs,
                checkpoints=self.store.checkpoints,
                generations=self.store.generations,
                metadata=metadata,
                sinks=sinks or {},
            )
            request = RestoreTo(epoch=restore_to) if restore_to is not None else None
            self.recovered = Recovery(at_rest, restore_to=request).recover()
        newest = [manifest.epoch for manifest in self.recovered.manifests]
        self.previous_epoch = newest[-1] if newest else Epoch(0)
        return self.recovered

    def log(self, operator: OperatorId) -> ChannelLog:
        return self.recovered.channels[operator]

    def spark(self, operator: OperatorId) -> SparkDir:
        return SparkDir(self.spark_dir(operator), subtasks=SUBTASKS)

    def spark_dir(self, operator: OperatorId) -> Path:
        return self.layout.spark_checkpoint_dir(operator, self.recovered.spark_dirs[operator])

    # ------------------------------------------------------------------ running

    def run(self, operator: OperatorId, *, rows: int = 1, until: str = "committed", read: int | None = None) -> None:
        """One batch, which reads all there is or ``read`` entries; killed after it was "planned" or "appended"."""
        log, spark = self.log(operator), self.spark(operator)
        positions = {
            str(name): self._end_of_rows(name) if read is None else log.last_positions.get(name, 0) + read
            for name in self.graph.node(operator).inputs
        }
        batch = log.last_batch + 1
        spark.plan(batch, positions)
        if until == "planned":
            return
        sinks = self.graph.sinks_of(operator)
        append_batch(log, rows=rows, positions=positions, staged={sink: [{"path": f"b{batch}"}] for sink in sinks})
        if until == "committed":
            spark.commit(batch, state=f"{operator} after batch {batch}")

    def _end_of_rows(self, channel: OperatorId) -> int:
        entries = [entry.seq + 1 for entry in self.log(channel).data_entries() if entry.rows]
        return max(entries, default=0)

    def run_all(self, *, batches: int = 1) -> None:
        for _ in range(batches):
            for operator in self.graph.names:
                self.run(operator)

    # ------------------------------------------------------------------ checkpoints

    def begin(self, epoch: int) -> None:
        """An epoch is recorded, and its barriers go into every log."""
        self.record_pending(epoch)
        self.append_barriers(epoch)

    def record_pending(self, epoch: int) -> None:
        with closing(SqliteMetadata(self.layout.metadata)) as metadata:
            metadata._generation = self.recovered.generation
            metadata.store_pending(
                PendingRecord(
                    epoch=Epoch(epoch),
                    generation=self.recovered.generation,
                    terms=BarrierTerms(alignment_limit_ms=0),
                )
            )

    def append_barriers(self, epoch: int) -> None:
        for operator in self.graph.names:
            inputs = self.graph.node(operator).inputs
            read = {str(name): self.log(operator).last_positions.get(name, Position(0)) for name in inputs}
            append_barrier(self.log(operator), epoch, positions=read)

    def checkpoint(self, epoch: int, *, is_known: bool = True) -> Manifest:
        """A complete checkpoint of where every operator stands now; ``is_known``: by the coordinator's records too."""
        self.begin(epoch)
        manifest = self.store_manifest(epoch)
        if is_known:
            self.record_completed(epoch)
        return manifest

    def store_manifest(self, epoch: int) -> Manifest:
        """Everybody's record of an epoch whose barriers are there, and then the manifest."""
        records = {operator: self._record(operator, Epoch(epoch)) for operator in self.graph.names}
        manifest = Manifest(
            flow=FLOW,
            epoch=Epoch(epoch),
            generation=self.recovered.generation,
            previous_epoch=self.previous_epoch,
            started_ms=0,
            completed_ms=1,
            operators={name: self._cut(record) for name, record in records.items()},
            channels={name: self._channel_cut(name, records) for name in records},
        )
        assert self.store.checkpoints.store_manifest(manifest) == manifest
        self.previous_epoch = Epoch(epoch)
        return manifest

    def record_completed(self, epoch: int) -> None:
        with closing(SqliteMetadata(self.layout.metadata)) as metadata:
            metadata._generation = self.recovered.generation
            metadata.store_outcome(
                EpochOutcome(
                    epoch=Epoch(epoch),
                    generation=self.recovered.generation,
                    started_ms=0,
                    ended_ms=1,
                    outcome="completed",
                    reason="",
                    details={},
                )
            )

    def _record(self, operator: OperatorId, epoch: Epoch) -> OperatorRecord:
        barrier = next(entry for entry in self.log(operator).barriers() if entry.epoch == epoch)
        files = self.store.query_dirs.files_of(self.spark_dir(operator), barrier.batch)
        subtasks, shared = self.store.checkpoints.store_files(
            self.store.checkpoints.hold(operator, epoch, self.spark_dir(operator), files)
        )
        entries = self.log(operator).data_entries()
        sinks = {
            sink: SinkRecord(staged=[entry.staged[sink] for entry in entries if sink in entry.staged], token={})
            for sink in self.graph.sinks_of(operator)
        }
        record = OperatorRecord(
            flow=FLOW,
            operator=operator,
            epoch=epoch,
            generation=self.recovered.generation,
            batch=barrier.batch,
            barrier=barrier.seq,
            positions=dict(barrier.positions),
            aligned=barrier.aligned,
            watermark_ms=files.watermark_ms,
            subtasks=subtasks
            or [SubtaskRecord(subtask=Subtask(i), files=[], size_bytes=0, new_bytes=0) for i in range(SUBTASKS)],
            shared=shared,
            sinks=sinks,
            timings=Timings(),
        )
        self.store.checkpoints.store_record(record)
        return record

    def _cut(self, record: OperatorRecord) -> OperatorCut:
        return operator_cut(acknowledgement(self.store.checkpoints.store_record(record)))

    def record_path(self, epoch: int, operator: OperatorId) -> Path:
        """The record that the epoch's manifest names."""
        cut = self.store.checkpoints.load_manifest(Epoch(epoch)).operators[operator]
        return self.layout.record(Epoch(epoch), operator, cut.generation)

    def _channel_cut(self, name: OperatorId, records: Mapping[OperatorId, OperatorRecord]) -> ChannelCut:
        barrier = records[name].barrier
        in_flight = {}
        for consumer, record in records.items():
            if name in record.positions:
                first = record.positions[name]
                entries = [entry for entry in self.log(name).data_entries(first, barrier) if entry.rows]
                in_flight[consumer] = InFlight(
                    first=first,
                    end=barrier,
                    entries=len(entries),
                    rows=sum(entry.rows for entry in entries),
                    size_bytes=sum(entry.size_bytes for entry in entries),
                )
        spans = [(span.generation, span.start) for span in self.log(name).lineage.spans]
        return ChannelCut(barrier=barrier, lineage=spans, in_flight=in_flight)

    # ------------------------------------------------------------------ looking

    def generations(self) -> list[int]:
        return [record.generation for record in LocalStore.open(self.layout, ReplayGuard()).generations.load_all()]

    def state_of(self, operator: OperatorId) -> BatchId:
        """The last batch that Spark has committed in the directory the operator runs on."""
        return BatchId(self.spark(operator).committed)

    def recoveries(self) -> dict[str, int]:
        with closing(SqliteMetadata(self.layout.metadata)) as metadata:
            return metadata.recoveries()
