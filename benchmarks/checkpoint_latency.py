"""Trigger-to-manifest time of a flow of many operators under steady input, unaligned and aligned.

The flow: two sources, a map on each, a union, then alternately keyed totals and maps in a chain, a sink at the end. The
depth of the graph (longest path from a source) bounds an aligned checkpoint: one batch time per level.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline import Flow
from cutline.sinks import Parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def build(operators: int, rate: int, folder: Path) -> Flow:
    from pyspark.sql import functions as F

    flow = Flow("latency")

    def source(spark: SparkSession, seed: int) -> DataFrame:
        generator = spark.readStream.format("cutline_generator")
        return generator.options(keys=1000, seed=seed, rows_per_second=rate, rows_per_batch=rate * 5).load()

    @flow.operator()
    def left(spark: SparkSession) -> DataFrame:
        return source(spark, 1)

    @flow.operator()
    def right(spark: SparkSession) -> DataFrame:
        return source(spark, 2)

    @flow.operator(inputs=[left])
    def left_map(rows: DataFrame) -> DataFrame:
        return rows.select("merchant", "amount")

    @flow.operator(inputs=[right])
    def right_map(rows: DataFrame) -> DataFrame:
        return rows.select("merchant", "amount")

    @flow.operator(inputs=[left_map, right_map])
    def merged(left: DataFrame, right: DataFrame) -> DataFrame:
        return left.union(right)

    last = merged
    for number in range(operators - 5):
        if number % 2 == 0:

            @flow.operator(f"totals_{number}", inputs=[last], subtasks=2, output_mode="update")
            def totals(rows: DataFrame) -> DataFrame:
                return rows.groupBy("merchant").agg(F.sum("amount").alias("amount"))

            last = totals
        else:

            @flow.operator(f"map_{number}", inputs=[last])
            def mapped(rows: DataFrame) -> DataFrame:
                return rows.where("amount > 0")

            last = mapped
    flow.sink(last, Parquet(str(folder / "out")))
    return flow


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 1),
        "p99": round(ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)], 1),
        "max": round(ordered[-1], 1),
        "count": len(ordered),
    }


def depth(flow: Flow) -> int:
    depths: dict[str, int] = {}
    for node in flow.graph().operators:
        depths[node.operator] = 1 + max((depths[name] for name in node.inputs), default=0)
    return max(depths.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=10)
    parser.add_argument("--rate", type=int, default=2_000, help="rows per second and source")
    parser.add_argument("--unaligned", type=int, default=60, help="unaligned checkpoints to take")
    parser.add_argument("--aligned", type=int, default=15, help="aligned checkpoints to take")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cutline-latency-"))
    report: dict[str, Any] = {"operators": arguments.operators}
    try:
        flow = build(arguments.operators, arguments.rate, folder)
        run = flow.start(storage=str(folder / "storage"), checkpoint_interval=0)
        # Steady means: every operator has run several batches.
        while min(item.batches for item in run.status().operators.values()) < 5:
            time.sleep(0.5)
        for mode, count in (("unaligned", arguments.unaligned), ("aligned", arguments.aligned)):
            epochs = set()
            for number in range(count):
                epochs.add(run.trigger_checkpoint(mode=mode, timeout="120s"))
                print(f"\r{mode} {number + 1}/{count}", end="", file=sys.stderr, flush=True)
                time.sleep(0.2)
            print(file=sys.stderr)
            durations = [item.details["duration_ms"] for item in run.checkpoints(10_000) if item.epoch in epochs]
            report[f"{mode}_ms"] = percentiles(durations)
        batch_ms = [item.batch_ms for item in run.status().operators.values()]
        report["batch_ms_median"] = round(statistics.median(batch_ms), 1)
        report["depth"] = depth(flow)
        report["aligned_p50_in_batch_times_per_level"] = round(
            report["aligned_ms"]["p50"] / report["batch_ms_median"] / report["depth"], 2
        )
        run.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
