"""A flow on the user's own session: what the user has set, hears and sees there stays."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline import Flow, sinks
from cutline.spark.channel_source import ChannelSource
from cutline.spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def orders_flow(folder: Path) -> Flow:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "1.json").write_text("\n".join(json.dumps({"id": number}) for number in range(10)))
    flow = Flow("orders")

    @flow.operator()
    def orders(spark: SparkSession) -> Any:
        return spark.readStream.schema("id long").json(str(folder / "in"))

    flow.sink(orders, sinks.Parquet(folder / "out"))
    return flow


def test_listeners_and_settings_of_the_user_stay_and_the_session_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Listener(StreamingQueryListener):
        def __init__(self) -> None:
            self.heard: list[tuple[str, str]] = []

        def onQueryStarted(self, event: Any) -> None:
            self.heard.append(("started", event.name))

        def onQueryProgress(self, event: Any) -> None:
            self.heard.append(("progress", event.progress.name))

        def onQueryTerminated(self, event: Any) -> None:
            self.heard.append(("terminated", ""))

    spark.dataSource.register(ChannelSource)  # a flow has run on the session before: the new one inherits it
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "3")
    session.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    before = session.conf.getAll
    listener = Listener()
    session.streams.addListener(listener)
    try:
        run = orders_flow(tmp_path).start(spark=session, storage=str(tmp_path / "storage"), checkpoint_interval=0)
        run.process_all_available()
        run.stop()
        assert session.conf.getAll == before
        assert session.range(5).count() == 5
        deadline = time.monotonic() + 20
        while ("terminated", "") not in listener.heard and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        session.streams.removeListener(listener)
    assert [one for one in listener.heard if one[0] != "progress"] == [("started", "orders.orders"), ("terminated", "")]
    assert ("progress", "orders.orders") in listener.heard


def test_a_session_is_found_from_another_thread_and_keeps_its_settings(spark: SparkSession) -> None:
    before = spark.conf.getAll
    found: list[SparkSession] = []
    thread = threading.Thread(target=lambda: found.append(open_session("other", None)))
    thread.start()
    thread.join()
    assert found[0].sparkContext is spark.sparkContext
    assert spark.conf.getAll == before


CONNECT = """
import os, sys
from pyspark.sql import SparkSession
from cutline import Flow, errors
from cutline.sinks import Parquet

session = SparkSession.builder.remote("sc://127.0.0.1:1").getOrCreate()  # it connects when it is used
flow = Flow("orders")
flow.sink(flow.operator("orders")(lambda spark: spark.readStream.format("rate").load()), Parquet("out"))
for given in (session, None):
    try:
        flow.start(spark=given)
    except errors.ConfigError as error:
        print(error)
sys.stdout.flush()
os._exit(0)  # the session would try for minutes to tell its server
"""


def test_a_spark_connect_session_is_refused_with_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    given, environment = done.stdout.splitlines()
    assert given.startswith("spark= is a Spark Connect session, and a flow runs in the Spark driver itself")
    assert "(flow=orders). Next: pass a classic session" in given and "deploying.md" in given
    assert environment.startswith("SPARK_CONNECT_MODE_ENABLED asks for Spark Connect")
