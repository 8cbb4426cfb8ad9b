"""The JetStream sink under kill -9 at every step and at random, of flow and server, with a reader beside it."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cutline.connectors.nats.ledger import EPOCH_HEADER
from cutline.connectors.nats.reader import read_published
from cutline.errors import NotDone
from cutline.ports.sinks import Sink
from cutline.sinks import JetStream
from cutline.testing.servers.nats import NatsServer
from tests.support.sink_torture import View, each_number_of_kills, steps_for, torture
from tests.support.streams import Stream
from tests.support.torture_flow import Row

pytestmark = [pytest.mark.kill, pytest.mark.timeout(600)]

STREAM = "TORTURE"
NAMES = ("events", "latest")
#: Every look connects anew and has consumers made; more of them would only take the flow's time.
_PAUSE_SECONDS = 0.2


def make_jetstream(config: dict[str, Any]) -> dict[str, Sink]:
    """Both into one stream. Small batches, so that an epoch takes several."""
    return {
        name: JetStream(config["url"], STREAM, f"{STREAM}.{name}", staging=config["staging"], batch_messages=40)
        for name in NAMES
    }


class Reader:
    """A consumer that goes on from what it has kept."""

    def __init__(self, url: str, flow: str) -> None:
        self._url = url
        self._flow = flow
        self._rows: dict[str, list[Row]] = {name: [] for name in NAMES}
        self._after = dict.fromkeys(NAMES, 0)

    def read(self) -> View | None:
        time.sleep(_PAUSE_SECONDS)
        with contextlib.suppress(NotDone):  # the server is being started again
            for name in NAMES:
                epochs = read_published(self._url, STREAM, flow=self._flow, sink=f"{name}-out", after=self._after[name])
                for epoch in epochs:
                    self._rows[name] += [row_of(message.data) for message in epoch.rows]
                    self._after[name] = epoch.sequence
            return {name: list(rows) for name, rows in self._rows.items()}
        return None


def row_of(data: bytes) -> Row:
    row = json.loads(data)
    return row["id"], row["key"], row["value"]


@each_number_of_kills
def test_jetstream_survives_torture(tmp_path: Path, kills: int) -> None:
    server = NatsServer()
    server.start()
    try:
        config = {"url": server.url, "staging": str(tmp_path / "staging")}
        subjects = [f"{STREAM}.>", f"_cutline.{STREAM}.>"]

        def before_life(number: int) -> None:
            if number % 7 == 3:
                server.restart()

        # So short a window that the server itself recognises nothing.
        with Stream(server.url, STREAM, subjects=subjects, allow_atomic=True, duplicate_window=0.1) as stream:
            report = torture(
                f"{__name__}:make_jetstream",
                config,
                Reader(server.url, "torture").read,
                folder=tmp_path / "flow",
                seed=3,
                kills=kills,
                points=steps_for(kills),
                can_rewind=False,
                before_life=before_life,
            )
            # Also a reader who knows nothing of epochs has seen every row once.
            rows = Counter(
                (one.subject, one.data) for one in stream.messages() if one.headers and EPOCH_HEADER in one.headers
            )
            assert set(rows.values()) == {1} and len(rows) == 2 * report.rows
        assert report.killed >= 7 + kills and report.states > 5, report
    finally:
        server.remove()
