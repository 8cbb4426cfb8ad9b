"""A model of one operator's Spark query: it plans, runs and commits batches, and runs them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutline.model.ids import START, BatchId, OperatorId, Position
from cutline.testing.simulator.storage.log import Data, Rows
from cutline.testing.simulator.storage.spark_dir import Counts, SparkDir
from cutline.testing.simulator.world import Steps, Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.operator import OperatorProcess

#: How far a batch reads each input, and for a source how many rows it reads.
Plan = tuple[Mapping[OperatorId, Position], int]


class Query:
    """Works on one Spark directory, for as long as its process lives."""

    def __init__(self, process: OperatorProcess, spark: SparkDir) -> None:
        self._process = process
        self._world = process.world
        self._graph = process.flow.graph
        self._operator = process.operator
        self.spark = spark
        self._is_idle = True

    def poke(self) -> None:
        """There may be something to do."""
        if self._is_idle:
            self._is_idle = False
            self._world.spawn(self._run(), self._process)

    def is_exhausted(self) -> bool:
        """Of a source: whether every row it has is in its log and committed."""
        path = self._graph.paths[self._operator][None, -1]
        done = self.spark.states[self.spark.committed].get(path, 0) >= self._process.flow.settings.rows_per_source
        return done and self.spark.committed >= self._process.last_batch

    def _run(self) -> Steps:
        process, spark, pause = self._process, self.spark, self._process.flow.settings.batch_ms
        while True:
            yield self._world.between(*pause)
            batch = BatchId(spark.committed + 1)
            if batch not in spark.planned:
                plan = self.logged_plan(batch) if batch <= process.last_batch else self.plan()
                # An old process finishes what it has begun, but Spark's own log lets it plan nothing more.
                if plan is None or process.is_zombie:
                    self._is_idle = True
                    return
                spark.planned[batch] = plan
            if batch > process.last_batch and not process.credits.may_run():
                self._is_idle = True  # consumers poke it when they have read
                return
            positions, count = spark.planned[batch]
            state = self._compute(batch, positions, count)
            if state is None:
                return
            counts, rows = state
            self._check_repeated(batch, rows)
            yield self._world.between(*pause)
            if self._world.strikes("query_failed"):
                continue  # its supervisor starts it again: the batch is run again
            if batch > process.last_batch:
                process.guarded(lambda b=batch, p=positions, r=rows: process.append(b, p, r))  # type: ignore[misc]
            if not process.is_alive:
                return
            yield process.slow(self._world.between(1, 4))
            if process.is_zombie:
                return  # the lock on the flow's folder keeps an old process out of Spark's directory
            if not self._world.strikes("query_failed"):
                spark.commit(batch, counts)

    def _check_repeated(self, batch: BatchId, rows: Rows) -> None:
        logged = self._process.view().find_batch(batch) if batch <= self._process.last_batch else None
        if logged is not None and logged.content != rows and not self._process.is_zombie:
            raise Violation(f"batch {batch} of {self._operator} was run again and put out something else")

    def plan(self) -> Plan | None:
        """What the next batch reads: some of what the gates admit; a source, some of what there is."""
        process, world = self._process, self._world
        inputs = self._graph.inputs[self._operator]
        if not inputs:
            path = self._graph.paths[self._operator][None, -1]
            left = process.flow.settings.rows_per_source - self.spark.states[self.spark.committed].get(path, 0)
            return ({}, min(left, world.between(0, 3))) if left > 0 else None
        at = self._read_so_far(BatchId(self.spark.committed + 1))
        positions: dict[OperatorId, Position] = {}
        for channel in inputs:
            positions[channel] = at[channel]
            view = process.disk.logs[channel].view(process.input_lineage[channel])
            entries = view.between(at[channel], process.gates.get(channel, START))
            ends = [Position(entry.seq + 1) for entry in entries if isinstance(entry, Data) and entry.content]
            if ends and world.rng.random() < 0.9:
                positions[channel] = ends[world.rng.randrange(min(len(ends), 4))]
        if positions == at and world.rng.random() < 0.95:
            if any(process.gates.get(channel, START) > at[channel] for channel in inputs):
                world.after(world.between(3, 9), self.poke, process)
            return None
        return positions, 0

    def logged_plan(self, batch: BatchId) -> Plan:
        """A batch that stands in the log is run again as it was planned then, although its directory was lost."""
        entry = self._process.view().find_batch(batch)
        if entry is None:
            raise Violation(f"batch {batch} of {self._operator} must be run again, and its entry is gone")
        return entry.positions, entry.rows if not self._graph.inputs[self._operator] else 0

    def _read_so_far(self, batch: BatchId) -> dict[OperatorId, Position]:
        planned = self.spark.planned.get(BatchId(batch - 1))
        return {
            channel: planned[0].get(channel, START) if planned else START
            for channel in self._graph.inputs[self._operator]
        }

    def _compute(
        self, batch: BatchId, positions: Mapping[OperatorId, Position], count: int
    ) -> tuple[Counts, Rows] | None:
        """The state after the batch and the rows it puts out. None: an old process that finds its ground gone."""
        process = self._process
        counts = dict(self.spark.states[BatchId(batch - 1)])
        paths = self._graph.paths[self._operator]
        rows: list[tuple[int, int, int]] = []
        if not positions and not self._graph.inputs[self._operator]:
            path = paths[None, -1]
            first = counts.get(path, 0)
            if count:
                rows.append((path, first, count))
                counts[path] = first + count
            return counts, tuple(rows)
        for channel, first_entry in self._read_so_far(batch).items():
            view = process.disk.logs[channel].view(process.input_lineage[channel])
            for seq in range(first_entry, positions.get(channel, START)):
                entry = view.find(Position(seq))
                if entry is None:
                    self._missing(f"{self._operator} needs entry {seq} of {channel}, which is gone")
                    return None
                for path, first, size in entry.content if isinstance(entry, Data) else ():
                    own = paths[channel, path]
                    if counts.get(own, 0) != first:
                        self._missing(
                            f"batch {batch} of {self._operator} takes in rows {first}… of path {own}, "
                            f"its state holds {counts.get(own, 0)}"
                        )
                        return None
                    rows.append((own, first, size))
                    counts[own] = first + size
        return counts, tuple(rows)

    def _missing(self, problem: str) -> None:
        if not self._process.is_zombie:
            raise Violation(problem)
        self._process.die("an old process, and what it reads is gone")
