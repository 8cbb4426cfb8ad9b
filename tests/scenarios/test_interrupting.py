"""``cutline run`` ends at a batch boundary when it is interrupted, whatever it waits for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.cli.run import _follow
from cutline.errors import FlowFailedError
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_until_done_that_waits_for_a_slow_operator_is_interrupted(tmp_path: Path, number: int) -> None:
    flow = SparklessFlow(tmp_path)
    flow.step(NUMBERS)  # nothing reads it: the input is never processed
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    _follow(flow.run, None, until_done=True, as_json=False)
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_run_until_done_ends_with_the_error_that_ended_the_flow(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.step(NUMBERS)
    error = FlowFailedError("its disk is lost", flow="counting", operator=TOTALS)
    threading.Timer(0.3, flow.run._lifecycle.fail, (error,)).start()
    with pytest.raises(FlowFailedError, match="its disk is lost"):
        _follow(flow.run, None, until_done=True, as_json=False)
