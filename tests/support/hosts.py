"""Stories of one flow with several storages: hosts take over, come back, are copied, restored from backups and killed.

Every life is a process of its own. ``events`` emits rows that depend on their number alone, so whatever happened, the
tables must show each of the first ``n`` rows exactly once, in the state that belongs to them; or the start is refused
with a way out, which the story then takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutline.testing.servers.lifetime import start_child
from tests.support.torture_flow import EVENTS, FLOW, LATEST, ROWS_PER_BATCH, Row, all_rows, newest_rows, with_totals

_LIFE_SECONDS = 120.0
#: Where a start or a publication is interrupted most harmfully.
_POINTS = (
    *("remote-told", "restore-generation", "restore-dirs-built", "remote-fetched-records", "remote-fetched"),
    *("sink-commit-begun", "sink-commit-half", "sink-commit-done", "sink-rewind-half"),
    *("aside-saved", "aside-moved"),
)


class Worker:
    """Lives one life after the other, each in a copy of its process."""

    def __init__(self) -> None:
        self._process = start_child(
            [sys.executable, "-m", "tests.support.hosts_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")

    def live(self, order: dict[str, Any], kill_after_s: float | None) -> dict[str, Any]:
        """What became of it: an empty answer if it was killed."""
        answer = Path(order["answer"])
        answer.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._expect("pid"))
        # Without a time a life ends by itself; if it does not, it is stuck, and its empty answer fails the story.
        timer = threading.Timer(_LIFE_SECONDS if kill_after_s is None else kill_after_s, _kill, (pid,))
        timer.start()
        self._expect("ended")
        timer.cancel()
        if not answer.exists():
            return {}
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def _expect(self, name: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker is gone"
        return json.loads(line)[name]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def a_worker() -> Iterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        worker.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A pair of sinks, and how to read them."""

    #: ``module:function``, called in the worker with the folder of the targets.
    make: str
    #: What a reader sees now, per operator.
    read: Callable[[Path], Mapping[str, Sequence[Row]]]
    only_newest: bool = False


