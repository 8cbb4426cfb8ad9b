"""A query that has failed, or is behind its log and seems idle, is started again, as long as that may help."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cutline.base.outages import Outages
from cutline.config.options import build_options
from cutline.errors import FlowFailedError, NotDone
from cutline.model.ids import FlowName, OperatorId
from cutline.ports.telemetry import NoTelemetry
from cutline.testing.twins.engine import IdleQuery, MemoryEngine
from cutline.worker.query_supervisor import Supervisor


class BehindItsLog(IdleQuery):
    def is_idle(self) -> bool:
        return True


class Engine(MemoryEngine):
    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def start(self, *_: Any) -> BehindItsLog:
        self.started += 1
        return BehindItsLog()


class Watched:
    def __init__(self) -> None:
        self.engine = Engine()
        self.replay = SimpleNamespace(is_repeating=lambda: True, prepare_query=lambda: None, repeated_total=0)
        service = SimpleNamespace(
            operator=OperatorId("o"),
            replay=self.replay,
            spark_checkpoint_dir=Path(),
            handle_batch=None,
            check_ready=lambda: None,
        )
        self.supervisor = Supervisor(
            flow=FlowName("f"),
            service=cast(Any, service),
            engine=self.engine,
            options=build_options({}),
            on_fatal=lambda _: None,
            on_given_up=lambda *_: None,
            metrics=NoTelemetry(),
        )
        self.supervisor._start_query()

    def looks_until_restart(self) -> int:
        before, looks = self.engine.started, 0
        while self.engine.started == before:
            self.supervisor._look_at(self.supervisor.query)
            looks += 1
        return looks


def test_a_query_that_starts_slowly_gets_ever_more_time() -> None:
    watched = Watched()
    looks = [watched.looks_until_restart() for _ in range(4)]
    assert looks == [11, 11, 21, 41]


def test_progress_makes_it_quick_again() -> None:
    watched = Watched()
    for _ in range(4):
        watched.looks_until_restart()
    watched.replay.repeated_total += 1
    watched.looks_until_restart()
    assert watched.looks_until_restart() == 11


# ------------------------------------------------------------------------------------------- failures


class Failed(IdleQuery):
    def __init__(self, error: str) -> None:
        super().__init__()
        self._is_active = False
        self._error = error

    def failure(self) -> str:
        return self._error


class Failing:
    """A supervisor whose query fails with these errors, one after the other; an exception: it cannot be started."""

    def __init__(self, *errors: str | Exception) -> None:
        self._errors = list(errors)
        self.given_up: list[FlowFailedError] = []
        self.fatal: list[BaseException] = []
        self.traces: list[str] = []
        self.outages = Outages("f")
        self.service = SimpleNamespace(
            operator=OperatorId("o"),
            replay=SimpleNamespace(prepare_query=lambda: None, repeated_total=0, is_plan_wrong=lambda: False),
            spark_checkpoint_dir=Path(),
            handle_batch=None,
            check_ready=lambda: None,
            batches_total=0,
            outages=self.outages,
        )
        self.supervisor = Supervisor(
            flow=FlowName("f"),
            service=cast(Any, self.service),
            engine=cast(Any, SimpleNamespace(start=self._start)),
            options=build_options({"restart_limit": 2, "restart_backoff": "1ms"}),
            on_fatal=self.fatal.append,
            on_given_up=lambda _, error: self.given_up.append(error),
            metrics=NoTelemetry(),
            keep_trace=self._keep,
        )

    def _start(self, *_: Any) -> IdleQuery:
        if not self._errors:
            return IdleQuery()
        error = self._errors.pop(0)
        if isinstance(error, Exception):
            raise error
        return Failed(error)

    def _keep(self, operator: OperatorId, text: str) -> str:
        self.traces.append(text)
        return f"traces/{operator}.txt"

    def run(self) -> None:
        """Until the query runs, or is given up."""
        self.supervisor._start_query()
        while (query := self.supervisor.query) is not None and not query.is_active():
            if not self.supervisor._restart(query):
                return


TRACE = """Query failed
Traceback (most recent call last):
  File "shop.py", line 3, in keyed
ValueError: no key
\tat java.Foo(x)
"""
FULL = "java.io.IOException: No space left on device"


def test_a_query_that_never_finishes_a_batch_is_given_up_with_the_root_cause_first() -> None:
    failing = Failing(*[TRACE] * 9)
    failing.run()
    (error,) = failing.given_up
    said = str(error)
    assert said.startswith("ValueError: no key")
    assert "failed 3 times without finishing a batch (flow=f, operator=o)" in said
    assert "whole trace: traces/o.txt" in said
    assert len(said.splitlines()) <= 3
    assert failing.traces == [TRACE] * 3
    assert failing.supervisor.failures() == 3
    assert failing.supervisor.problem == "ValueError: no key (shop.py, line 3, in keyed)"


def test_no_secret_of_an_error_is_shown() -> None:
    failing = Failing(*[TRACE.replace("no key", "no answer from postgresql://bob:hunter2@db/x")] * 9)
    failing.run()
    assert failing.supervisor.problem.startswith("ValueError: no answer from postgresql://***@db/x")
    assert "hunter2" not in str(failing.given_up[0])


def test_a_query_that_lacks_room_is_restarted_as_often_as_needed_and_says_so() -> None:
    failing = Failing(*[FULL] * 9)
    failing.run()
    assert failing.given_up == []
    assert failing.supervisor.failures() == 0, "that is not the operator's failure"
    (waiting,) = failing.outages.waiting()
    assert (waiting.part, waiting.outage.resource, waiting.attempts) == ("query of o", "the disk", 9)
    failing.service.batches_total = 1
    failing.supervisor._note_progress()
    assert failing.outages.waiting() == []


def test_a_query_that_cannot_be_started_for_lack_of_room_is_tried_again() -> None:
    full = OSError(28, "No space left on device")
    failing = Failing(FULL, full, full, full, full)
    failing.run()
    assert failing.given_up == failing.fatal == []
    assert failing.outages.waiting()[0].attempts == 5


def test_a_query_that_cannot_be_started_while_a_store_is_away_is_tried_again() -> None:
    away = NotDone("the store does not answer", store="s3://b")
    failing = Failing(FULL, *[away] * 6)
    failing.run()
    assert failing.given_up == failing.fatal == []
    (waiting,) = failing.outages.waiting()
    assert (waiting.outage.resource, waiting.attempts) == ("s3://b", 7)


def test_a_query_whose_gates_wait_for_room_is_not_started_before_and_nothing_is_counted() -> None:
    """It would not find its gates, and would be given up."""
    failing = Failing()
    problems = [OSError(28, "No space left on device")] * 5

    def check_ready() -> None:
        if problems:
            raise problems.pop()
        ready.set()

    ready = threading.Event()
    failing.service.check_ready = check_ready
    failing.service.replay.is_repeating = lambda: False
    failing.supervisor.start()
    try:
        assert ready.wait(20)
    finally:
        failing.supervisor.stop()
    assert failing.given_up == failing.fatal == []
    assert failing.supervisor.query is not None
