"""File systems that Spark's Hadoop client opens, with clients that give up soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cutline.testing.servers import jars
from cutline.testing.servers.hdfs import Hdfs
from cutline.testing.servers.process import ServerProcess
from cutline.testing.servers.s3 import BUCKET, S3Server

#: Hadoop's own: minutes.
HDFS_SETTINGS = {
    "dfs.replication": "1",
    "ipc.client.connect.max.retries": "2",
    "ipc.client.connect.retry.interval": "300",
    "ipc.client.rpc-timeout.ms": "3000",
    "dfs.client.socket-timeout": "3000",
}


def s3a_settings(server: S3Server) -> dict[str, str]:
    """For this server's bucket only. Hadoop waits at least 15 seconds for an answer, whatever it is told."""
    bucket = f"fs.s3a.bucket.{BUCKET}"
    return {
        f"{bucket}.endpoint": server.options["endpoint"],
        f"{bucket}.endpoint.region": server.options["region"],
        f"{bucket}.access.key": server.options["access_key_id"],
        f"{bucket}.secret.key": server.options["secret_access_key"],
        f"{bucket}.path.style.access": "true",
        f"{bucket}.attempts.maximum": "1",
        f"{bucket}.retry.limit": "2",
        f"{bucket}.retry.interval": "100ms",
        f"{bucket}.connection.timeout": "15s",
        f"{bucket}.connection.request.timeout": "15s",
        f"{bucket}.connection.establish.timeout": "15s",
    }


@dataclass(frozen=True, slots=True)
class Place:
    """A file system, and the server without which it does not answer."""

    url: str
    server: ServerProcess
    #: Starts what was killed, and returns when files can be written.
    start: Callable[[], None]
    settings: dict[str, str]


def place_on(kind: str, request: pytest.FixtureRequest) -> Place:
    """A fresh place on ``hdfs`` or ``s3a``; skips the test if its jars are not there."""
    if kind == "hdfs":
        hdfs: Hdfs = request.getfixturevalue("hdfs")
        return Place(hdfs.fresh_url(), hdfs.namenode, hdfs.start, HDFS_SETTINGS)
    if jars.why_not(jars.S3A):
        pytest.skip(jars.why_not(jars.S3A))
    server: S3Server = request.getfixturevalue("s3_server")
    return Place(server.fresh_url().replace("s3://", "s3a://"), server, server.start, s3a_settings(server))


def configured(session: Any, settings: dict[str, str]) -> Iterator[None]:
    """Give a running session these settings, and take them away again."""
    configuration = session.sparkContext._jsc.hadoopConfiguration()
    for name, value in settings.items():
        configuration.set(name, value)
    yield
    for name in settings:
        configuration.unset(name)
