"""One flow on two hosts that publish to the same server: PostgreSQL tables, a JetStream stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cutline.connectors.nats.reader import read_published
from cutline.ports.sinks import Sink
from cutline.sinks import JetStream
from cutline.testing.servers.nats import NatsServer
from cutline.testing.servers.postgres import PostgresServer
from tests.support.hosts import Kind, Story, Worker, a_worker
from tests.support.postgres_tables import reader
from tests.support.torture_flow import EVENTS, FLOW, LATEST, Row
from tests.torture.test_torture_jetstream import row_of

pytestmark = [pytest.mark.kill, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with a_worker() as one:
        yield one


@pytest.mark.parametrize("seed", [1, *(pytest.param(number, marks=pytest.mark.soak) for number in range(2, 12))])
def test_tables_of_one_database(tmp_path: Path, postgres_server: PostgresServer, worker: Worker, seed: int) -> None:
    dsn = postgres_server.fresh_database()
    with reader(dsn) as read:

        def view(_: Path) -> Mapping[str, Sequence[Row]]:
            return read() or {EVENTS: [], LATEST: []}

        Story(
            seed=seed,
            folder=tmp_path / "story",
            kind=Kind(make="tests.support.postgres_tables:make_sinks", read=view, only_newest=True),
            worker=worker,
            has_remote=seed % 3 != 0,
            settings={"durable": "remote"} if seed % 3 == 2 else {},
            config={"dsn": dsn},
        ).run(6)


def make_streams(config: dict[str, Any]) -> dict[str, Sink]:
    return {
        name: JetStream(config["url"], f"HOSTS_{name}", f"HOSTS_{name}.rows", staging=Path(config["folder"], name))
        for name in (EVENTS, LATEST)
    }


def published(url: str, name: str) -> list[Row]:
    epochs = read_published(url, f"HOSTS_{name}", flow=FLOW, sink=f"{name}-out")
    return [row_of(message.data) for epoch in epochs for message in epoch.rows]


def test_failover_and_failback_with_a_stream_that_cannot_be_rewound(tmp_path: Path, worker: Worker) -> None:
    """Nothing is published that the remote tier does not have, so that a new host has nothing to rewind."""
    server = NatsServer()
    server.start()

    def view(_: Path) -> Mapping[str, Sequence[Row]]:
        return {name: published(server.url, name) for name in (EVENTS, LATEST)}

    try:
        two = Story(
            seed=5,
            folder=tmp_path / "story",
            kind=Kind(make=f"{__name__}:make_streams", read=view),
            worker=worker,
            has_remote=True,
            settings={"durable": "remote"},
            config={"url": server.url},
        )
        assert two.live("a"), two.story()
        two.check(is_settled=True)
        assert two.live("b"), two.story()
        two.check(is_settled=True)
        assert not two.live("a", rejoin=False, takes_ways_out=False), two.story()
        assert "another storage has taken this flow over" in two.story()
        two.check(is_settled=True)
        assert two.live("a", rejoin=True), two.story()
        two.check(is_settled=True)
    finally:
        server.stop()
