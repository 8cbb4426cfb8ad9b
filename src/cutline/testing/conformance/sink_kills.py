"""Kills that a sink must survive: kill -9 in the middle of a commit or a rewind, in a separate process."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE
from cutline.model.ids import Epoch
from cutline.testing.conformance.sink_case import Case, SinkSuite, rows


class SinkKills(SinkSuite):
    """Kills the sink at each of its crash points."""

    def test_a_commit_that_is_killed_publishes_once_when_repeated(self, tmp_path: Path) -> None:
        for number, point in enumerate(self.commit_crash_points):
            place = tmp_path / str(number)
            place.mkdir()
            case = self.start(place)
            case.publish(1, 0, rows(1))
            staged = [case.stage(1, rows(2, 3), rows(4)), case.stage(2, rows(5))]
            token = case.sink.prepare(Epoch(2), staged)
            permit = case.permit(2, staged)
            self._die(place, point, case, permit=permit, staged=staged, token=token)
            assert self.ids(place) in ([1], [1, 2, 3, 4, 5]), f"half an epoch is visible after {point}"
            case.open(self.make_sink(place))
            case.sink.commit(permit, staged, token)
            assert self.ids(place) == [1, 2, 3, 4, 5], point
            assert case.sink.published() == 2
            case.previous, case.through = Epoch(2), permit.through_batch
            case.publish(3, 3, rows(6))
            assert self.ids(place) == [1, 2, 3, 4, 5, 6], point

    def test_a_rewind_that_is_killed_is_done_when_repeated(self, tmp_path: Path) -> None:
        for number, point in enumerate(self.rewind_crash_points):
            place = tmp_path / str(number)
            place.mkdir()
            case = self.rewindable(place)
            for epoch in (1, 2, 3):
                case.publish(epoch, epoch, rows(epoch))
            self._die(place, point, case, rewind_to=Epoch(1))
            assert self.ids(place) in ([1], [1, 2], [1, 2, 3]), point
            case.open(self.make_sink(place))
            case.sink.rewind(Epoch(1))
            assert self.ids(place) == [1], point
            case.publish(4, 4, rows(4))
            assert self.ids(place) == [1, 4], point

    def _die(self, place: Path, point: str, case: Case, **order: Any) -> None:
        """Carry out the order in another process, which is killed at the point."""
        load = {"file": inspect.getfile(type(self)), "case": type(self).__qualname__, "place": place}
        done = subprocess.run(
            [sys.executable, "-c", "from cutline.testing.conformance.sink_kills import act; act()"],
            input=pickle.dumps({**load, "context": case.context, **order}),
            env={**os.environ, ENVIRONMENT_VARIABLE: point, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, f"the sink never reached {point}: {done.stderr.decode()}"


def act() -> None:
    """In the process that is killed: load the suite's subclass from its file, then commit or rewind as ordered."""
    order = pickle.loads(sys.stdin.buffer.read())
    spec = importlib.util.spec_from_file_location("cutline_conformance_case", order["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite: SinkSuite = getattr(module, order["case"])()
    sink = suite.make_sink(order["place"])
    sink.open(order["context"])
    if "rewind_to" in order:
        sink.rewind(order["rewind_to"])
    else:
        sink.commit(order["permit"], order["staged"], order["token"])
