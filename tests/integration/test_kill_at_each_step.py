"""kill -9 at each named step of the protocol, not by luck: every crash point in the code, one after the other.

One flow is killed at one point, comes back, is killed at the next, and so on; in the end it must have published exactly
what a run without faults publishes. In between, whatever readers see is free of duplicates, and no process is left.

Two may be the victim. The Python process is the coordinator with all agents: its JVM then ends by itself. The JVM is
the worker, driver and executors of the queries: Python then notices, says so and ends, having done meanwhile whatever
needs no Spark. ``--log-cli-level=INFO`` shows each kill.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE, POINTS, REACHED, VICTIM_VARIABLE, VICTIMS
from cutline.testing.servers.lifetime import start_child
from tests.support.kill_worker import CARD_ROWS, UPI_ROWS
from tests.support.payments import assert_exactly_once, ledger_ids, published_totals

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.spark, pytest.mark.kill]

MODES = ("aligned", "unaligned", "auto")
PER_OPERATOR = "per-operator"
OPERATORS = ("cards", "upi", "totals")

#: Where most depends on Spark: between staging, log, manifest, sinks and the way back. The other points are passed
#: without Spark in every run (tests/torture), and here with ``make soak``.
SHARPEST = frozenset(
    {
        "after-manifest",
        "sink-commit-half",
    }
)

#: A run that has not reached its point by then never will.
RUN_SECONDS = 180.0
#: So soon after the death of its JVM the Python process has ended; and so soon after its own all that it had started.
NOTICE_SECONDS, LEFTOVER_SECONDS = 30.0, 60.0


@dataclass(frozen=True)
class Step:
    """One kill, and what makes the flow pass the point."""

    crash_at: str
    #: Operators whose live directories are destroyed before, so that there is something to restore.
    damaged: tuple[str, ...] = ()
    #: A person takes the flow back, behind what the sinks have published.
    goes_back: bool = False

    @property
    def point(self) -> str:
        return self.crash_at.partition("#")[0].partition(":")[0]


#: Where a point is passed by several operators or sinks, which pass is meant; early ones and later ones.
SCOPED = {
    "after-stage": "after-stage:totals#2",
    "after-append": "after-append:cards#3",
    "after-barrier": "after-barrier:totals#2",
    "after-pin": "after-pin:totals#1",
    "after-record": "after-record:upi#2",
    "after-ack": "after-ack:totals#1",
    "mid-truncate": "mid-truncate#3",
}
#: Points inside a restore need something to restore: a part of the flow, or all of it.
RESTORING = [
    Step("restore-dirs-built", damaged=("totals",)),
    Step("restore-generation", damaged=OPERATORS),
    Step("sink-rewind-half", goes_back=True),
]
CHAIN = [
    *(Step(SCOPED.get(point, point)) for point in POINTS if point not in {step.point for step in RESTORING}),
    *RESTORING,
]
#: Points that are passed in more than one way.
OTHER_WAYS = [
    Step("sink-commit-begun:totals"),
    Step("sink-commit-half:totals"),
    Step("sink-commit-done:totals"),
    Step("restore-dirs-built", damaged=OPERATORS),
    Step("restore-generation", damaged=("totals",)),
    Step("sink-rewind-half:totals", goes_back=True),
]


@dataclass(frozen=True)
class Ended:
    """How a worker has ended."""

    code: int
    output: str
    #: From the start to the kill, and from there to the end of Python and JVM; None: nobody was killed.
    seconds: tuple[float, float] | None


def processes_of(session: int) -> dict[int, str]:
    """Every process that a worker has started, by the session: Spark's Python daemons have groups of their own."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")[-200:]
    return found


def left_after(session: int, seconds: float) -> list[str]:
    """Wait for the processes of a session to end by themselves; those that have not."""
    deadline = time.monotonic() + seconds
    while living := processes_of(session):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return list(living.values())
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(next(iter(living)))
            try:
                select.select([process], [], [], remaining)
            finally:
                os.close(process)
    return []


