"""A flow on a real Spark cluster whose workers cannot see the driver's storage, as if they were other machines.

They share with it what a cluster has: an object store for the rows between operators, and a file system of Spark's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.channels.segment_store import whereabouts
from cutline.demo.run import run_demo
from cutline.demo.settings import FLOW_NAME, DemoSettings
from cutline.model.layout import Layout
from tests.support.cluster import Cluster, can_hide_folders

if TYPE_CHECKING:
    from cutline.testing.servers.s3 import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.kill, pytest.mark.soak]


@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_hide_folders(), reason="workers cannot be kept from the driver's files without root")
def test_operators_on_several_machines_share_no_disk_with_the_driver(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "machine"
    settings = DemoSettings(
        folder=str(hidden),
        rows=30_000,
        keys=500,
        seed=3,
        interval="1s",
        mode="auto",
        seconds=12.0,
        remote=s3_server.fresh_url(),
        remote_options={name: s3_server.options[name] for name in ("endpoint", "region")},
    )
    live = hidden / "live"
    for folder in (live, settings.ledger, settings.totals_table):
        folder.mkdir(parents=True)
    secrets = {
        "AWS_ACCESS_KEY_ID": s3_server.options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": s3_server.options["secret_access_key"],
    }
    shown = [live, settings.ledger, settings.totals_table]
    with Cluster(tmp_path / "cluster", workers=2, hidden=hidden, shown=shown, environment=secrets) as cluster:
        conf = tmp_path / "conf"
        conf.mkdir()
        lines = {
            "spark.master": cluster.url,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "600m",
            "spark.hadoop.fs.viewfs.mounttable.shared.link./live": live.as_uri(),
        }
        (conf / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        environment = {
            **secrets,
            "SPARK_CONF_DIR": str(conf),
            "CUTLINE_CHANNEL_STORE": s3_server.fresh_url(),
            "CUTLINE_SPARK_DIRS": "viewfs://shared/live",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        resumed = run_demo(settings, 1, lambda *_: None)
    assert (resumed["lost"], resumed["duplicated"], resumed["wrong_amounts"]) == (0, 0, 0), resumed
    assert [recovery["path"] for recovery in resumed["recoveries"]] == ["resume"]
    layout = Layout(settings.storage, FLOW_NAME)
    assert whereabouts(layout.channels).place.url.startswith("s3://")
    [home] = (live / FLOW_NAME).iterdir()
    assert sorted(path.name for path in home.iterdir()) == ["cards", "payments", "totals", "upi"]
