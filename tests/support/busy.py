"""A flow under load, to be killed: short checkpoint intervals, a remote tier, and collectors at work all the time."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import CutlineError
from cutline.maintenance.verify import Verifier
from cutline.model.ids import OperatorId
from cutline.model.layout import Layout
from cutline.objects import open_store
from cutline.storage.inspector import LocalInspector
from cutline.storage.metadata.inspector import inspect_coordinator
from cutline.tiers import replicator as replication
from cutline.tiers.remote_tier import RemoteTier
from tests.support.spark_dirs import SparkDir
from tests.support.sparkless import NUMBERS, TOTALS, Row, SparklessFlow

#: Every so many versions the state is written as a whole, and what came long before is purged: content comes and goes.
_WHOLE_EVERY, _KEPT_VERSIONS = 4, 12


class BusyFlow(SparklessFlow):
    """Its state is now and then written as a whole, as Spark's maintenance does."""

    def step(self, operator: OperatorId, *, commit: bool = True) -> bool:
        has_run = super().step(operator, commit=commit)
        spark = SparkDir(self.spark_dir(operator), subtasks=1)
        version = spark.committed + 1
        if has_run and version and version % _WHOLE_EVERY == 0:
            folder = spark.root / "state/0/0"
            spark._write(f"state/0/0/{version}.snapshot", (folder / f"{version}.delta").read_text())
            for path in folder.iterdir():
                if path.stem.isdigit() and int(path.stem) < version - _KEPT_VERSIONS:
                    path.unlink()
        return has_run

    def _compute(
        self, operator: OperatorId, spark: SparkDir, batch: int, positions: dict[str, int]
    ) -> tuple[list[Row], str]:
        whole = spark.root / "state/0/0" / f"{batch}.snapshot"
        if whole.exists() and not whole.with_suffix(".delta").exists():
            shutil.copyfile(whole, whole.with_suffix(".delta"))  # a restored directory has no more than it needs
        return super()._compute(operator, spark, batch, positions)


def settings(storage: Path, **more: Any) -> dict[str, Any]:
    return {
        "remote": str(storage / "remote"),
        "remote_grace": 0,
        "replicate_interval": 0,
        "channel_capacity_entries": 1_000,
        **more,
    }


def gc_in(flow: SparklessFlow, *, dry_run: bool = False, grace_ms: int = 0) -> dict[str, Any]:
    """What a shell would ask of the running flow."""
    replicator = flow.run._parts.background.replicator
    url = replicator.url if replicator is not None else None
    handler = flow.run._handlers.by_kind()["gc"]
    return handler(grace_ms=grace_ms, dry_run=dry_run, remote=url)


def live_busily(storage: Path, seed: int) -> None:
    """Until it is killed."""
    chance = random.Random(seed)
    replication._COLLECT_SECONDS = 0.0
    flow = BusyFlow(storage, **settings(storage, checkpoint_interval="15ms", retain_checkpoints=chance.choice([1, 2])))

    def collect() -> None:
        for number in range(1_000_000):
            gc_in(flow, dry_run=chance.random() < 0.2)
            time.sleep(chance.random() * 0.02)
            if chance.random() < 0.1:
                with contextlib.suppress(CutlineError):  # the checkpoint was given up, or gone before it could be kept
                    flow.run.savepoint(f"s{seed}-{number}", drain=False, timeout=2)
                for one in flow.run.savepoints()[:-1]:
                    flow.run._parts.stores.savepoints.delete(one.name)

    problems: list[BaseException] = []

    def collect_or_tell() -> None:
        try:
            collect()
        except BaseException as error:  # noqa: BLE001 (told by the main thread)
            problems.append(error)

    threading.Thread(target=collect_or_tell, daemon=True).start()
    while True:
        if problems:
            raise problems[0]
        if flow.run._lifecycle.failure is not None:
            raise flow.run._lifecycle.failure
        flow.step(chance.choice([NUMBERS, TOTALS, TOTALS]))
        time.sleep(chance.random() * 0.01)


def run_gc(storage: Path, *more: str, keep: int = 2, retain: str = "") -> Any:
    """``cutline gc`` of a flow that does not run."""
    where = ["--flow", "counting", "--storage", str(storage / "storage"), "--remote", str(storage / "remote")]
    # What the flow's own code says, a shell cannot know.
    environment = {"CUTLINE_RETAIN_CHECKPOINTS": str(keep), "CUTLINE_RETAIN": retain}
    result = CliRunner().invoke(app, ["gc", *where, "--json", *more], env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def damage_in(layout: Layout) -> list[str]:
    """What a deep look at every checkpoint finds."""
    verifier = Verifier(
        layout, LocalInspector(layout, ReplayGuard()), lambda: inspect_coordinator(layout.metadata), deep=True
    )
    return [str(problem) for report in verifier.every() for problem in report.problems]


def fetch_all(storage: Path, folder: Path) -> Layout:
    """All that the remote tier has, in an empty folder."""
    layout = Layout(folder, "counting")
    replica = RemoteTier.open(open_store(str(storage / "remote" / "counting")), layout)
    layout.root.mkdir(parents=True)
    for epoch in replica.downloader.download_records():
        replica.downloader.download_content(replica.checkpoints.load_manifest(epoch))
    return layout
