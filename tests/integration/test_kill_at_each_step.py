"""kill -9 at each named step of the protocol, not by luck: every crash point in the code, one after the other.

One flow is killed at one point, comes back, is killed at the next, and so on; in the end it must have published exactly
what a run without faults publishes. In between, whatever readers see is free of duplicates.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.crashpoints import ENVIRONMENT_VARIABLE, POINTS
from tests.support.kill_worker import CARD_ROWS, UPI_ROWS
from tests.support.payments import assert_exactly_once, ledger_ids, published_totals

pytestmark = [pytest.mark.spark, pytest.mark.kill, pytest.mark.timeout(900)]

#: Points inside a restore need something to restore from.
RESTORE_POINTS = ("restore-dirs-built", "restore-generation")
#: Needs a sink that is ahead of the epoch restored; see test_a_kill_in_the_middle_of_a_rewind.
REWIND_POINTS = ("sink-rewind-half",)

#: Where the point is passed by several operators or sinks, which pass is meant; early ones and later ones.
SCOPED = {
    "after-stage": "after-stage:totals#2",
    "after-append": "after-append:cards#3",
    "after-barrier": "after-barrier:totals#2",
    "after-pin": "after-pin:totals#1",
    "after-record": "after-record:upi#2",
    "after-ack": "after-ack:totals#1",
    "mid-truncate": "mid-truncate#3",
}
CHAIN = [SCOPED.get(point, point) for point in POINTS if point not in (*RESTORE_POINTS, *REWIND_POINTS)]


def run_worker(folder: Path, mode: str, crash_at: str = "") -> tuple[int, str]:
    """Run the flow in a process group of its own; after a crash the whole group is killed, JVM and workers included."""
    environment = {**os.environ, ENVIRONMENT_VARIABLE: crash_at} if crash_at else dict(os.environ)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.kill_worker", str(folder), mode],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as worker:
        try:
            # Ends when the pipe is closed by all: after a crash that is when the JVM has noticed that Python is gone.
            output, _ = worker.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        return worker.wait(), output


def ends_of(output: str) -> str:
    """The cause stands at the beginning of a Java error, what became of it at the end."""
    return output if len(output) < 6_000 else f"{output[:4_000]}\n…\n{output[-2_000:]}"


def assert_no_duplicates(folder: Path) -> None:
    ids = ledger_ids(folder)
    assert len(ids) == len(set(ids))
    if (folder / "totals" / "_delta_log").exists():
        published_totals(folder)  # asserts that no update is there twice


def test_killed_at_each_step_in_turn_it_publishes_exactly_once(tmp_path: Path) -> None:
    for number, crash_at in enumerate(CHAIN):
        mode = ("aligned", "unaligned", "auto")[number % 3]
        code, output = run_worker(tmp_path, mode, crash_at)
        assert code == -signal.SIGKILL, f"{crash_at} was not reached in mode {mode}:\n{ends_of(output)}"
        assert_no_duplicates(tmp_path)
    for crash_at in RESTORE_POINTS:
        for live in (tmp_path / "storage" / "payments" / "spark" / "totals").iterdir():
            shutil.rmtree(live)
        code, output = run_worker(tmp_path, "auto", crash_at)
        assert code == -signal.SIGKILL, f"{crash_at} was not reached:\n{ends_of(output)}"
        assert_no_duplicates(tmp_path)
    code, output = run_worker(tmp_path, "auto")
    assert code == 0, ends_of(output)
    assert_exactly_once(tmp_path, card_rows=CARD_ROWS, upi_rows=UPI_ROWS)
