"""A flow without Spark that runs for the length of a block, and what tests say of its rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.sparkless import TOTALS, SparklessFlow


@contextmanager
def running(storage: Path, *, kind: type[SparklessFlow] = SparklessFlow, **settings: Any) -> Iterator[SparklessFlow]:
    flow = kind(storage, **settings)
    try:
        yield flow
    finally:
        flow.stop()


def assert_each_once(rows: list[list[int]]) -> None:
    assert rows == [[number, number + 1] for number in range(len(rows))]


def drained(flow: SparklessFlow, name: str, **more: Any) -> Any:
    """``totals`` reads on meanwhile."""
    done: list[Any] = []

    def take() -> None:
        try:
            done.append(flow.run.savepoint(name, **more))
        except Exception as error:  # noqa: BLE001 (handed to the test)
            done.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    flow.wait(lambda: bool(done) or (not flow.step(TOTALS) and bool(done)))
    thread.join()
    if isinstance(done[0], Exception):
        raise done[0]
    return done[0]
