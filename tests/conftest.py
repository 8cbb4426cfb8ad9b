"""One Spark session and one of each server per test process, if a test needs them; everything binds to loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import pytest

from cutline.testing.servers.process import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.testing.servers.hdfs import Hdfs
    from cutline.testing.servers.kafka import KafkaCluster
    from cutline.testing.servers.nats import NatsServer
    from cutline.testing.servers.postgres import PostgresServer
    from cutline.testing.servers.s3 import S3Server

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

Server = TypeVar("Server", bound=ServerProcess)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session all tests with Spark share, made the way Cutline makes one for users."""
    from cutline.config.spark_settings import SparkStart
    from cutline.spark.session import open_session
    from cutline.testing.servers import jars

    # Tests run each query for seconds only: the second compiler would cost more than it gives.
    options = "-Djdk.lang.Process.launchMechanism=VFORK -XX:TieredStopAtLevel=1"
    settings = {"spark.driver.extraJavaOptions": options}
    found = [jars.classpath(one) for one in (jars.S3A, jars.SPARK_CLOUD, jars.SPARK_KAFKA) if not jars.why_not(one)]
    if found:
        settings["spark.driver.extraClassPath"] = os.pathsep.join(found)
    session = open_session("cutline-tests", None, SparkStart(settings=settings))
    yield session
    session.stop()


def _serving(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The S3 server that all tests share, each in a place of its own (``fresh_url``). Who stops it starts it again."""
    from cutline.testing.servers.s3 import S3Server

    yield from _serving(S3Server())


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The PostgreSQL server that all tests share, each in a database of its own (``fresh_database``)."""
    from cutline.testing.servers.postgres import PostgresServer

    yield from _serving(PostgresServer())


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """The NATS server that all tests share, each with a stream of its own (``fresh_stream``)."""
    from cutline.testing.servers.nats import NatsServer

    yield from _serving(NatsServer())


@pytest.fixture(scope="session")
def kafka_cluster() -> Iterator[KafkaCluster]:
    """The Kafka broker that all tests share, each with topics of its own (``fresh_topic``)."""
    from cutline.testing.servers.kafka import KafkaCluster

    if KafkaCluster.why_not():
        pytest.skip(KafkaCluster.why_not())
    cluster = KafkaCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    """The HDFS that all tests share, each in a folder of its own (``fresh_url``). Who stops a node starts it again."""
    from cutline.testing.servers.hdfs import Hdfs

    if Hdfs.why_not():
        pytest.skip(Hdfs.why_not())
    server = Hdfs()
    try:
        server.start()
        yield server
    finally:
        server.remove()
