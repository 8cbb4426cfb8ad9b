"""From Kafka through three operators into Kafka, on real Spark and a real broker, with kill -9 of every part of it.

What counts is what a reader of committed messages sees: never a row or an update twice, in the end every one of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutline.base.crashpoints import VICTIMS
from cutline.testing.servers.kafka import KafkaCluster
from tests.integration.test_kill_at_each_step import MODES, PER_OPERATOR, Step, ends_of, run_worker
from tests.support.kafka_kill_worker import FLOW, OPERATORS, topics_of
from tests.support.kafka_target import SERVERS, ledger_of, make_topic, records_of
from tests.support.kafka_topics import Topic

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.spark, pytest.mark.kill]

#: A long chain of kills must not run out of rows.
FEW_ROWS, MANY_ROWS = 2_500, 12_000
MERCHANTS, PARTITIONS = 7, 3
STEPS = [
    Step("after-append:checked#3"),
    Step("after-barrier:totals#2"),
    Step("after-manifest"),
    Step("sink-commit-begun:rows"),
    Step("sink-commit-half:rows"),
    Step("sink-commit-half:totals"),
    Step("sink-commit-done:totals"),
    Step("restore-generation", damaged=("totals",)),
    Step("restore-dirs-built", damaged=OPERATORS),
]
WORKER = "tests.support.kafka_kill_worker"


@contextlib.contextmanager
def topics(folder: Path, servers: str, rows: int) -> Iterator[None]:
    """The input is complete before the flow begins: batches are limited, so that they are many."""
    source, *targets = topics_of(folder)
    for name in (source, *targets):
        make_topic(servers, name, partitions=PARTITIONS)
    make_topic(servers, ledger_of(folder), cleanup_policy="compact")
    for partition in range(PARTITIONS):
        payments = ({"id": one, "merchant": f"shop-{one % MERCHANTS}"} for one in range(partition, rows, PARTITIONS))
        Topic(servers, source).publish(map(json.dumps, payments), partition=partition)
    yield
    for name in (source, *targets, ledger_of(folder)):
        Topic(servers, name).remove()


def committed(folder: Path, servers: str) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """The ids of all rows, and the newest total of each merchant; fails if anything is there twice."""
    _, rows, totals = topics_of(folder)
    ids = [int(json.loads(one.value or b"")["id"]) for one in records_of(servers, rows)]
    assert len(ids) == len(set(ids)), [one for one, times in Counter(ids).items() if times > 1][:10]
    updates: list[dict[str, Any]] = [json.loads(one.value or b"") for one in records_of(servers, totals)]
    times = Counter((one["merchant"], one["payments"]) for one in updates)
    assert max(times.values(), default=1) == 1, "an update was published twice"
    newest: dict[str, tuple[int, int]] = {}
    for one in updates:  # all of a merchant's are in one partition, in their order
        assert one["payments"] > newest.get(one["merchant"], (0, 0))[0], "out of order"
        newest[one["merchant"]] = (one["payments"], one["ids"])
    return ids, newest


def kill_at(folder: Path, servers: str, step: Step, mode: str, victim: str) -> None:
    for operator in step.damaged:
        for live in (folder / "storage" / FLOW / "spark" / operator).iterdir():
            shutil.rmtree(live)
    ended = run_worker(folder, mode, step, victim, module=WORKER)
    where = f"{step.crash_at}, {victim}, {mode}"
    assert ended.seconds is not None, f"not reached ({where}):\n{ends_of(ended.output)}"
    assert ended.code == (-signal.SIGKILL if victim == "python" else 1), f"{where}:\n{ends_of(ended.output)}"
    ids, _ = committed(folder, servers)
    log.info("%s: killed after %.1f s; %d rows are committed", where, ended.seconds[0], len(ids))


def run_to_the_end(folder: Path, servers: str, mode: str, rows: int) -> None:
    ended = run_worker(folder, mode, module=WORKER)
    assert ended.code == 0, ends_of(ended.output)
    ids, newest = committed(folder, servers)
    assert sorted(ids) == list(range(rows))
    assert newest == {
        f"shop-{one}": (len(range(one, rows, MERCHANTS)), sum(range(one, rows, MERCHANTS))) for one in range(MERCHANTS)
    }


@pytest.mark.timeout(400)
def test_killed_in_mid_commit_every_row_is_committed_once(
    tmp_path: Path, kafka_cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVERS, kafka_cluster.servers)
    with topics(tmp_path, kafka_cluster.servers, FEW_ROWS):
        kill_at(tmp_path, kafka_cluster.servers, Step("sink-commit-half:rows#2"), "auto", "python")
        run_to_the_end(tmp_path, kafka_cluster.servers, "auto", FEW_ROWS)


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("mode", [*MODES, PER_OPERATOR])
def test_killed_at_each_step_and_with_the_broker_every_row_is_committed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    if KafkaCluster.why_not():
        pytest.skip(KafkaCluster.why_not())
    cluster = KafkaCluster()
    try:
        cluster.start()
        monkeypatch.setenv(SERVERS, cluster.servers)
        with topics(tmp_path, cluster.servers, MANY_ROWS):
            for number, step in enumerate(STEPS):
                kill_at(tmp_path, cluster.servers, step, mode, VICTIMS[number % len(VICTIMS)])
                if number % 3 == 1:
                    cluster.restart()
            run_to_the_end(tmp_path, cluster.servers, mode, MANY_ROWS)
    finally:
        cluster.remove()
