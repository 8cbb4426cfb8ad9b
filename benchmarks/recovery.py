"""How long a flow is down when its process is killed: from ``kill -9`` to the first newly published row.

plain     Spark restarts one query with its own checkpoint (``foreachBatch``, Parquet)
resume    Cutline, the same query as a flow of one operator; storage as it was left
local     the live Spark directories are missing; the flow is restored to the newest checkpoint on this host
remote    the whole storage is missing; the flow is restored from the remote tier

All have a count and a sum per key, the same session settings and the same input files. Each kill comes a moment after a
file with changed keys, so a batch is running, and one more file waits for the next process. The benchmark takes two
times, both from the kill on: until new rows are visible, and until the row of that last file is visible.
A kill hits the whole group (Python, JVM, workers), and the next process starts immediately.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.model.ids import FlowName
from cutline.model.layout import Layout

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import DataFrame, SparkSession

FLOW = FlowName("recovery")
SCENARIOS = {"plain": ("plain",), "cutline": ("resume", "local", "remote")}
GOALS = {"resume": 1.0, "local": 1.5}
LOAD_ROWS = 250_000
SUBTASKS = 2
#: Time between a file with changes and the kill.
BATCH_BEGUN_SECONDS = 0.3
LOOK_SECONDS = 0.02
DEADLINE_SECONDS = 240.0
#: Short, so that there is a RocksDB snapshot to restore, and changelogs after it.
MAINTENANCE = {"spark.sql.streaming.stateStore.maintenanceInterval": "5s"}


# ------------------------------------------------------------------------------------------------- the worker


def totals_of(spark: SparkSession, folder: Path) -> DataFrame:
    from pyspark.sql import functions as F

    files = spark.readStream.schema("key long, amount long").option("maxFilesPerTrigger", 1)
    rows = files.parquet(str(folder / "in"))
    return rows.groupBy("key").agg(F.count("*").alias("changes"), F.sum("amount").alias("amount"))


def work(kind: str, folder: Path, remote: str, options: dict[str, str], interval: str) -> None:
    """One process; records the time of each step in ``steps``."""
    steps = folder / "steps"

    def reached(step: str, **more: Any) -> None:
        with open(steps, "a", encoding="utf-8") as file:
            file.write(json.dumps({"pid": os.getpid(), "step": step, "at": time.time(), **more}) + "\n")

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("cutline").setLevel(logging.INFO)
    from cutline.config.spark_settings import SparkStart
    from cutline.spark.session import open_session

    reached("python")
    spark = open_session(FLOW, None, SparkStart(settings=MAINTENANCE))
    reached("session")
    if kind == "plain":
        work_plain(spark, folder, reached)
    else:
        work_cutline(spark, folder, reached, {"remote": remote, "remote_options": options}, interval)


def work_plain(spark: SparkSession, folder: Path, reached: Callable[..., None]) -> None:
    from cutline.spark.session import query_session

    # The settings that Cutline gives its queries.
    own = query_session(spark, state_backend="rocksdb-changelog", subtasks=SUBTASKS, is_local_dir=True)
    query = (
        totals_of(own, folder)
        .writeStream.outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .foreachBatch(lambda frame, _: frame.write.mode("append").parquet(str(folder / "out")))
        .start()
    )
    reached("started")
    while query.lastProgress is None:
        time.sleep(LOOK_SECONDS)
    reached("batch")
    query.awaitTermination()


def work_cutline(
    spark: SparkSession, folder: Path, reached: Callable[..., None], remote: dict[str, Any], interval: str
) -> None:
    from cutline import Flow
    from cutline.sinks import Parquet

    flow = Flow(FLOW)

    @flow.operator(subtasks=SUBTASKS)
    def totals(spark: SparkSession) -> DataFrame:
        return totals_of(spark, folder)

    flow.sink(totals, Parquet(str(folder / "out")), output_mode="update")
    run = flow.start(spark=spark, storage=str(folder / "storage"), checkpoint_interval=interval, **remote)
    reached("started", path=run.status().recovery.path)
    while run.status().operators["totals"].batches == 0:
        time.sleep(LOOK_SECONDS)
    reached("batch")
    run.await_termination()


# ------------------------------------------------------------------------------------------------- its parent


class Subject:
    """One kind of process, its files, and its visible output."""

    def __init__(self, kind: str, folder: Path, remote: str, options: dict[str, str], interval: str) -> None:
        import numpy as np

        self._kind = kind
        self._folder = folder
        self._command = [sys.executable, __file__, "--worker", kind, "--folder", str(folder), "--interval", interval]
        self._command += ["--remote-url", remote, "--remote-options", json.dumps(options)]
        self._rng = np.random.default_rng(1)
        self._files = 0
        self._markers = 0
        self._visible: set[Path] = set()
        self._layout = Layout(folder / "storage", FLOW)
        (folder / "in").mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None

    def load(self, keys: int, changes: int) -> None:
        """Write the input before the first kill: all keys, and some changes to them."""
        import numpy as np

        self.start()
        for first in range(0, keys, LOAD_ROWS):
            self._feed(np.arange(first, min(first + LOAD_ROWS, keys)))
        self.settle()
        for _ in range(changes):
            self.change(keys)
            self.settle()
        self.kill()

    def start(self) -> None:
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def change(self, keys: int) -> None:
        self._feed(self._rng.choice(keys, max(keys // 100, 1), replace=False))

    def settle(self) -> None:
        """Wait until the row of a new file is visible and the remote tier is up to date."""
        marker = self._mark()
        self._wait(lambda: marker in self._new_keys())
        if self._kind == "cutline":
            self._wait(self._is_copied)

    def _is_copied(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            status = json.loads(self._layout.status.read_bytes())
            published = max(sink["published_epoch"] for sink in status["sinks"].values())
            return bool(status["remote"]["epoch"] >= published)
        return False

    def come_back(self, scenario: str) -> dict[str, Any]:
        """Kill it, remove what the scenario says, start it; return how long until it publishes."""
        self._new_keys()
        killed = time.time()
        self.kill()
        self._lose(scenario)
        marker = self._mark()
        self.start()
        assert self._process is not None
        pid, spawned = self._process.pid, time.time()
        keys: set[int] = set()

        def look() -> set[int]:
            keys.update(self._new_keys())
            return keys

        self._wait(lambda: bool(look()))
        first = time.time()
        self._wait(lambda: marker in look())
        steps = {step["step"]: step for step in self._steps() if step["pid"] == pid}
        return {
            "scenario": scenario,
            "path": steps["started"].get("path", "plain"),
            "first_s": round(first - killed, 2),
            "last_s": round(time.time() - killed, 2),
            "spawned_s": round(spawned - killed, 2),
            # The start of the session is Spark's own and the same for all: the rest compares better.
            "after_session_s": round(first - steps["session"]["at"], 2),
            "load": os.getloadavg()[0],
            **{f"{name}_s": round(step["at"] - killed, 2) for name, step in steps.items()},
        }

    def _lose(self, scenario: str) -> None:
        # Renamed now, deleted later: the time of the deletion must not count.
        lost = {"local": self._layout.root / "spark", "remote": self._folder / "storage"}.get(scenario)
        if lost is not None:
            lost.rename(self._folder / f"lost-{self._files}")

    def _mark(self) -> int:
        import numpy as np

        self._markers += 1
        self._feed(np.array([-self._markers]))
        return -self._markers

    def _feed(self, keys: np.ndarray) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        temporary = self._folder / "in" / f".{self._files}"
        pq.write_table(pa.table({"key": keys, "amount": self._rng.integers(1, 10_000, len(keys))}), temporary)
        temporary.rename(self._folder / "in" / f"{self._files:06d}.parquet")
        self._files += 1

    def _new_keys(self) -> set[int]:
        """Return the keys in published files that are new since the last call."""
        import pyarrow.parquet as pq

        keys: set[int] = set()
        for path in published_files(self._folder / "out"):
            if path not in self._visible:
                keys.update(pq.read_table(path, columns=["key"], partitioning=None).column("key").to_pylist())
                self._visible.add(path)
        return keys

    def _steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._folder / "steps").read_text().splitlines()]

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._folder / "log").read_text(errors="replace")[-3000:])
            time.sleep(LOOK_SECONDS)


def published_files(folder: Path) -> list[Path]:
    """Skip names that begin with an underscore or a dot: they belong to a writer and may disappear."""
    found: list[Path] = []
    for path in folder.iterdir() if folder.exists() else ():
        if not path.name.startswith(("_", ".")):
            found += path.rglob("*.parquet") if path.is_dir() else [path] if path.suffix == ".parquet" else []
    return found


def measure(arguments: argparse.Namespace, folder: Path, remote: str, options: dict[str, str]) -> list[dict[str, Any]]:
    subjects = {kind: Subject(kind, folder / kind, remote, options, arguments.interval) for kind in SCENARIOS}
    results = []
    try:
        for kind, subject in subjects.items():
            begun = time.monotonic()
            subject.load(arguments.keys, arguments.changes)
            print(f"{kind}: loaded after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        for _ in range(arguments.repeat):
            # Alternately, so that a drift of the machine affects all of them; one process at a time.
            for kind, subject in subjects.items():
                subject.start()
                for scenario in SCENARIOS[kind]:
                    subject.settle()
                    subject.change(arguments.keys)
                    time.sleep(BATCH_BEGUN_SECONDS)
                    results.append(subject.come_back(scenario))
                    print(results[-1], file=sys.stderr, flush=True)
                subject.kill()
    finally:
        for subject in subjects.values():
            subject.kill()
    return results


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians over the rounds, and ratios to plain Spark."""
    names = ("first_s", "after_session_s", "last_s", "python_s", "session_s", "started_s", "batch_s")
    rows = []
    for scenario in (name for names_of_kind in SCENARIOS.values() for name in names_of_kind):
        of_it = [item for item in results if item["scenario"] == scenario]
        medians = {name: round(statistics.median(item[name] for item in of_it), 2) for name in names}
        rows.append({"scenario": scenario, "paths": sorted({item["path"] for item in of_it}), **medians})
    for row in rows:
        row["over_plain"] = round(row["first_s"] / rows[0]["first_s"], 2)
        row["over_plain_after_session"] = round(row["after_session_s"] / rows[0]["after_session_s"], 2)
        row["goal"] = GOALS.get(row["scenario"])
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = ["scenario (way taken)", "first new row", "over plain (goal)", "without session start", "last row"]
    head += ["Python", "session", "started", "batch"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        goal = f" (≤ {row['goal']})" if row["goal"] else ""
        cells = [
            f"{row['scenario']} ({', '.join(row['paths'])})",
            f"{row['first_s']:.1f} s",
            f"{row['over_plain']:.2f}{goal}",
            f"{row['over_plain_after_session']:.2f}",
            *(f"{row[f'{name}_s']:.1f} s" for name in ("last", "python", "session", "started", "batch")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--changes", type=int, default=8, help="files with 1 %% of the keys each before the first kill")
    parser.add_argument("--repeat", type=int, default=2, help="rounds of kills")
    parser.add_argument("--interval", default="1s", help="time between Cutline's checkpoints, which publish")
    parser.add_argument("--s3", action="store_true", help="the remote tier is a real S3 server on loopback")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--worker", choices=tuple(SCENARIOS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--remote-url", help=argparse.SUPPRESS)
    parser.add_argument("--remote-options", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if arguments.worker:
        work(arguments.worker, arguments.folder, arguments.remote_url, arguments.remote_options, arguments.interval)
        return
    # The end of this process also ends its workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="cutline-recovery-"))
    server = None
    try:
        remote, options = str(folder / "remote"), {}
        if arguments.s3:
            from cutline.testing.servers.s3 import S3Server

            server = S3Server()
            server.start()
            remote, options = server.fresh_url(), server.options
        results = measure(arguments, folder, remote, options)
    finally:
        if server is not None:
            server.remove()
        if arguments.keep:
            print(f"logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    rows = summary(results)
    print(json.dumps({"keys": arguments.keys, "summary": rows, "kills": results}) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
