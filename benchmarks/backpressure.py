"""How long a checkpoint takes while a backlog waits in a channel: unaligned, aligned, and aligned with a time limit.

The flow: a fast source, a channel with room for the backlog, and a consumer that sleeps for every row and reads only a
few entries per batch. After its first batches the consumer is held, inside a batch, until the channel is full and the
source waits for room: the worst case of back-pressure. For each backlog:

unaligned   the median of several checkpoints: must not depend on the backlog
auto        one checkpoint with a time limit on the alignment: that limit, then as unaligned
aligned     the consumer resumes, at its slow pace, and one checkpoint waits for the whole backlog, or is aborted

Each run takes the backlogs in the given order and then in reverse, so that a drift of the machine does not look like an
effect of the backlog; in reverse it takes only unaligned checkpoints.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline import Flow
from cutline.errors import CheckpointFailedError
from cutline.sinks import Parquet

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from cutline.ports.metadata import EpochOutcome
    from cutline.runtime.handle import RunningFlow

#: The consumer's pace while it works, without the fixed cost of a batch.
CONSUMER_ROWS_PER_SECOND = 100_000
ENTRIES_PER_READ = 4
#: A payment takes four columns of eight bytes, and a segment has a header.
BYTES_PER_ROW = 35
ALIGNMENT_LIMIT_MS = 500
#: Long enough for the smallest backlog, too short for the largest.
CHECKPOINT_TIMEOUT = "40s"
WARM_UP_CHECKPOINTS = 5
PAUSE_SECONDS = 0.1
GOAL = 1.5


def slow_pass(hold: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Pass rows unchanged, at the consumer's pace; none while the file ``hold`` exists."""
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
        # One task: it must not occupy every core while it sleeps.
        return rows.coalesce(1).mapInArrow(slow_pass(str(hold)), rows.schema)

    flow.sink(slow, Parquet(str(folder / "out")))
    return flow


def start(folder: Path, hold: Path, rows: int, entry_rows: int) -> RunningFlow:
    return build(folder, hold, entry_rows).start(
        storage=str(folder / "storage"),
        checkpoint_interval=0,
        checkpoint_timeout=CHECKPOINT_TIMEOUT,
        alignment_timeout=f"{ALIGNMENT_LIMIT_MS}ms",
        channel_capacity_entries=-(-rows // entry_rows),
        channel_capacity_bytes="1024GB",
        max_batch_bytes=ENTRIES_PER_READ * entry_rows * BYTES_PER_ROW,
    )


def wait_until(condition: Callable[[], bool], seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)


def fill(run: RunningFlow, hold: Path, rows: int) -> None:
    """Let the consumer run some batches, then hold it until the backlog blocks the source."""

    def is_full() -> bool:
        source = run.status().operators["fast"]
        return bool(source.backlog_rows["slow"] >= rows and source.waiting_for_room)

    begun = time.monotonic()
    wait_until(lambda: run.status().operators["slow"].batches >= 2)
    hold.touch()
    wait_until(is_full)
    print(f"{rows:,} rows wait after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def take(run: RunningFlow, mode: str) -> EpochOutcome:
    """Take one checkpoint and return its record in the history: complete or aborted."""
    try:
        run.trigger_checkpoint(mode=mode)
    except CheckpointFailedError as error:
        print(f"{mode}: {error}", file=sys.stderr, flush=True)
    return run.checkpoints(1)[0]


def take_unaligned(run: RunningFlow, mode: str, rows: int) -> EpochOutcome:
    """Take one that must complete before the consumer reaches its barrier, with the backlog in its record."""
    time.sleep(PAUSE_SECONDS)
    outcome = take(run, mode)
    if outcome.details.get("unaligned_operators") != ["slow"] or outcome.details["in_flight_rows"] < rows:
        raise RuntimeError(f"not an unaligned checkpoint over {rows} rows: {outcome}")
    return outcome


def duration_ms(outcome: EpochOutcome) -> int:
    return outcome.ended_ms - outcome.started_ms


@contextlib.contextmanager
def backlogged(rows: int, entry_rows: int) -> Iterator[tuple[RunningFlow, Path]]:
    """Start a new flow with a waiting backlog; return it and the file that holds its consumer."""
    folder = Path(tempfile.mkdtemp(prefix="cutline-backpressure-"))
    hold = folder / "hold"
    try:
        run = start(folder, hold, rows, entry_rows)
        try:
            fill(run, hold, rows)
            for _ in range(WARM_UP_CHECKPOINTS):
                take_unaligned(run, "unaligned", rows)
            yield run, hold
        finally:
            hold.unlink(missing_ok=True)
            run.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(sizes: list[int], repeat: int, entry_rows: int) -> list[dict[str, Any]]:
    """Take every backlog: first with checkpoints of every mode, then in reverse with unaligned ones."""
    unaligned: dict[int, list[EpochOutcome]] = {rows: [] for rows in sizes}
    auto: dict[int, EpochOutcome] = {}
    aligned: dict[int, EpochOutcome] = {}
    for rows in [*sizes, *reversed(sizes[:-1])]:
        with backlogged(rows, entry_rows) as (run, hold):
            unaligned[rows] += [take_unaligned(run, "unaligned", rows) for _ in range(repeat)]
            if rows not in aligned:
                auto[rows] = take_unaligned(run, "auto", rows)
                hold.unlink()
                aligned[rows] = take(run, "aligned")
    return [summary(rows, unaligned[rows], auto[rows], aligned[rows]) for rows in sizes]


def summary(rows: int, unaligned: list[EpochOutcome], auto: EpochOutcome, aligned: EpochOutcome) -> dict[str, Any]:
    durations = [duration_ms(outcome) for outcome in unaligned]
    # Durations are few and in whole milliseconds: this median interpolates between them.
    median = round(statistics.median_grouped(durations), 2)
    return {
        "rows": rows,
        "in_flight_rows": min(outcome.details["in_flight_rows"] for outcome in unaligned),
        "in_flight_entries": min(outcome.details["in_flight_entries"] for outcome in unaligned),
        "unaligned_ms": durations,
        "unaligned_median_ms": median,
        "auto_ms": duration_ms(auto),
        "auto_beyond_limit_ms": duration_ms(auto) - ALIGNMENT_LIMIT_MS,
        "auto_unaligned_operators": auto.details["unaligned_operators"],
        # For an aborted one: the time until the abort, which is a lower bound.
        "aligned_ms": duration_ms(aligned),
        "aligned_completed": aligned.outcome == "completed",
        "aligned_abort_reason": aligned.reason,
        "aligned_over_unaligned": round(duration_ms(aligned) / max(median, 1), 1),
    }


def largest_over_smallest(results: list[dict[str, Any]]) -> float:
    """Return the unaligned median for the largest backlog as a multiple of that for the smallest."""
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
    parser.add_argument("--repeat", type=int, default=25, help="unaligned checkpoints per backlog and direction")
    parser.add_argument("--entry-rows", type=int, default=20_000, help="rows per entry of the channel")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    results = measure(arguments.rows, arguments.repeat, arguments.entry_rows)
    report = {
        "entry_rows": arguments.entry_rows,
        "backlogs": results,
        "unaligned_largest_over_smallest": largest_over_smallest(results),
        "goal": GOAL,
    }
    print(json.dumps(report) if arguments.json else table(results))


if __name__ == "__main__":
    main()
