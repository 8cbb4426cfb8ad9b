"""Failover and failback on real Spark, as a person does it: two storages, one remote tier, the same tables, kill -9."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import cutline
from cutline.errors import CutlineError
from cutline.ports.sinks import Sink
from cutline.testing.servers.lifetime import start_child

pytestmark = [pytest.mark.spark, pytest.mark.kill]

ROWS_PER_FILE, KEYS = 50, 7
_LIFE_SECONDS = 240.0


@dataclass(slots=True, kw_only=True)
class Hosts:
    """Two hosts with a storage each."""

    folder: Path
    sink: str
    options: tuple[str, ...]
    publish: str = "checkpoint"
    files: int = 0
    told: list[str] = field(default_factory=list)

    def feed(self, files: int) -> None:
        source = self.folder / "in"
        source.mkdir(exist_ok=True)
        for _ in range(files):
            ids = range(self.files * ROWS_PER_FILE, (self.files + 1) * ROWS_PER_FILE)
            text = "".join(json.dumps({"id": one, "key": f"k{one % KEYS}"}) + "\n" for one in ids)
            temporary = self.folder / f"{self.files}.json"
            temporary.write_text(text)
            temporary.rename(source / f"{self.files:04d}.json")
            self.files += 1

    def start(self, host: str, *more: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "TWO_HOSTS_FOLDER": str(self.folder),
            "TWO_HOSTS_SINK": self.sink,
            "TWO_HOSTS_PUBLISH": self.publish,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        log = (self.folder / f"{host}.log").open("a")
        set_options = [f"--set={one}" for one in (*self.options, "checkpoint_interval=500ms")]
        script = Path(__file__).parent.parent / "support" / "two_hosts_flow.py"
        command = [
            str(Path(sys.executable).with_name("cutline")),
            "run",
            str(script),
            "--storage",
            str(self.folder / host),
            "--json",
        ]
        with log:
            return start_child([*command, *set_options, *more], env=environment, stdout=log, stderr=log, text=True)

    def run(self, host: str, *more: str) -> int:
        """To the end of the present input."""
        code = self.start(host, "--until-done", *more).wait(_LIFE_SECONDS)
        self.told.append(f"{host} {more} ended with {code}")
        return code

    def kill(self, host: str, published: int) -> None:
        """Killed when it has published so much, or has ended before."""
        process = self.start(host)
        deadline = time.monotonic() + _LIFE_SECONDS
        while process.poll() is None and len(self.rows()) < published:
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.1)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        self.told.append(f"{host} was killed, or had ended: {process.wait(30)}")

    def rows(self) -> list[int]:
        return sorted(int(str(row["id"])) for row in self._read("rows"))

    def _read(self, name: str) -> list[dict[str, object]]:
        try:
            found: list[dict[str, object]] = cutline.read(self._sink(name)).to_arrow().to_pylist()
        except (CutlineError, OSError):
            return []
        return found

    def _sink(self, name: str) -> Sink:
        if self.sink == "parquet":
            return cutline.sinks.Parquet(self.folder / name)
        if self.sink == "sqlite":
            return cutline.sinks.SQLite(self.folder / "tables.sqlite", name)
        return cutline.sinks.Delta(self.folder / name)

    def check(self, *, is_all: bool = False) -> None:
        """Each row at most once, and files whole or not at all; with ``is_all`` everything, and the totals with it."""
        rows = self.rows()
        assert len(rows) == len(set(rows)), self.story()
        assert set(Counter(one // ROWS_PER_FILE for one in rows).values()) <= {ROWS_PER_FILE}, self.story()
        if is_all:
            assert len(rows) == self.files * ROWS_PER_FILE, self.story()
            newest: dict[object, int] = {}
            for row in self._read("totals"):
                newest[row["key"]] = max(int(str(row["seen"])), newest.get(row["key"], 0))
            assert newest == Counter(f"k{one % KEYS}" for one in rows), self.story()

    def said(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text()

    def story(self) -> str:
        return "\n".join([f"{self.sink}, {self.options}, {self.publish}", *self.told])


def hosts(tmp_path: Path, sink: str, *options: str, publish: str = "checkpoint") -> Hosts:
    return Hosts(folder=tmp_path, sink=sink, options=(f"remote={tmp_path / 'remote'}", *options), publish=publish)


@pytest.mark.timeout(900)
@pytest.mark.soak
def test_failover_and_failback(tmp_path: Path) -> None:
    two = hosts(tmp_path, "upsert")
    two.feed(6)
    two.kill("a", published=2 * ROWS_PER_FILE)
    two.check()
    two.feed(2)
    assert two.run("b") == 0, two.said("b")
    two.check(is_all=True)
    two.feed(2)
    assert two.run("a") != 0
    assert "another storage has taken this flow over" in two.said("a")
    assert "--rejoin" in two.said("a")
    two.check()
    assert two.run("a", "--rejoin") == 0, two.said("a")
    two.check(is_all=True)
    assert two.run("b") != 0


@pytest.mark.soak
@pytest.mark.timeout(2_400)
@pytest.mark.parametrize("seed", range(10))
def test_a_story_of_two_hosts(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    sink = ("parquet", "delta", "upsert", "sqlite")[seed % 4]
    durable = ("local", "remote")[seed // 4 % 2]
    publish = "at_once" if seed % 5 == 4 else "checkpoint"
    two = hosts(tmp_path, sink, f"durable={durable}", publish=publish)
    two.feed(4)
    two.kill("a", published=ROWS_PER_FILE)
    for _ in range(4):
        two.feed(chance.randint(1, 4))
        host = chance.choice("ab")
        if chance.random() < 0.5:
            two.kill(host, published=len(two.rows()) + ROWS_PER_FILE)
        elif two.run(host) != 0:
            two.run(host, "--rejoin")
        two.check()
    two.feed(1)
    codes = [two.run(host, *more) for host in "ab" for more in ((), ("--rejoin",))]
    assert 0 in codes, two.story()
    two.check(is_all=True)
