"""How long a checkpoint takes while a backlog waits in a channel: unaligned, aligned, and aligned with a time limit.

The flow: a fast source, a channel with room for the backlog, and a consumer that sleeps over every row and reads only a
few entries per batch. The consumer is held until the channel is full and the source waits for room; then it works at
its own slow pace while the source makes up for what it takes away, so that the backlog stays. For each backlog:

unaligned   several checkpoints, their median: must not depend on the backlog
auto        one checkpoint with a time limit on the alignment: that limit, then as unaligned
aligned     one checkpoint, last: every row of the backlog is processed first, or its timeout aborts it

The backlogs are visited in the given order and back again, so that a drift of the machine is not taken for an effect of
the backlog; on the way back only unaligned checkpoints are taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline import Flow
from cutline.errors import CheckpointFailedError
from cutline.sinks import Parquet

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from cutline.ports import EpochOutcome
    from cutline.service.running import RunningFlow

#: The consumer's pace while it works; what a batch costs besides comes on top.
CONSUMER_ROWS_PER_SECOND = 100_000
ENTRIES_PER_READ = 4
#: A payment takes four columns of eight bytes, and a segment has a header.
BYTES_PER_ROW = 35
ALIGNMENT_LIMIT_MS = 500
#: Lets the smallest backlog finish and cuts the largest off.
CHECKPOINT_TIMEOUT = "40s"
#: A new flow takes some seconds to come to its pace; counted, the small backlogs, quickly filled, would seem slow.
WARM_UP_CHECKPOINTS = 25
#: Between checkpoints, so that they meet the consumer at every point of its batch.
PAUSE_SECONDS = 0.2
GOAL = 1.5


@dataclass(frozen=True)
class Backlog:
    """How many rows wait, in entries of how many rows."""

    rows: int
    entry_rows: int

    @property
    def capacity_entries(self) -> int:
        """Room for the backlog and for two batches of the consumer, so that the source can be ahead of it."""
        return -(-self.rows // self.entry_rows) + 2 * ENTRIES_PER_READ

    @property
    def rows_before(self) -> int:
        """With so many before a checkpoint, one batch of the consumer in between still leaves the backlog."""
        return self.rows + ENTRIES_PER_READ * self.entry_rows


def slow_pass(hold: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Rows as they are, at the consumer's pace; none at all for as long as the file ``hold`` exists."""
    pace = CONSUMER_ROWS_PER_SECOND

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import time as clock

        for batch in batches:
            while os.path.exists(hold):
                clock.sleep(0.02)
            clock.sleep(batch.num_rows / pace)
            yield batch

    return work


def build(folder: Path, hold: Path, entry_rows: int) -> Flow:
    flow = Flow("backpressure")

    @flow.operator()
    def fast(spark: SparkSession) -> DataFrame:
        generator = spark.readStream.format("cutline_generator")
        return generator.options(keys=1000, seed=1, partitions=1, rows_per_batch=entry_rows).load()

    @flow.operator(inputs=[fast])
    def slow(rows: DataFrame) -> DataFrame:
        # One task: it must not hold every core while it sleeps.
        return rows.coalesce(1).mapInArrow(slow_pass(str(hold)), rows.schema)

    flow.sink(slow, Parquet(str(folder / "out")))
    return flow


def start(folder: Path, hold: Path, wanted: Backlog) -> RunningFlow:
    return build(folder, hold, wanted.entry_rows).start(
        storage=str(folder / "storage"),
        checkpoint_interval=0,
        checkpoint_timeout=CHECKPOINT_TIMEOUT,
        alignment_timeout=f"{ALIGNMENT_LIMIT_MS}ms",
        channel_capacity_entries=wanted.capacity_entries,
        channel_capacity_bytes="1024GB",
        max_batch_bytes=ENTRIES_PER_READ * wanted.entry_rows * BYTES_PER_ROW,
    )


def wait_until(condition: Callable[[], bool], seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)


@dataclass(frozen=True)
class BackloggedFlow:
    """A flow that runs, with the file that holds its consumer."""

    run: RunningFlow
    hold: Path
    wanted: Backlog

    def waiting_rows(self) -> int:
        return int(self.run.status()["operators"]["fast"]["backlog_rows"]["slow"])

    def fill(self) -> None:
        """Hold the consumer until the backlog is there: at first, and when the source has fallen behind."""
        if self.waiting_rows() < self.wanted.rows_before:
            self.hold.touch()
            wait_until(lambda: self.waiting_rows() >= self.wanted.rows_before)
            wait_until(lambda: bool(self.run.status()["operators"]["fast"]["waiting_for_room"]))
        self.hold.unlink(missing_ok=True)

    def take(self, mode: str) -> EpochOutcome:
        """One checkpoint over the backlog, as the history tells it afterwards: complete or aborted."""
        time.sleep(PAUSE_SECONDS)
        self.fill()
        try:
            self.run.trigger_checkpoint(mode=mode)
        except CheckpointFailedError as error:
            print(f"{mode}: {error}", file=sys.stderr, flush=True)
        return self.run.checkpoints(1)[0]

    def take_unaligned(self, mode: str) -> EpochOutcome:
        """One that must complete without the consumer having come to its barrier, with the backlog in its record."""
        outcome = self.take(mode)
        details = outcome.details
        if details.get("unaligned_operators") != ["slow"] or details["in_flight_rows"] < self.wanted.rows:
            raise RuntimeError(f"not an unaligned checkpoint over {self.wanted.rows} rows: {outcome}")
        return outcome


