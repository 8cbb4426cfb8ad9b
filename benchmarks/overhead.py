"""The cost of Cutline: the demo pipeline in rows per second, as plain chained Spark queries and on Cutline.

(a) plain: four Spark queries chained through Spark's own Parquet file sink and source
(b) cutline: the same pipeline on Cutline, without checkpoints
(c) cutline-1s: the same with a checkpoint every second

Each variant runs several times, alternately, in its own process; figures are ratios of medians within one run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VARIANTS = ("plain", "cutline", "cutline-1s")
#: Rates are measured from here to the end, so that they exclude start-up.
WARM_SHARE = 0.3


def measure(total_rows: int, rows_done: Callable[[], int], deadline_s: float = 600) -> float:
    """Rows per second between the warm-up share and the end."""
    warm_at: tuple[float, int] | None = None
    begun = time.monotonic()
    while True:
        done, now = rows_done(), time.monotonic()
        if warm_at is None and done >= total_rows * WARM_SHARE:
            warm_at = (now, done)
        if done >= total_rows and warm_at is not None:
            return (done - warm_at[1]) / (now - warm_at[0])
        if now - begun > deadline_s:
            raise TimeoutError(f"{done} of {total_rows} rows")
        time.sleep(0.2)


def source(spark: SparkSession, first: int, rows: int, arguments: argparse.Namespace) -> DataFrame:
    return (
        spark.readStream.format("cutline_generator")
        .options(first=first, rows=rows, keys=arguments.keys, seed=1, rows_per_batch=arguments.batch)
        .load()
    )


def union(cards: DataFrame, upi: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    both = cards.withColumn("channel", F.lit("card")).union(upi.withColumn("channel", F.lit("upi")))
    return both.withColumn("is_large", F.col("amount") > 9_000)


def sums(payments: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return payments.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("amount").alias("amount"))


def run_cutline(arguments: argparse.Namespace, folder: Path, interval: str) -> float:
    from cutline import Flow
    from cutline.sinks import Delta

    flow = Flow("overhead")
    cards_rows = int(arguments.rows * 0.7)

    @flow.operator()
    def cards(spark: SparkSession) -> DataFrame:
        return source(spark, 0, cards_rows, arguments)

    @flow.operator()
    def upi(spark: SparkSession) -> DataFrame:
        return source(spark, cards_rows, arguments.rows - cards_rows, arguments)

    @flow.operator(inputs=[cards, upi])
    def payments(cards: DataFrame, upi: DataFrame) -> DataFrame:
        return union(cards, upi)

    @flow.operator(inputs=[payments], subtasks=2)
    def totals(payments: DataFrame) -> DataFrame:
        return sums(payments)

    flow.sink(totals, Delta(str(folder / "totals")), output_mode="update")
    run = flow.start(storage=str(folder / "storage"), checkpoint_interval=interval)

    def done() -> int:
        item = run.status().operators["payments"]
        return item.rows - item.backlog_rows["totals"]

    rate = measure(arguments.rows, done)
    print({name: item.batches for name, item in run.status().operators.items()}, file=sys.stderr)
    run.stop()
    return rate


def run_plain(arguments: argparse.Namespace, folder: Path) -> float:
    from pyspark.sql.streaming.listener import StreamingQueryListener

    from cutline.connectors.generator.spark_reader import GeneratorSource
    from cutline.spark.session import open_session, query_session

    root = open_session("plain", None)
    # The settings that Cutline gives its queries, so that only the connection between queries differs.
    spark = query_session(root, state_backend="rocksdb-changelog", subtasks=2, is_local_dir=True)
    spark.dataSource.register(GeneratorSource)
    cards_rows = int(arguments.rows * 0.7)
    counted = [0]

    class Counter(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None: ...
        def onQueryIdle(self, event: Any) -> None: ...
        def onQueryTerminated(self, event: Any) -> None: ...
        def onQueryProgress(self, event: Any) -> None:
            if event.progress.name == "totals":
                counted[0] += event.progress.numInputRows

    spark.streams.addListener(Counter())

    def to_files(frame: DataFrame, name: str) -> Any:
        return (
            frame.writeStream.queryName(name)
            .format("parquet")
            .option("checkpointLocation", str(folder / "ck" / name))
            .start(str(folder / name))
        )

    def from_files(name: str, schema: Any) -> DataFrame:
        (folder / name).mkdir(exist_ok=True)
        return spark.readStream.schema(schema).parquet(str(folder / name))

    cards = source(spark, 0, cards_rows, arguments)
    upi = source(spark, cards_rows, arguments.rows - cards_rows, arguments)
    queries = [to_files(cards, "cards"), to_files(upi, "upi")]
    merged = union(from_files("cards", cards.schema), from_files("upi", upi.schema))
    queries.append(to_files(merged, "payments"))
    queries.append(
        sums(from_files("payments", merged.schema))
        .writeStream.queryName("totals")
        .outputMode("update")
        .option("checkpointLocation", str(folder / "ck" / "totals"))
        .foreachBatch(lambda frame, _: frame.write.mode("append").parquet(str(folder / "totals")))
        .start()
    )
    rate = measure(arguments.rows, lambda: counted[0])
    for query in queries:
        query.stop()
    return rate


def child(arguments: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="cutline-overhead-"))
    try:
        if arguments.variant == "plain":
            rate = run_plain(arguments, folder)
        else:
            rate = run_cutline(arguments, folder, "1s" if arguments.variant == "cutline-1s" else "0s")
        print(json.dumps({"rate": rate}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6_000_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=200_000, help="maximum rows per batch of a source")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        child(arguments)
        return
    rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(arguments.repeat):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--variant", variant, "--rows", str(arguments.rows)]
            command += ["--keys", str(arguments.keys), "--batch", str(arguments.batch)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            rate = json.loads(done.stdout.splitlines()[-1])["rate"]
            rates[variant].append(rate)
            print(f"run {number + 1}  {variant:<11} {rate:>12,.0f} rows/s", file=sys.stderr, flush=True)
    median = {variant: statistics.median(values) for variant, values in rates.items()}
    print(
        json.dumps(
            {
                "rows": arguments.rows,
                "keys": arguments.keys,
                "rows_per_second": {variant: round(value) for variant, value in median.items()},
                "cutline_vs_plain": round(median["cutline"] / median["plain"], 3),
                "checkpoints_vs_off": round(median["cutline-1s"] / median["cutline"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
