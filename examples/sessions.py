"""Clicks in, sessions out: transformWithState with event-time timers on RocksDB state.

    cutline run examples/sessions.py --until-done     # or: python examples/sessions.py

A session is published after 30 minutes of event time without a click. INPUT_DIR and OUTPUT_DIR: other folders.
"""

# ruff: noqa: N802, N803 (Spark's names)
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from cutline import Flow, sinks

GAP_MS = 30 * 60 * 1000
SESSION = "first_ms long, last_ms long, clicks long"


class Sessions(StatefulProcessor):
    """The open sessions of a user: several, while clicks arrive out of order."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle, self.open = handle, handle.getListState("open", SESSION)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        sessions: list[tuple[int, int, int]] = []
        for first, last, clicks in sorted([*self.open.get(), *((row.ms, row.ms, 1) for row in rows)]):
            goes_on = sessions and first - sessions[-1][1] < GAP_MS
            begun, ended, before = sessions.pop() if goes_on else (first, last, 0)
            sessions.append((begun, max(ended, last), before + clicks))
            self.handle.registerTimer(max(ended, last) + GAP_MS)
        self.open.put(sessions)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        sessions = list(self.open.get())
        self.open.clear()
        for session in sessions:
            if session[1] + GAP_MS <= expiredTimerInfo.getExpiryTimeInMs():
                yield Row(user=key[0], first_ms=session[0], last_ms=session[1], clicks=session[2])
            else:  # the session continued after this timer was set, and has a later one
                self.open.appendValue(session)


def build(input_dir: Path, output_dir: Path) -> Flow:
    flow = Flow("sessions")

    @flow.operator()
    def clicks(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("user string, page string, clicked_at timestamp").csv(str(input_dir))

    @flow.operator(inputs=[clicks], subtasks=2)
    def sessions(clicks: DataFrame) -> DataFrame:
        clicks = clicks.withWatermark("clicked_at", "10 minutes").withColumn("ms", F.unix_millis("clicked_at"))
        return clicks.groupBy("user").transformWithState(Sessions(), f"user string, {SESSION}", "Append", "EventTime")

    flow.sink(sessions, sinks.Parquet(output_dir), name="sessions")
    return flow


def write_samples(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        clicks = (f"{user},/home,2026-03-01T{at}:00Z\n" for user in "ab" for at in ("10:10", "10:20", "15:00"))
        (folder / "samples.csv").write_text("".join(clicks))


INPUT = Path(os.environ.get("INPUT_DIR", "cutline-data/examples/sessions/input"))
write_samples(INPUT)
flow = build(INPUT, Path(os.environ.get("OUTPUT_DIR", "cutline-data/examples/sessions/output")))

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
