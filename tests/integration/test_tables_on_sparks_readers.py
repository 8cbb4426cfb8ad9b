"""Delta and Iceberg tables that a flow publishes, read and maintained meanwhile by Spark's own connectors.

The connectors need a Spark for which they were published, so a PySpark of that version reads, in a process of its own.
The flow runs without Spark: its parts, its storage and its sinks are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cutline.ports.sinks import Sink
from cutline.sinks import Delta
from cutline.testing.servers import jars
from cutline.testing.servers.lifetime import start_child
from tests.support import spark_tables_worker
from tests.support.sink_targets import iceberg
from tests.support.spark_tables_worker import CATALOG, DELTA, ICEBERG
from tests.support.torture_flow import EVENTS, TortureFlow, all_rows, newest_rows, rows_at_epochs, with_totals
from tests.support.version_venvs import folder_with_pyspark

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(jars.why_not(jars.SPARK_TABLES)), reason=jars.why_not(jars.SPARK_TABLES)),
]
#: For which Spark the connectors were published.
SPARK = "4.1"
#: So that every table has been optimised and was published to again, and an old epoch can be restored.
EPOCHS_BEFORE, EPOCHS_AFTER = 6, 6
#: The tables are maintained after the second read.
READS, PAUSE_SECONDS = 5, 0.5


class SparkTables:
    """Spark's own readers, in another process."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder_with_pyspark(SPARK))}
        environment.pop("SPARK_HOME", None)
        command = [sys.executable, spark_tables_worker.__file__, jars.classpath(jars.SPARK_TABLES)]
        self._process: Any
        self._process = start_child(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._process.stdout.readline() == '"ready"\n', "".join(self._said)

    def _listen(self) -> None:
        self._said.extend(self._process.stderr)

    def __call__(self, command: str, *given: Any) -> Any:
        self._process.stdin.write(json.dumps([command, *given]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or json.dumps({"error": "".join(self._said[-30:])}))
        assert "error" not in answer, f"{command} {given}: {answer['error']}"
        return answer["is"]

    def close(self) -> None:
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()
        self._listener.join()
        self._process.stdout.close()
        self._process.stderr.close()


@pytest.fixture(scope="module")
def spark_tables() -> Iterator[SparkTables]:
    tables = SparkTables()
    try:
        yield tables
    finally:
        tables.close()


class Looking(threading.Thread):
    """Reads both tables again and again, and maintains them now and then, while the flow publishes."""

    def __init__(self, tables: SparkTables, places: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(daemon=True)
        self.tables, self.places = tables, places
        self.seen: list[dict[str, list[list[Any]]]] = []
        self.failure: BaseException | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                self.seen.append({name: self.tables("read", *place) for name, place in self.places.items()})
                if len(self.seen) % 4 == 2:
                    for place in self.places.values():
                        self.tables("maintain", *place, True)
        except BaseException as error:  # noqa: BLE001 (raised by ``ended``)
            self.failure = error

    def ended(self) -> list[dict[str, list[list[Any]]]]:
        self._is_over.set()
        self.join()
        if self.failure is not None:
            raise self.failure
        return self.seen


def as_lists(rows: list[Any]) -> list[list[Any]]:
    return sorted(map(list, rows))


@pytest.mark.parametrize("appended", [DELTA, pytest.param(ICEBERG, marks=pytest.mark.soak)])
def test_they_see_whole_epochs_and_may_rewrite_the_files(
    tmp_path: Path, spark_tables: SparkTables, appended: str
) -> None:
    """One table is appended to and the other has one row per key, in both formats."""
    upserted = ICEBERG if appended == DELTA else DELTA
    spark_tables("open_catalog", str(tmp_path))
    places = {
        "events": (appended, str(tmp_path / "events") if appended == DELTA else f"`{CATALOG}`.t.events"),
        "latest": (upserted, str(tmp_path / "latest") if upserted == DELTA else f"`{CATALOG}`.t.latest"),
    }

    def sinks() -> dict[str, Sink]:
        return {
            "events": Delta(tmp_path / "events") if appended == DELTA else iceberg(tmp_path, "t.events"),
            "latest": Delta(tmp_path / "latest", mode="upsert", key=["key"])
            if upserted == DELTA
            else iceberg(tmp_path, "t.latest", mode="upsert", key=["key"]),
        }

    cuts: dict[int, tuple[Any, Any]] = {}

    def publish(flow: TortureFlow, until: int) -> None:
        for _ in range(until):
            flow.step(EVENTS)
            flow.drain()
            cuts.update(rows_at_epochs(tmp_path))

    def now() -> dict[str, list[list[Any]]]:
        return {name: spark_tables("read", *place) for name, place in places.items()}

    flow = TortureFlow(tmp_path, sinks(), only_newest=False, retain_checkpoints=100)
    publish(flow, 1)
    looking = Looking(spark_tables, places)
    looking.start()
    publish(flow, EPOCHS_BEFORE)
    while len(looking.seen) < READS and looking.is_alive():
        publish(flow, 1)
        looking.join(PAUSE_SECONDS)
    seen = looking.ended()
    for place in places.values():
        spark_tables("maintain", *place, False)
    publish(flow, EPOCHS_AFTER)
    flow.stop()
    events = [as_lists(all_rows(count)) for count, _ in cuts.values()]
    latest = [as_lists(newest_rows(with_totals(count))) for _, count in cuts.values()]
    at = {
        "events": [events.index(one["events"]) for one in seen],
        "latest": [latest.index(one["latest"]) for one in seen],
    }
    for order in at.values():
        assert order == sorted(order), "readers never see less than before"
    assert now() == {"events": events[-1], "latest": latest[-1]}

    # What was rewritten since is taken back as if nobody had touched the files.
    wanted = sorted(cuts)[-EPOCHS_AFTER - 2]
    count, seen_then = cuts[wanted]
    flow = TortureFlow(tmp_path, sinks(), only_newest=False, retain_checkpoints=100, restore_to=wanted)
    assert now() == {"events": as_lists(all_rows(count)), "latest": as_lists(newest_rows(with_totals(seen_then)))}
    publish(flow, EPOCHS_AFTER)
    batches = flow.batches()
    flow.stop()
    total = batches * 4
    assert now() == {"events": as_lists(all_rows(total)), "latest": as_lists(newest_rows(with_totals(total)))}
