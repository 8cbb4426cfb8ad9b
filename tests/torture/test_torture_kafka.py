"""The Kafka sink under kill -9 at every step and at random, of flow and broker, with readers beside it."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from cutline.connectors.kafka.client import bounds_of, consumer, finished_bounds, partitions_of, read_range
from cutline.connectors.kafka.ledger import LEDGER_TOPIC, LedgerTopic
from cutline.connectors.reading import read
from cutline.errors import NotDone
from cutline.ports.sinks import Sink
from cutline.sinks import Kafka
from cutline.testing.servers.kafka import KafkaCluster
from tests.support.sink_torture import View, steps_for, torture
from tests.support.torture_flow import ROWS_PER_BATCH, Row

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.kill, pytest.mark.timeout(1_200)]

NAMES = ("events", "latest")
PARTITIONS = 3
#: Every look connects anew; more of them would only take the flow's time.
_PAUSE_SECONDS = 0.2


def make_sinks(config: dict[str, Any]) -> dict[str, Sink]:
    """A topic for each, and one for both ledgers."""
    return {
        name: Kafka(config["servers"], name, key="key", staging=config["staging"], timeout_s=20.0) for name in NAMES
    }


class Reader:
    """A consumer of whole epochs, and beside it one that knows only ``read_committed``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._servers: str = config["servers"]
        self._sinks = make_sinks(config)
        self._rows: dict[str, list[Row]] = {name: [] for name in NAMES}
        self._after = dict.fromkeys(NAMES, 0)
        #: Per topic and partition, how many messages it held at each look.
        self.counts: dict[tuple[str, int], set[int]] = defaultdict(set)
        #: Per topic, partition and epoch, where the epoch ends.
        self.ends: dict[tuple[str, int], set[int]] = defaultdict(set)

    def read(self) -> View | None:
        time.sleep(_PAUSE_SECONDS)
        with contextlib.suppress(NotDone):  # the broker is being started again
            self._look_at_partitions()
            self._note_cuts()
            for name in NAMES:
                found = read(self._sinks[name], after=self._after[name] or None, name=f"{name}-out")
                rows = [row_of(value) for value in found.to_arrow()["value"].to_pylist()]
                self._rows[name] += rows
                self._after[name] = found.epoch
            return {name: list(rows) for name, rows in self._rows.items()}
        return None

    def _look_at_partitions(self) -> None:
        for topic in NAMES:
            for partition, messages in partitions_now(self._servers, topic).items():
                self.counts[topic, partition].add(len(messages))

    def _note_cuts(self) -> None:
        for held in LedgerTopic(self._servers, LEDGER_TOPIC).load_all(timeout_s=10.0):
            for cut in held.cuts.values():
                for partition, end in cut.ends.items():
                    self.ends[held.ledger.topic, int(partition)].add(end)


def partitions_now(servers: str, topic: str) -> dict[int, list[tuple[int, bytes]]]:
    """Offsets and values that a ``read_committed`` reader sees in each partition."""
    found = {}
    with consumer(servers) as client:
        for partition in partitions_of(client, servers, topic) or ():
            bounds = bounds_of(client, servers, topic, partition)
            pages = read_range(client, servers, topic, partition, bounds)
            found[partition] = [(one.offset, one.value or b"") for page in pages for one in page]
    return found


def row_of(data: bytes) -> Row:
    row = json.loads(data)
    return row["id"], row["key"], row["value"]


@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.soak)])
def test_kafka_survives_torture(tmp_path: Path, kills: int) -> None:
    if KafkaCluster.why_not():
        pytest.skip(KafkaCluster.why_not())
    cluster = KafkaCluster()
    try:
        cluster.start()
        for name in NAMES:
            cluster.fresh_topic(name=name, partitions=PARTITIONS)
        cluster.fresh_topic(name=LEDGER_TOPIC, cleanup_policy="compact")
        config = {"servers": cluster.servers, "staging": str(tmp_path / "staging")}
        reader, restarts = Reader(config), 0

        def before_life(number: int) -> None:
            nonlocal restarts
            if number % 7 == 3:
                cluster.restart()
                restarts += 1

        report = torture(
            f"{__name__}:make_sinks",
            config,
            reader.read,
            folder=tmp_path / "flow",
            seed=5,
            kills=kills,
            points=steps_for(kills),
            can_rewind=False,
            before_life=before_life,
        )
        log.info("%s; %d kills of the broker", report, restarts)
        assert restarts and report.killed >= 7 + kills and report.states > 3, report
        _check_partitions(cluster.servers, reader, report.rows)
    finally:
        cluster.remove()


def _check_partitions(servers: str, reader: Reader, rows: int) -> None:
    for topic in NAMES:
        for partition in range(PARTITIONS):
            with consumer(servers) as client:  # the last marker may still be on its way
                finished_bounds(client, servers, topic, partition, timeout_s=30.0)
        partitions = partitions_now(servers, topic)
        # A reader who knows nothing of epochs has seen every row once.
        values = Counter(value for messages in partitions.values() for _, value in messages)
        assert set(values.values()) == {1} and len(values) == rows
        for partition, messages in partitions.items():
            # No partition ever showed a part of an epoch.
            whole = {0} | {sum(offset < end for offset, _ in messages) for end in reader.ends[topic, partition]}
            seen = reader.counts[topic, partition]
            assert seen <= whole, f"{topic}, partition {partition}: {sorted(seen - whole)} messages are no whole epoch"
            batches = [json.loads(value)["id"] // ROWS_PER_BATCH for _, value in messages]
            assert topic == "latest" or batches == sorted(batches), f"partition {partition}: out of order"
