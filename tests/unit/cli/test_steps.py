"""The steps of a start, as a table that changes and as plain lines."""

from __future__ import annotations

import contextlib
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from cutline.cli.steps import Steps
from cutline.ports.progress import NoProgress, Progress, Step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def screen(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None, legacy_windows=False)


def drawn(steps: Steps, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(steps)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert all(len(line) <= width for line in lines)
    return lines


@pytest.mark.parametrize("make", [NoProgress, lambda: Steps("starting", list(Step), console=None)])
def test_anything_may_be_told_at_any_time_by_any_thread(make: type[NoProgress]) -> None:
    progress: Progress = make()

    def tell_all(number: int) -> None:
        progress.add_bytes(number)
        progress.tell("early", 10)
        for step in Step:
            progress.begin(step)
            progress.tell(f"{number}", 1_000)
            progress.add_bytes(500)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tell_all, range(20)))


def test_the_table_shows_what_is_done_what_runs_and_what_comes() -> None:
    clock = Clock()
    steps = Steps("starting", list(Step), console=screen(80), monotonic=clock)
    steps.begin(Step.FLOW, "payments.py")
    clock.now += 1.2
    steps.begin(Step.JAVA)
    steps.tell("17.0.15")
    clock.now += 2.5
    steps.begin(Step.RECOVERY)
    steps.tell("remote, epoch 812", 412_500_000)
    steps.add_bytes(100_000_000)
    steps.add_bytes(20_000_000)
    clock.now += 0.4
    steps.name("log: cutline-data/payments/traces/run.log")
    title, flow, java, recovery, *rest = drawn(steps)
    assert title.startswith("starting") and "Ctrl-C" in title
    assert flow == "✓ flow     1.2 s payments.py"
    assert java == "✓ Java     2.5 s 17.0.15"
    assert recovery.endswith("recovery 0.4 s remote, epoch 812, 120.0 MB of 412.5 MB")
    assert [one.strip() for one in rest] == ["recovery", "queries", "log: cutline-data/payments/traces/run.log"]


def test_without_a_terminal_every_step_is_a_line_and_the_last_says_how_long_each_took() -> None:
    clock, said = Clock(), list[str]()
    with Steps("starting", list(Step), console=None, say=said.append, monotonic=clock) as steps:
        steps.begin(Step.FLOW, "payments.py")
        clock.now += 1.0
        steps.begin(Step.RECOVERY)
        steps.tell("local, epoch 7", 2_000)
        clock.now += 0.5
    assert said == [
        "starting: flow (payments.py)",
        "starting: recovery",
        "starting: done in 1.5 s (flow 1.0 s, recovery 0.5 s); flow: payments.py; recovery: local, epoch 7, 2.0 kB",
    ]


def fail_in(steps: Steps) -> None:
    with contextlib.suppress(ValueError), steps:
        steps.begin(Step.SPARK, "local[*]")
        raise ValueError("no")


def test_a_start_that_fails_says_no_summary_and_leaves_the_table_on_the_screen() -> None:
    said = list[str]()
    fail_in(Steps("starting", [], console=None, say=said.append))
    assert said == ["starting: Spark (local[*])"]
    console = screen(80)
    fail_in(Steps("starting", [], console=console))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "local[*]" in shown.split("\x1b[2K")[-1]
    assert "✗" in shown.split("\x1b[2K")[-1] and "✓" not in shown.split("\x1b[2K")[-1], "it did not end well"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is hidden for good"