@dataclass(slots=True, kw_only=True)
class Story:
    """One flow, its hosts, and what happens to them."""

    seed: int
    folder: Path
    kind: Kind
    worker: Worker
    has_remote: bool
    settings: dict[str, Any] = field(default_factory=dict)
    publish: str = "checkpoint"
    #: For the function that makes the sinks, beside the folder of the targets.
    config: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _random: random.Random = field(init=False)
    _backups: list[tuple[str, Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._targets.mkdir(parents=True)
        if self.has_remote:
            self.settings["remote"] = str(self._remote)

    @property
    def _targets(self) -> Path:
        return self.folder / "targets"

    @property
    def _remote(self) -> Path:
        return self.folder / "remote"

    def run(self, steps: int) -> None:
        """Whatever happens, then all hosts are tried until one brings the flow to an end."""
        self._live("a", kill=False)
        for _ in range(steps):
            self._random.choice(self._events())()
            self.check()
        self.finish()

    def _events(self) -> list[Callable[[], None]]:
        lives = [self._life, self._life, self._life, self._life]
        storages = [self._back_up_host, self._restore_host, self._restore_records, self._copy_host]
        return [*lives, *storages, *([self._lose_host, self._back_up_bucket] if self.has_remote else [])]

    # ------------------------------------------------------------------ lives

    def _hosts(self) -> list[str]:
        """Without a remote tier a host without storage cannot run a flow that has published."""
        return ["a", "b"] if self.has_remote else [one for one in ("a", "b") if self._storage(one).exists()]

    def _storage(self, host: str) -> Path:
        return self.folder / host / "storage"

    def _life(self) -> None:
        self._live(self._random.choice(self._hosts()), kill=self._random.random() < 0.5)

    def live(self, host: str, **how: Any) -> bool:
        """One life that is not killed. True: it lived to its end."""
        return self._live(host, kill=False, **how)

    def _live(
        self,
        host: str,
        *,
        kill: bool,
        restore_to: int | None = None,
        rejoin: bool = False,
        takes_ways_out: bool = True,
    ) -> bool:
        """Start the flow on a host; if that is refused, perhaps take a way out. True: it lived to its end."""
        (self.folder / host).mkdir(exist_ok=True)
        by_point = kill and self._random.random() < 0.4
        order = {
            "folder": str(self.folder / host),
            "answer": str(self.folder / f"answer-{host}"),
            "make": self.kind.make,
            "config": {"folder": str(self._targets), **self.config},
            "only_newest": self.kind.only_newest,
            "settings": self.settings,
            "publish": self.publish,
            "more": self._random.randint(2, 8),
            "seed": self._random.random(),
            "crash_at": self._random.choice(_POINTS) if by_point else "",
            "restore_to": restore_to,
            "rejoin": rejoin,
        }
        answer = self.worker.live(order, self._random.uniform(0.05, 1.2) if kill and not by_point else None)
        self.told.append(
            f"{host}: {json.dumps({k: order[k] for k in ('crash_at', 'restore_to', 'rejoin')})} → {answer}"
        )
        assert answer or kill, f"it is stuck: {self.story()}"
        assert answer.get("kind") != "bug", self.story()
        self.counts[_outcome(answer)] += 1
        if "refused" in answer and takes_ways_out and not rejoin and restore_to is None:
            return self._helped(host, answer)
        return "path" in answer

    def _helped(self, host: str, refusal: dict[str, Any]) -> bool:
        ways: list[Callable[[], bool]] = []
        if refusal["can_rejoin"]:
            ways.append(lambda: self._live(host, kill=False, rejoin=True))
        if refusal["restorable"] is not None:
            ways.append(lambda: self._live(host, kill=False, restore_to=refusal["restorable"]))
        if not ways or self._random.random() < 0.3:
            return False
        return self._random.choice(ways)()

    # ------------------------------------------------------------------ storages

    def _copy_host(self) -> None:
        """The storage of one host is copied to the other one."""
        source, target = self._random.sample(["a", "b"], 2)
        if self._storage(source).exists():
            shutil.rmtree(self._storage(target), ignore_errors=True)
            shutil.copytree(self._storage(source), self._storage(target))
            self.told.append(f"the storage of {source} is copied to {target}")

    def _back_up_host(self) -> None:
        host = self._random.choice(["a", "b"])
        if self._storage(host).exists():
            place = self.folder / f"backup{len(self._backups)}"
            shutil.copytree(self._storage(host), place)
            self._backups.append((host, place))
            self.told.append(f"a backup of {host}")

    def _restore_host(self) -> None:
        """Over the storage of either host. The newest storage must not be lost with it: nothing could go on."""
        if self._backups:
            of, place = self._random.choice(self._backups)
            host = "b" if of == "a" else "a"
            shutil.rmtree(self._storage(host), ignore_errors=True)
            shutil.copytree(place, self._storage(host))
            self.told.append(f"the backup of {of} is restored on {host}")

    def _restore_records(self) -> None:
        """Only the coordinator's database comes from a backup."""
        if self._backups:
            host, place = self._random.choice(self._backups)
            records = self._storage(host) / FLOW / "coordinator.sqlite"
            older = place / FLOW / "coordinator.sqlite"
            if records.exists() and older.exists():
                for name in ("", "-wal", "-shm"):
                    records.with_name(records.name + name).unlink(missing_ok=True)
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(older.with_name(older.name + name), records.with_name(records.name + name))
                self.told.append(f"the records of {host} are restored from a backup")

    def _lose_host(self) -> None:
        host = self._random.choice(["a", "b"])
        if any(self._remote.rglob("manifest.json")):
            shutil.rmtree(self.folder / host, ignore_errors=True)
            self.told.append(f"{host} is lost")

    def _back_up_bucket(self) -> None:
        """Or restore it, if there is a backup."""
        place = self.folder / "bucket-backup"
        if place.exists() and self._random.random() < 0.5:
            shutil.rmtree(self._remote, ignore_errors=True)
            shutil.copytree(place, self._remote)
            self.told.append("the bucket is restored from a backup")
        elif self._remote.exists():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self._remote, place)
            self.told.append("a backup of the bucket")

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Some host can go on, or every one is refused; in both cases the tables are right."""
        for _ in range(3):
            for host in self._hosts():
                if self._live(host, kill=False):
                    self.counts["finished"] += 1
                    self.check(is_settled=True)
                    return
        self.counts["refused everywhere"] += 1
        self.check()

    def check(self, *, is_settled: bool = False) -> None:
        """Each table shows the first rows, each once. ``is_settled``: both tables show the same rows."""
        view = self.kind.read(self._targets)
        events, latest = sorted(view[EVENTS]), sorted(view[LATEST])
        assert events == all_rows(len(events)), self.story()
        assert len(events) % ROWS_PER_BATCH == 0, self.story()
        if self.kind.only_newest:
            seen = max((row[0] for row in latest), default=-1) + 1
            assert latest == newest_rows(with_totals(seen)), self.story()
        else:
            assert latest == with_totals(len(latest)), self.story()
        if is_settled:
            shown = max((row[0] for row in latest), default=-1) + 1
            assert shown == len(events), self.story()

    def story(self) -> str:
        return "\n".join([f"seed {self.seed}, {self.kind.make}, {self.settings}, publish={self.publish}", *self.told])


def _outcome(answer: Mapping[str, Any]) -> str:
    if not answer:
        return "killed"
    return str(answer.get("path") or next(iter(answer)))
