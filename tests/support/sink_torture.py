"""Kills a small flow over and over, at every step and at random, while somebody reads what its sinks publish.

    def make_files(config):                       # in an importable module; runs in the process that is killed
        return {"events": Parquet(config["folder"] + "/e"), "latest": Parquet(config["folder"] + "/l")}

    def read():                                   # what a reader sees now; None: nothing could be read, ask again
        return {"events": [(id, key, value), …], "latest": [(id, key, value), …]}

    torture("tests.torture.test_torture_files:make_files", {"folder": …}, read, folder=tmp_path / "flow")

The flow is ``tests.support.torture_flow``: ``events`` publishes every row once, ``latest`` each row with its key's
running total (with ``only_newest`` one row per key and batch, for a sink that upserts by ``key``). However often it was
killed and taken back, a reader must see exactly what belongs to one complete checkpoint: never a part of one, nothing
twice, and nothing may vanish unless a person takes the flow back. With ``same_epoch`` ``read`` gives one consistent
view (one transaction), and both tables must be of one checkpoint.

Tests take ``each_number_of_kills``: a few random ones with ``make test``, 30 with ``make soak``.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cutline.base.crashpoints import POINTS
from cutline.testing.servers.lifetime import start_child
from tests.support.torture_flow import EVENTS, LATEST, Cut, Row, all_rows, newest_rows, rows_at_epochs, with_totals

#: Passed only when a person takes the flow back.
_BACK_POINTS = frozenset({"sink-rewind-half", "restore-dirs-built"})
_SINK_POINTS = frozenset({"sink-commit-begun", "sink-commit-half", "sink-commit-done", "sink-rewind-half"})
_LIFE_SECONDS = 90.0
_READ_PAUSE_SECONDS = 0.03

#: At random moments, beside one at each step.
each_number_of_kills = pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.soak)])
#: With ``make test``, of a sink that is slow: the steps that are its own. Those of the flow are passed with others.
_SINK_STEPS = (*sorted(_SINK_POINTS), "after-sink-commits", "restore-generation")


def steps_for(kills: int) -> Sequence[str]:
    return POINTS if kills >= 30 else _SINK_STEPS


#: For a sink that another test tortures with ``make test`` too.
only_in_soak = pytest.mark.parametrize("kills", [pytest.param(30, marks=pytest.mark.soak)])

#: Per operator, the rows that a reader sees now.
View = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How one process is to live. Killed at a point, or after so many seconds from when it says ``since``."""

    rollback: bool
    crash_at: str = ""
    since: str = "pid"
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """What has happened, for people and for tests that want to be sure that something did."""

    killed: int = 0
    rollbacks: int = 0
    #: Looks at the tables, and how many different states they showed.
    looks: int = 0
    states: int = 0
    epochs: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Reader:
    """Looks all the while. What it finds wrong at once is kept; which states are right is known only later."""

    read: Callable[[], View | None]
    only_newest: bool
    wrong: list[str] = field(default_factory=list)
    looks: int = 0
    #: (rows of events, rows of latest) → the look that first showed it.
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    #: Grows whenever a rollback is over. While one may be under way rows may vanish.
    era: int = 0
    may_vanish: bool = False
    _floor: tuple[int, int] = (0, 0)
    _floor_era: int = 0

    def look(self) -> tuple[int, int] | None:
        era, may_vanish = self.era, self.may_vanish
        view = self.read()
        if view is None:
            return None
        self.looks += 1
        counts = (self._count(EVENTS, view[EVENTS]), self._count(LATEST, view[LATEST]))
        self.states.setdefault(counts, self.looks)
        if may_vanish or self.may_vanish or era != self.era or era != self._floor_era:
            self._floor, self._floor_era = (0, 0), era
        elif counts[0] < self._floor[0] or counts[1] < self._floor[1]:
            self.wrong.append(f"rows vanished: {self._floor} before, {counts} now (look {self.looks})")
        if not may_vanish:
            self._floor = counts
        return counts

    def _count(self, operator: str, rows: Sequence[Row]) -> int:
        """How many of the flow's rows it must have been to make the table look so."""
        count = max((row[0] for row in rows), default=-1) + 1
        expected = self.expected(operator, count)
        if sorted(rows) != expected:
            surplus, missing = sorted(set(rows) - set(expected))[:5], sorted(set(expected) - set(rows))[:5]
            self.wrong.append(
                f"look {self.looks}: {operator} has {len(rows)} rows instead of {len(expected)} up to id {count - 1}; "
                f"wrong: {surplus}, missing: {missing}"
            )
        return count

    def expected(self, operator: str, count: int) -> list[Row]:
        if operator == EVENTS:
            return all_rows(count)
        return newest_rows(with_totals(count)) if self.only_newest else with_totals(count)

    @contextmanager
    def looking(self) -> Iterator[None]:
        is_over = threading.Event()

        def run() -> None:
            try:
                while not is_over.wait(_READ_PAUSE_SECONDS) and not self.wrong:
                    self.look()
            except Exception as error:  # noqa: BLE001 (it ends the thread; the test must hear of it)
                self.wrong.append(f"the reader failed: {error!r}")

        thread = threading.Thread(target=run, name="torture-reader")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class Worker:
    """The process that starts the lives, and what it says."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root), str(root / "src"), *filter(None, sys.path)])
        self._process = start_child(
            [sys.executable, "-m", "tests.support.torture_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="torture-worker")
        self._thread.start()
        self.hear(_LIFE_SECONDS)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The next thing it says, or None if it says nothing for so long."""
        try:
            return self._said.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class _Torture:
    def __init__(self, worker: Worker, reader: _Reader, order: dict[str, Any], folder: Path) -> None:
        self._worker, self._reader, self._order, self._folder = worker, reader, order, folder
        self.report = Report()
        #: Epoch → rows of each operator at its cut, of every checkpoint there ever was.
        self.epochs: dict[int, Cut] = {}

    def live(self, life: Life, seed: int, *, more: int | None = None) -> None:
        """Start it, kill it in time, and hear what became of it."""
        if life.rollback:
            self._reader.may_vanish = True
        self._worker.order(**self._order, crash_at=life.crash_at, rollback=life.rollback, seed=seed, more=more)
        pid, kill_at, status = 0, None, None
        deadline = time.monotonic() + _LIFE_SECONDS
        while status is None:
            said = self._worker.hear((kill_at or deadline) - time.monotonic())
            if said is None:
                assert kill_at is not None, f"nothing ends {life}"
                os.kill(pid, signal.SIGKILL)
                kill_at = None
                continue
            pid, status = said.get("pid", pid), said.get("ended")
            if life.since in said and not life.crash_at and more is None:
                kill_at = time.monotonic() + life.seconds
            if "running" in said and self._reader.may_vanish:
                # What was to be taken back is taken back; from here on everything stays.
                self._reader.may_vanish = life.rollback
                self._reader.era += 1
            self.report.rollbacks += "rolling_back_to" in said
        self._ended(life, status, is_last=more is not None)

    def _ended(self, life: Life, status: int, *, is_last: bool) -> None:
        error = self._folder / "error"
        assert not error.exists(), f"{life} failed:\n{error.read_text()}"
        if not is_last:
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{life} ended with {status}"
            self.report.killed += 1
        notes = self._folder / "epochs.jsonl"
        for line in notes.read_text().splitlines() if notes.exists() else ():
            # The last line may be cut short by the kill; its checkpoint is still there then.
            if line.endswith("]"):
                epoch, events, latest = json.loads(line)
                self.epochs[epoch] = (events, latest)
        self.epochs.update(rows_at_epochs(self._folder, but=self.epochs))
        assert not self._reader.wrong, f"during or before {life}: {self._reader.wrong}"

    def check_states(self, *, same_epoch: bool) -> None:
        """Everything that was ever seen belongs to a checkpoint: a part of one would show another number of rows."""
        pairs = {(0, 0), *self.epochs.values()}
        # In per-operator mode a checkpoint is of one of them.
        events, latest = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
        for state, look in self._reader.states.items():
            is_right = state in pairs if same_epoch else state[0] in events and state[1] in latest
            assert is_right, f"look {look}: {state} are the rows of no checkpoint; there were {sorted(pairs)}"


