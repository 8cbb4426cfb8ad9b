"""Two in the morning: a bad version was deployed, and the person on call restores the flow with the commands at hand.

Every command is a process of its own, typed as in the runbook; rows keep arriving, and a reader looks at the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from cutline.testing.servers.lifetime import start_child

pytestmark = [pytest.mark.spark]

GOOD = """\
from pathlib import Path
import cutline
from pyspark.sql import functions as F

flow = cutline.Flow("payments")

@flow.operator()
def incoming(spark):
    schema = "merchant STRING, amount BIGINT"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 200).json(str(Path("in").resolve()))

@flow.operator(inputs=[incoming], subtasks=1, output_mode="update")
def totals(incoming):
    return incoming.groupBy("merchant").agg(F.sum("amount").alias("amount"))

flow.sink(totals, cutline.sinks.Delta("OUT", mode="upsert", key=["merchant"]), name="table")
"""
CONFIG = 'storage = "data"\ncheckpoint_interval = "1s"\n'
MERCHANTS = [f"m{number}" for number in range(20)]
SECONDS = 120.0


class Night:
    """A folder in which commands are typed, and into which payments arrive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: What the table must show in the end.
        self.truth: dict[str, int] = {}
        self._random = random.Random(2)
        self._is_over = threading.Event()
        self._arrivals = threading.Thread(target=self._arrive, daemon=True)
        self._running: list[subprocess.Popen[bytes]] = []
        (folder / "in").mkdir()
        (folder / "cutline.toml").write_text(CONFIG)
        (folder / "good.py").write_text(GOOD.replace("OUT", str(folder / "table")))
        # The columns are the same: neither Spark nor Cutline objects.
        (folder / "bad.py").write_text((folder / "good.py").read_text().replace("F.sum(", "F.max("))

    def __enter__(self) -> Night:
        self._arrivals.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_arrivals()
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _arrive(self) -> None:
        number = 0
        while not self._is_over.wait(0.25):
            rows = [(self._random.choice(MERCHANTS), self._random.randrange(1, 100)) for _ in range(20)]
            text = "\n".join(json.dumps({"merchant": merchant, "amount": amount}) for merchant, amount in rows)
            hidden = self.folder / "in" / f".{number}.json"
            hidden.write_text(text)
            hidden.rename(self.folder / "in" / f"{number}.json")  # a file appears whole
            for merchant, amount in rows:
                self.truth[merchant] = self.truth.get(merchant, 0) + amount
            number += 1

    def end_arrivals(self) -> None:
        self._is_over.set()
        self._arrivals.join()

    # ------------------------------------------------------------------ what a person types

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A command that goes on until the flow is stopped."""
        name = f"{len(self._running)}-{words[0]}.log"
        with (self.folder / name).open("wb") as log:
            command = [sys.executable, "-m", "cutline", *words]
            process = start_child(command, cwd=self.folder, stdout=log, stderr=log, env=dict(os.environ))
        self._running.append(process)
        return process

    def cutline(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cutline", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr + self.logs()
        return done.stdout

    def logs(self) -> str:
        texts = (f"\n--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))
        return "".join(texts)

    # ------------------------------------------------------------------ what can be seen

    def table(self) -> dict[str, int]:
        rows = DeltaTable(self.folder / "table").to_pyarrow_table().to_pylist()
        return {row["merchant"]: row["amount"] for row in rows}

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.folder / "data" / "payments" / "status.json").read_bytes()))
        return {}

    def complete(self, generation: int) -> int:
        """How many checkpoints a generation has completed, as far as the status shows them."""
        own = [one for one in self.status().get("history", ()) if one["generation"] == generation]
        return sum(one["outcome"] == "completed" for one in own)

    def wait(self, process: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert process.poll() is None, self.logs()
            assert time.monotonic() < deadline, f"{self.status()}{self.logs()}"
            time.sleep(0.2)


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    with Night(tmp_path) as one:
        yield one


def story(night: Night, bad_seconds: float) -> None:
    good = night.start("run", "good.py")
    night.wait(good, lambda: night.complete(1) >= 3)
    night.cutline("stop")
    assert good.wait(SECONDS) == 0
    before = night.table()

    bad = night.start("run", "bad.py")
    night.wait(bad, lambda: night.complete(2) >= 3)
    begun = time.monotonic()
    night.wait(bad, lambda: time.monotonic() - begun > bad_seconds, SECONDS + bad_seconds)
    wrong = night.table()
    assert wrong != before

    told = json.loads(night.cutline("restore", "--dry-run", "--to", "before-last-deploy", "--json"))
    assert (told["is_running"], told["would_refuse"], told["is_dry_run"]) == (True, False, True)
    (sink,), (source,) = told["sinks"], told["sources"]
    assert (sink["sink"], sink["fate"], sink["unmeasured"], source["unmeasured"]) == ("table", "rewind", 0, 0)
    assert sink["epochs"] >= bad_seconds / 4
    assert 0 < sink["rows"] <= source["rows"]
    assert source["positions_then"] != source["positions_now"]
    assert source["is_guarded"]
    assert told["estimate"]["seconds"] > 0
    shown = night.cutline("restore", "--dry-run", "--to", "before-last-deploy", "--run", "good.py")
    assert "rows withdrawn" in shown
    assert (bad.poll(), night.status()["generation"]) == (None, 2), "it runs on"

    restored = night.start("restore", "payments", "--now", "--to", "before-last-deploy", "--run", "good.py")
    assert bad.wait(SECONDS) == 0, night.logs()
    night.wait(restored, lambda: night.complete(3) >= 2)
    night.end_arrivals()
    night.wait(restored, lambda: night.table() == night.truth)
    night.cutline("stop")
    assert restored.wait(SECONDS) == 0, night.logs()
    assert night.table() == night.truth
    assert night.status()["recovery"]["epoch"] == told["epoch"]
    steps = (night.folder / "2-restore.log").read_text()
    for step in ("stopping flow payments", "stopped after", "restoring epoch", "restored epoch", "first checkpoint"):
        assert step in steps


@pytest.mark.timeout(400)
def test_a_bad_deploy_is_undone_while_the_flow_runs(night: Night) -> None:
    story(night, 15.0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_bad_deploy_of_five_minutes_leaves_no_trace(night: Night) -> None:
    story(night, 300.0)
    only = night.folder / "only.py"
    only.write_text(GOOD.replace("OUT", str(night.folder / "only")).replace('"payments"', '"only"'))
    night.cutline("run", "only.py", "--until-done")
    rows = DeltaTable(night.folder / "only").to_pyarrow_table().to_pylist()
    assert {row["merchant"]: row["amount"] for row in rows} == night.table(), "as if it had never been deployed"