def duration_ms(outcome: EpochOutcome) -> int:
    return outcome.ended_ms - outcome.started_ms


@contextlib.contextmanager
def backlogged(wanted: Backlog) -> Iterator[BackloggedFlow]:
    """A new flow in which the backlog waits, in its stride."""
    folder = Path(tempfile.mkdtemp(prefix="cutline-backpressure-"))
    hold = folder / "hold"
    try:
        hold.touch()
        run = start(folder, hold, wanted)
        try:
            flow, begun = BackloggedFlow(run, hold, wanted), time.monotonic()
            flow.fill()
            print(f"{wanted.rows:,} rows wait after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            for _ in range(WARM_UP_CHECKPOINTS):
                flow.take("unaligned")
            yield flow
        finally:
            hold.unlink(missing_ok=True)
            run.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(sizes: list[Backlog], repeat: int) -> list[dict[str, Any]]:
    """Visit every backlog: there, with checkpoints of every mode, and back, with unaligned ones."""
    unaligned: dict[Backlog, list[EpochOutcome]] = {wanted: [] for wanted in sizes}
    auto: dict[Backlog, EpochOutcome] = {}
    aligned: dict[Backlog, EpochOutcome] = {}
    for wanted in [*sizes, *reversed(sizes[:-1])]:
        with backlogged(wanted) as flow:
            unaligned[wanted] += [flow.take_unaligned("unaligned") for _ in range(repeat)]
            if wanted not in aligned:
                auto[wanted] = flow.take_unaligned("auto")
                aligned[wanted] = flow.take("aligned")
    return [summary(wanted, unaligned[wanted], auto[wanted], aligned[wanted]) for wanted in sizes]


def summary(
    wanted: Backlog, unaligned: list[EpochOutcome], auto: EpochOutcome, aligned: EpochOutcome
) -> dict[str, Any]:
    durations = [duration_ms(outcome) for outcome in unaligned]
    median = statistics.median(durations)
    return {
        "rows": wanted.rows,
        "in_flight_rows": min(outcome.details["in_flight_rows"] for outcome in unaligned),
        "in_flight_entries": min(outcome.details["in_flight_entries"] for outcome in unaligned),
        "unaligned_ms": durations,
        "unaligned_median_ms": median,
        "auto_ms": duration_ms(auto),
        "auto_beyond_limit_ms": duration_ms(auto) - ALIGNMENT_LIMIT_MS,
        "auto_unaligned_operators": auto.details["unaligned_operators"],
        # Of an aborted one: the time waited in vain, which is less than it would have taken.
        "aligned_ms": duration_ms(aligned),
        "aligned_completed": aligned.outcome == "completed",
        "aligned_abort_reason": aligned.reason,
        "aligned_over_unaligned": round(duration_ms(aligned) / max(median, 1), 1),
    }


def largest_over_smallest(results: list[dict[str, Any]]) -> float:
    """The unaligned median over the largest backlog as a multiple of that over the smallest."""
    medians = [item["unaligned_median_ms"] for item in sorted(results, key=lambda item: int(item["rows"]))]
    return round(float(medians[-1]) / max(float(medians[0]), 1), 2)


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| backlog | rows (entries) in flight | unaligned: median (range) | auto | aligned | aligned / unaligned |",
        "|---|---|---|---|---|---|",
    ]
    for item in results:
        least = "" if item["aligned_completed"] else "> "
        times = item["unaligned_ms"]
        lines.append(
            f"| {item['rows']:,} | {item['in_flight_rows']:,} ({item['in_flight_entries']}) "
            f"| {item['unaligned_median_ms']:.1f} ms ({min(times)}–{max(times)}) | {item['auto_ms']} ms "
            f"| {least}{item['aligned_ms'] / 1000:.1f} s | {least}{item['aligned_over_unaligned']:,.0f} |"
        )
    ratio = f"unaligned, largest over smallest backlog: {largest_over_smallest(results)} (goal: at most {GOAL})"
    return "\n".join([*lines, "", ratio])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 2_000_000, 5_000_000], help="the backlogs")
    parser.add_argument("--repeat", type=int, default=25, help="unaligned checkpoints per visit")
    parser.add_argument("--entry-rows", type=int, default=20_000, help="rows per entry of the channel")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    results = measure([Backlog(rows, arguments.entry_rows) for rows in arguments.rows], arguments.repeat)
    report = {
        "entry_rows": arguments.entry_rows,
        "backlogs": results,
        "unaligned_largest_over_smallest": largest_over_smallest(results),
        "goal": GOAL,
    }
    print(json.dumps(report) if arguments.json else table(results))


if __name__ == "__main__":
    main()
