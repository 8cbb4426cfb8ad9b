"""One Spark session per test process; everything binds to loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session all tests with Spark share, made the way Cutline makes one for users."""
    from cutline.spark.session import open_session

    # Tests run each query for seconds only: the second compiler would cost more than it gives.
    options = "-Djdk.lang.Process.launchMechanism=VFORK -XX:TieredStopAtLevel=1"
    session = open_session("cutline-tests", None, {"spark.driver.extraJavaOptions": options})
    yield session
    session.stop()
