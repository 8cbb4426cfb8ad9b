"""From a real NATS server through real Spark and back: killed on the way, every message counts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import generate_latest

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE
from cutline.connectors.nats.reader import read_published
from cutline.errors import LostInputError
from cutline.testing.servers.nats import NatsServer
from tests.support.nats_worker import IN, OUT, build, settings
from tests.support.streams import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[NatsServer]:
    own = NatsServer()
    own.start()
    yield own
    own.remove()


def changes(url: str) -> list[dict[str, int]]:
    """What a consumer has read."""
    epochs = read_published(url, OUT, flow="relay", sink="out")
    return [json.loads(message.data) for epoch in epochs for message in epoch.rows]


def newest(url: str) -> dict[int, tuple[int, int]]:
    """Key → (count, sum), by its newest change."""
    return {row["key"]: (row["count"], row["sum"]) for row in sorted(changes(url), key=lambda row: row["count"])}


def truth(numbers: Any) -> dict[int, tuple[int, int]]:
    found = list(numbers)
    return {key: (len(own), sum(own)) for key in range(5) if (own := [number for number in found if number % 5 == key])}


def work(url: str, folder: Path, crash_at: str = "") -> int:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)]),
        ENVIRONMENT_VARIABLE: crash_at,
    }
    command = [sys.executable, "-m", "tests.support.nats_worker", url, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.kill
@pytest.mark.soak
def test_from_a_stream_to_a_stream_with_kills_on_the_way(server: NatsServer, tmp_path: Path) -> None:
    with Stream(server.url, IN) as stream:
        stream.publish_many(b"%d" % number for number in range(200))
    assert work(server.url, tmp_path, "after-append:sums#2") == -signal.SIGKILL
    server.restart()
    assert work(server.url, tmp_path, "sink-commit-half:out") == -signal.SIGKILL
    assert work(server.url, tmp_path) == 0
    assert newest(server.url) == truth(range(200))
    times = Counter((row["key"], row["count"]) for row in changes(server.url))
    assert set(times.values()) == {1}, "a change was published twice"


def test_dropped_input_is_refused_by_its_range_or_given_up(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    def begin(**options: Any) -> Any:
        return build(server.url, tmp_path).start(spark=spark, **(settings(tmp_path) | options))

    with Stream(server.url, IN) as stream:
        stream.publish_many(b"%d" % number for number in range(60))
        run = begin()
        run.process_all_available()
        epoch = run.trigger_checkpoint()
        stream.publish_many(b"%d" % number for number in range(60, 100))
        run.process_all_available()
        run.trigger_checkpoint()
        run.stop()
        stream.purge(below=81)
        with pytest.raises(LostInputError, match="stream IN: sequences 61 to 80"):
            begin(restore_to=epoch)
        run = begin(restore_to=epoch, missing_input="continue")
        (lost,) = run.status().recovery.lost_input
        assert (lost.what, lost.parts) == ("stream IN: sequences 61 to 80", 20)
        assert b'flow="relay",operator="numbers"} 20.0' in generate_latest(run.metrics.registry)
        stream.publish_many(b"%d" % number for number in range(100, 110))
        run.process_all_available()
        run.stop()
    last: dict[int, tuple[int, int]] = {}
    for row in changes(server.url):
        last[row["key"]] = (row["count"], row["sum"])
    assert last == truth([*range(60), *range(80, 110)])


def test_a_flow_that_goes_back_before_its_first_batch_begins_where_it_began(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    """Spark asks anew where "latest" is: all that was published since would be passed over."""

    def begin(**options: Any) -> Any:
        return build(server.url, tmp_path, start="latest").start(spark=spark, **(settings(tmp_path) | options))

    with Stream(server.url, IN) as stream:
        stream.publish_many(b"%d" % number for number in range(7))
        run = begin()
        epoch = run.trigger_checkpoint()
        run.process_all_available()
        stream.publish_many(b"%d" % number for number in range(7, 30))
        run.process_all_available()
        run.stop()
        run = begin(restore_to=epoch)
        stream.publish_many(b"%d" % number for number in range(30, 40))
        run.process_all_available()
        run.trigger_checkpoint()
        run.stop()
    assert newest(server.url) == truth(range(7, 40))