def kill_all_of(session: int) -> None:
    for pid in processes_of(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def killed_after(session: int, seconds: float) -> Iterator[threading.Event]:
    """At the end, and at the latest after so long, nothing of the session lives; the event: it was too long."""
    is_late = threading.Event()

    def too_late() -> None:
        is_late.set()
        kill_all_of(session)

    watchdog = threading.Timer(seconds, too_late)
    watchdog.start()
    try:
        yield is_late
    finally:
        watchdog.cancel()
        kill_all_of(session)


def run_worker(
    folder: Path,
    mode: str,
    step: Step | None = None,
    victim: str = "python",
    *,
    module: str = "tests.support.kill_worker",
) -> Ended:
    """Run the flow in a session of its own until it ends, and see that everything else of the session ends too."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(scratch)}
    if step is not None:
        environment |= {ENVIRONMENT_VARIABLE: step.crash_at, VICTIM_VARIABLE: victim}
    back = ["back"] if step is not None and step.goes_back else []
    started_s, reached_s = time.monotonic(), None
    lines = []
    with start_child(
        [sys.executable, "-m", module, str(folder), mode, *back],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as worker:
        assert worker.stdout is not None
        with killed_after(worker.pid, RUN_SECONDS) as is_late:
            for line in worker.stdout:  # to the end of Python and JVM, who both hold the pipe
                lines.append(line)
                if line.startswith(REACHED):
                    reached_s = time.monotonic()
            code = worker.wait()
            seconds = None if reached_s is None else (reached_s - started_s, time.monotonic() - reached_s)
            output = "".join(lines)
            assert not is_late.is_set(), f"not at its end after {RUN_SECONDS} s:\n{ends_of(output)}"
            assert left_after(worker.pid, LEFTOVER_SECONDS) == []
    shutil.rmtree(scratch)
    return Ended(code, output, seconds)


def ends_of(output: str) -> str:
    """The cause stands at the beginning of a Java error, what became of it at the end."""
    return output if len(output) < 6_000 else f"{output[:4_000]}\n…\n{output[-2_000:]}"


def assert_no_duplicates(folder: Path) -> None:
    ids = ledger_ids(folder)
    assert len(ids) == len(set(ids))
    if (folder / "totals" / "_delta_log").exists():
        published_totals(folder)  # asserts that no update is there twice


def kill_at(folder: Path, step: Step, mode: str, victim: str) -> None:
    for operator in step.damaged:
        for live in (folder / "storage" / "payments" / "spark" / operator).iterdir():
            shutil.rmtree(live)
    ended = run_worker(folder, mode, step, victim)
    where = f"{step.crash_at}, {victim}, {mode}"
    assert ended.seconds is not None, f"not reached ({where}):\n{ends_of(ended.output)}"
    before, after = ended.seconds
    log.info("%s: killed after %.1f s, at its end %.1f s later", where, before, after)
    if victim == "python":
        assert ended.code == -signal.SIGKILL, f"{where}:\n{ends_of(ended.output)}"
    else:
        assert ended.code == 1 and "cutline.errors.JvmLostError" in ended.output, f"{where}:\n{ends_of(ended.output)}"
        assert after < NOTICE_SECONDS, where
        if "\nit runs: " in ended.output:
            status = json.loads((folder / "storage" / "payments" / "status.json").read_text())
            assert status["state"] == "failed", where
    assert_no_duplicates(folder)
    log.info("ledger: %d of %d rows", len(ledger_ids(folder)), CARD_ROWS)


def run_to_the_end(folder: Path, mode: str) -> None:
    ended = run_worker(folder, mode)
    assert ended.code == 0, ends_of(ended.output)
    assert_exactly_once(folder, card_rows=CARD_ROWS, upi_rows=UPI_ROWS)


def test_every_point_has_its_step() -> None:
    assert sorted(step.point for step in CHAIN) == sorted(POINTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "points", [pytest.param(SHARPEST, id="sharpest"), pytest.param(frozenset(POINTS), id="all", marks=pytest.mark.soak)]
)
def test_killed_at_each_step_in_turn_it_publishes_exactly_once(tmp_path: Path, points: frozenset[str]) -> None:
    """At every point without Spark: ``tests/unit/sinks/test_torture_…``."""
    steps = [step for step in CHAIN if step.point in points]
    assert len(steps) >= len(points)
    for number, step in enumerate(steps):
        kill_at(tmp_path, step, MODES[number % len(MODES)], VICTIMS[number % len(VICTIMS)])
    run_to_the_end(tmp_path, "auto")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_killed_in_per_operator_mode_it_publishes_exactly_once(tmp_path: Path) -> None:
    """Its own flow: how a flow is checkpointed never changes."""
    steps = [
        Step("after-record:totals#1"),
        Step("after-append:totals#2", damaged=("totals",)),
        Step("sink-commit-half"),
        Step("restore-generation", damaged=OPERATORS),
        Step("after-manifest#2"),
    ]
    for number, step in enumerate(steps):
        kill_at(tmp_path, step, PER_OPERATOR, VICTIMS[number % len(VICTIMS)])
    run_to_the_end(tmp_path, PER_OPERATOR)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [*MODES, PER_OPERATOR])
@pytest.mark.parametrize("victim", VICTIMS)
def test_each_victim_killed_at_each_step_in_each_mode(tmp_path: Path, victim: str, mode: str) -> None:
    for step in [*CHAIN, *OTHER_WAYS]:
        if mode != PER_OPERATOR or not step.goes_back:  # no epoch there is of the whole flow
            kill_at(tmp_path, step, mode, victim)
    run_to_the_end(tmp_path, mode)