def lives(chance: random.Random, kills: int, points: Sequence[str], *, can_rewind: bool) -> list[Life]:
    """One life for each point (and sink), and so many that end at random moments, in random order."""
    found = []
    for point in points:
        if point in _BACK_POINTS and not can_rewind:
            continue
        for scope in (f":{EVENTS}-out", f":{LATEST}-out") if point in _SINK_POINTS else ("",):
            times = 1 if point in _BACK_POINTS or point.startswith("restore") else chance.randint(1, 4)
            found.append(Life(rollback=point in _BACK_POINTS, crash_at=f"{point}{scope}#{times}"))
    if can_rewind and "restore-generation" in points:
        # Every start passes it; the second time it is the start that takes the flow back.
        found.append(Life(rollback=True, crash_at="restore-generation#2"))
    for _ in range(kills):
        rollback = can_rewind and chance.random() < 0.3
        since = chance.choice(("pid", "running", "rolling_back_to") if rollback else ("pid", "running"))
        found.append(Life(rollback=rollback, since=since, seconds=chance.uniform(0.0, 0.4)))
    chance.shuffle(found)
    return found


def torture(
    make: str,
    config: dict[str, Any],
    read: Callable[[], View | None],
    *,
    folder: Path,
    kills: int,
    seed: int = 1,
    points: Sequence[str] = POINTS,
    only_newest: bool = False,
    same_epoch: bool = False,
    can_rewind: bool = True,
    before_life: Callable[[int], None] = lambda _: None,
    **settings: Any,
) -> Report:
    """See above. ``make`` is ``module:function``; ``settings`` are options of the flow; raises what is wrong."""
    chance, began = random.Random(seed), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    reader = _Reader(read=read, only_newest=only_newest)
    order = {"make": make, "config": config, "folder": str(folder), "only_newest": only_newest, "settings": settings}
    worker = Worker()
    try:
        run = _Torture(worker, reader, order, folder)
        with reader.looking():
            for number, life in enumerate(lives(chance, kills, points, can_rewind=can_rewind)):
                before_life(number)
                run.live(life, chance.randrange(1 << 30))
            run.live(Life(rollback=False), chance.randrange(1 << 30), more=5)
        _check_end(reader, run)
        if settings.get("publish") != "at_once":  # then every batch is a state of its own
            run.check_states(same_epoch=same_epoch)
    finally:
        worker.close()
    report = run.report
    report.looks, report.states, report.epochs = reader.looks, len(reader.states), len(run.epochs)
    report.rows, report.seconds = max(reader.states)[0], round(time.monotonic() - began, 1)
    return report


def _check_end(reader: _Reader, run: _Torture) -> None:
    newest_first = sorted(run.epochs.items(), reverse=True)
    last = tuple(next(cut[place] for _, cut in newest_first if cut[place] is not None) for place in (0, 1))
    assert last[0] == last[1], f"the last run did not drain: {last}"
    found = reader.look()
    assert not reader.wrong, reader.wrong
    assert found == last, f"readers see {found} rows at the end, the flow has published {last}"
