"""Starts a flow on states that a power cut may have left, runs it on, and compares what is published with the truth."""

from __future__ import annotations

import collections
import logging
import multiprocessing
import os
import random
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cutline.errors import CutlineError
from tests.support.power.disk import POLICIES, Disk, State
from tests.support.power.living import RealSinksFlow, condense_often, published, settings_of
from tests.support.power.recording import Recording

#: Nothing below Spark's directories is lost in half of the states: then a flow has no reason to be restored.
SPARK = "/spark/"
_SECONDS = 60.0
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["__main__", __name__])


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A power cut: when, and what the file system makes of it."""

    at: int
    policy: str
    seed: int
    keeps_spark: bool

    def state(self, disk: Disk) -> State:
        whole = SPARK if self.keeps_spark else None
        return disk.after(self.at, self.policy, random.Random(self.seed), whole=whole)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How the flow came back."""

    #: "right", "wrong", "refused", "needless" (restored though nothing was lost), "failed", "hung"
    verdict: str
    path: str = ""
    why: str = ""


@dataclass
class Findings:
    """The results of an exploration."""

    counts: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)
    bad: list[tuple[Cut, Result]] = field(default_factory=list)

    @property
    def states(self) -> int:
        return sum(self.counts.values())

    def add(self, cut: Cut, result: Result) -> None:
        self.counts[cut.policy, result.verdict, result.path] += 1
        if result.verdict != "right":
            self.bad.append((cut, result))

    def verdicts(self) -> dict[str, int]:
        found: collections.Counter[str] = collections.Counter()
        for (_, verdict, _), count in self.counts.items():
            found[verdict] += count
        return dict(found)

    def paths(self) -> dict[str, int]:
        found: collections.Counter[str] = collections.Counter()
        for (_, _, path), count in self.counts.items():
            found[path] += count
        return dict(found)

    def story(self) -> str:
        """The first bad ones, each with what repeats it."""
        return "\n".join(f"{cut}: {result.verdict} {result.path} {result.why}" for cut, result in self.bad[:5])


def cuts(recording: Recording, chance: random.Random) -> Iterator[Cut]:
    """Random power cuts, without end. Each policy has its turn."""
    moments = recording.moments()
    while True:
        for policy in POLICIES:
            for keeps_spark in (False, True):
                yield Cut(
                    at=chance.choice(moments), policy=policy, seed=chance.randrange(1 << 30), keeps_spark=keeps_spark
                )


def explore(disk: Disk, mode: str, work: Path, count: int, seed: int, *, until_bad: bool = False) -> Findings:
    """Recover from ``count`` states that differ. ``until_bad``: the first bad one is enough."""
    findings, seen = Findings(), set[str]()
    for cut, _ in zip(cuts(disk.recording, random.Random(seed)), range(5 * count), strict=False):
        state = cut.state(disk)
        digest = state.digest()
        if digest in seen:
            continue
        seen.add(digest)
        state.build(work)
        findings.add(cut, recover(disk.recording, cut, mode, work))
        if findings.states == count or (until_bad and findings.bad):
            break
    shutil.rmtree(work, ignore_errors=True)
    return findings


def recover(recording: Recording, cut: Cut, mode: str, work: Path) -> Result:
    """In a process of its own, so that no thread of an earlier state is left.

    Not forked from this one: Delta's library refuses to work in a process that was forked after its first use.
    """
    said = [note.text for note in recording.notes if note.at <= cut.at]
    receiving, sending = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_recovered, args=(sending, said, cut, mode, work))
    process.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(_SECONDS) else Result(verdict="hung")
    except EOFError:
        return Result(verdict="failed", why="the process died")
    finally:
        receiving.close()
        process.kill()
        process.join()
        process.close()


def _recovered(sending: Connection, said: list[str], cut: Cut, mode: str, work: Path) -> None:
    logging.disable(logging.CRITICAL)
    # The state is on the disk as it is, and this process does not die.
    os.fsync = _no_sync
    condense_often()
    try:
        result = _run_on(said, cut, mode, work)
    except CutlineError as error:
        result = Result(verdict="refused", path=type(error).__name__, why=str(error)[:600])
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the verdict)
        result = Result(verdict="failed", path=type(error).__name__, why=traceback.format_exc()[-1500:])
    sending.send(result)
    # Without waiting for threads that the flow left.
    os._exit(0)


def _no_sync(fd: Any) -> None: ...


def _run_on(said: list[str], cut: Cut, mode: str, work: Path) -> Result:
    settings = settings_of(work, mode)
    flow = RealSinksFlow(work, **settings, checkpoint_timeout="10s")
    path = flow.recovered.path
    try:
        flow.run_planned()
        flow.emit(1)
        flow.drain()
        savepoints = [one.name for one in flow.run.savepoints()]
    finally:
        flow.stop()
    # What was published is safe from power cuts, not from the loss of the whole folder: copies come later.
    since = max((at for at, text in enumerate(said) if text == "lost storage"), default=0)
    promised = max(
        (int(text.split()[1]) for text in said[since:] if text.startswith(("published ", "showed "))), default=0
    )
    is_lost = any(text.startswith("lost") for text in said)
    # Without a checkpoint, a flow whose directories are lost begins anew; "keep" keeps what was published before.
    is_restored = path in ("local", "regional", "remote") or (path == "fresh" and not cut.keeps_spark)
    may_repeat = settings.get("on_rollback") == "keep" and (is_lost or is_restored)
    for sink, rows in published(work).items():
        numbers = [tuple(row) for row in rows]
        if may_repeat:
            numbers = sorted(set(numbers))
        if numbers != [(n, n + 1) for n in range(len(numbers))]:
            return Result(verdict="wrong", path=path, why=f"{sink}: {numbers}")
        if len(numbers) < promised + (not may_repeat):
            return Result(verdict="wrong", path=path, why=f"{sink}: {len(numbers)} rows, {promised} were published")
    if "saved kept" in said and "lost storage" not in said and "kept" not in savepoints:
        return Result(verdict="wrong", path=path, why="the savepoint is gone")
    problems = "; ".join(flow.recovered.problems)
    if cut.keeps_spark and not is_lost and path not in ("resume", "fresh"):
        return Result(verdict="needless", path=path, why=problems)
    return Result(verdict="right", path=path, why=problems)


def as_table(found: dict[str, Findings]) -> str:
    """How many states of each mode, and how the flows came back."""
    lines = [f"{'mode':<16} {'states':>6}  verdicts; recovery paths"]
    for mode, findings in found.items():
        lines.append(f"{mode:<16} {findings.states:>6}  {findings.verdicts()}; {findings.paths()}")
    return "\n".join(lines)


def repeated(cut: dict[str, Any], disk: Disk, mode: str, work: Path) -> Result:
    """Recover from one state again, for a look at it; the state before is at ``<work>-before``."""
    one = Cut(**cut)
    one.state(disk).build(work.with_name(f"{work.name}-before"))
    one.state(disk).build(work)
    return recover(disk.recording, one, mode, work)
