"""A flow on a real Spark cluster whose workers cannot see the driver's storage, as if they were other machines.

They share with it what a cluster has: an object store for the rows between operators, and a file system of Spark's own:
Hadoop's viewfs over a folder, a real HDFS, or a real S3 server through S3A. All of them are killed and frozen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.channels.segment_store import whereabouts
from cutline.demo.run import run_demo
from cutline.demo.settings import FLOW_NAME, DemoSettings
from cutline.model.layout import Layout
from cutline.model.status import FlowStatus
from cutline.testing.servers import jars
from cutline.testing.servers.process import ServerProcess
from cutline.testing.servers.s3 import SECRET_KEY, S3Server
from tests.support.cluster import Cluster, can_hide_folders
from tests.support.hadoop import Place, place_on

if TYPE_CHECKING:
    from cutline.demo.supervise import Watcher

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kill,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_hide_folders(), reason="workers cannot be kept from the driver's files without root"),
]


def demo_settings(tmp_path: Path, s3_server: S3Server, *, seconds: float = 12.0) -> DemoSettings:
    return DemoSettings(
        folder=str(tmp_path / "machine"),
        rows=30_000,
        keys=500,
        seed=3,
        interval="1s",
        mode="auto",
        seconds=seconds,
        remote=s3_server.fresh_url(),
        remote_options={name: s3_server.options[name] for name in ("endpoint", "region")},
    )


def run_on_cluster(
    settings: DemoSettings,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    *,
    spark_dirs: str,
    spark_settings: Mapping[str, str],
    live: Path | None = None,
    kills: int = 1,
    watch: Watcher = lambda *_: None,
) -> dict[str, Any]:
    """The demo's report. The workers see what sinks write, and ``live``, with settings as a user gives them."""
    machine = Path(settings.folder)
    shown = [*([live] if live else []), settings.ledger, settings.totals_table]
    for folder in shown:
        folder.mkdir(parents=True)
    secrets = {
        "AWS_ACCESS_KEY_ID": s3_server.options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": s3_server.options["secret_access_key"],
    }
    around = machine.parent / "cluster"
    with Cluster(around, workers=2, hidden=machine, shown=shown, environment=secrets) as cluster:
        (conf := machine.parent / "conf").mkdir()
        lines = {
            "spark.master": cluster.url,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "600m",
            **spark_settings,
        }
        (conf / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        environment = {
            **secrets,
            "SPARK_CONF_DIR": str(conf),
            "CUTLINE_CHANNEL_STORE": s3_server.fresh_url(),
            "CUTLINE_SPARK_DIRS": spark_dirs,
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return run_demo(settings, kills, watch)


def assert_exactly_once(report: dict[str, Any]) -> None:
    assert (report["lost"], report["duplicated"], report["wrong_amounts"]) == (0, 0, 0), report


def test_operators_on_several_machines_share_no_disk_with_the_driver(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = demo_settings(tmp_path, s3_server)
    live = Path(settings.folder) / "live"
    resumed = run_on_cluster(
        settings,
        s3_server,
        monkeypatch,
        spark_dirs="viewfs://shared/live",
        spark_settings={"spark.hadoop.fs.viewfs.mounttable.shared.link./live": live.as_uri()},
        live=live,
    )
    assert_exactly_once(resumed)
    assert [recovery["path"] for recovery in resumed["recoveries"]] == ["resume"]
    layout = Layout(settings.storage, FLOW_NAME)
    assert whereabouts(layout.channels).place.url.startswith("s3://")
    [home] = (live / FLOW_NAME).iterdir()
    assert sorted(path.name for path in home.iterdir()) == ["cards", "payments", "totals", "upi"]


def hadoop_settings(kind: str, place: Place) -> dict[str, str]:
    """As in docs/storage.md: the jars for driver and executors, the file system's settings."""
    found = {f"spark.hadoop.{name}": value for name, value in place.settings.items()}
    if kind == "s3a":
        found["spark.jars"] = ",".join(path.as_uri() for path in jars.jars(jars.S3A))
    return found


@pytest.mark.parametrize("kind", ["hdfs", "s3a"])
def test_the_driver_is_killed(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kind: str
) -> None:
    place = place_on(kind, request)
    settings = demo_settings(tmp_path, s3_server)
    report = run_on_cluster(
        settings,
        s3_server,
        monkeypatch,
        spark_dirs=place.url,
        spark_settings=hadoop_settings(kind, place),
        kills=2,
    )
    assert_exactly_once(report)
    assert [recovery["path"] for recovery in report["recoveries"]] == ["resume", "resume"]
    record = Layout(settings.storage, FLOW_NAME).live_home.read_text()
    assert place.url in record
    assert SECRET_KEY not in record
    assert SECRET_KEY not in Path(settings.folder, "worker.log").read_text()


class Faults:
    """Does something to a server when the flow has run batches for a while, again and again in another way."""

    def __init__(self, *steps: Callable[[], None], every: float) -> None:
        self._steps = list(steps)
        self._every = every
        self._due: float | None = None
        self._thread: threading.Thread | None = None
        self.done = 0
        self.states: set[str] = set()
        self.problems: set[str] = set()

    def watch(self, status: FlowStatus | None, _: str) -> None:
        """See ``Watcher``: called a few times a second."""
        if status is None or not any(one.batches for one in status.operators.values()):
            return
        self.states.add(status.state)
        self.problems.update(f"{one.resource}: {one.problem}" for one in status.waiting)
        if self._thread is not None and self._thread.is_alive():
            return
        self._due = self._due or time.monotonic() + self._every
        if self._steps and time.monotonic() >= self._due:
            self._thread = threading.Thread(target=self._run, args=(self._steps.pop(0),))
            self._thread.start()

    def _run(self, step: Callable[[], None]) -> None:
        step()
        self.done += 1
        self._due = None


def frozen_for(server: ServerProcess, seconds: float) -> Callable[[], None]:
    def step() -> None:
        server.freeze()
        time.sleep(seconds)
        server.thaw()

    return step


def killed_for(place: Place, server: ServerProcess, seconds: float) -> Callable[[], None]:
    def step() -> None:
        server.kill()
        time.sleep(seconds)
        place.start()

    return step


@pytest.mark.parametrize("kind", ["hdfs", "s3a"])
def test_the_file_system_is_killed_and_frozen_in_mid_batch(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kind: str
) -> None:
    """Shorter and longer than its clients wait: 3 seconds for HDFS, 15 for S3A (see tests/support/hadoop.py)."""
    place = place_on(kind, request)
    # The same server may not hold the rows between operators: its loss is the subject of other tests.
    rows = S3Server()
    rows.start()
    servers = [place.server, *([request.getfixturevalue("hdfs").datanode] if kind == "hdfs" else [])]
    steps = [
        step
        for server in servers
        for step in (
            killed_for(place, server, 1.0),
            killed_for(place, server, 15.0),
            frozen_for(server, 1.5),
            frozen_for(server, 12.0 if kind == "hdfs" else 50.0),
        )
    ]
    faults = Faults(*steps, every=4.0)
    settings = demo_settings(tmp_path, rows, seconds=100.0)
    try:
        report = run_on_cluster(
            settings,
            rows,
            monkeypatch,
            spark_dirs=place.url,
            spark_settings=hadoop_settings(kind, place),
            kills=0,
            watch=faults.watch,
        )
    finally:
        rows.remove()
        place.start()
    assert_exactly_once(report)
    assert faults.done == len(steps), "the input ended before the last fault"
    assert "waiting" in faults.states, faults.problems
    assert not faults.states & {"failed", "unhealthy"}, faults.problems
    assert not [problem for problem in faults.problems if "\n" in problem]
