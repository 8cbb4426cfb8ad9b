"""A server that a test has started ends with the test's process, also when that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cutline.testing.servers.kafka import KafkaCluster

pytestmark = [pytest.mark.kill]

#: Starts a server on a thread that ends, says its number, and lives on.
PARENT = """
import sys, threading, time
from cutline.testing.servers.{module} import {server}
server = {server}()
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
time.sleep(0.3)
assert server._is_ready(), "it ended with the thread"
print(server._process.pid, server._folder, flush=True)
time.sleep(600)
"""
#: The same for a cluster.
CLUSTER_PARENT = """
import sys, threading, time
from cutline.testing.servers.kafka import KafkaCluster
cluster = KafkaCluster({nodes})
thread = threading.Thread(target=cluster.start)
thread.start()
thread.join()
time.sleep(0.3)
assert all(node._is_ready() for node in cluster.nodes), "a node ended with the thread"
print(*(f"{{node._process.pid}} {{node._folder}}" for node in cluster.nodes), flush=True)
time.sleep(600)
"""
LIMIT_SECONDS = 30.0


@pytest.mark.parametrize(
    ("module", "server"), [("nats", "NatsServer"), ("postgres", "PostgresServer"), ("s3", "S3Server")]
)
def test_a_server_ends_with_its_parent_and_not_with_the_thread_that_started_it(module: str, server: str) -> None:
    _check_end(PARENT.format(module=module, server=server))


@pytest.mark.parametrize("nodes", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_cluster_ends_with_its_parent(nodes: int) -> None:
    if KafkaCluster.why_not():
        pytest.skip(KafkaCluster.why_not())
    _check_end(CLUSTER_PARENT.format(nodes=nodes))


def _check_end(script: str) -> None:
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        words = parent.stdout.readline().split()
        folders = words[1::2]
        try:
            assert folders
            assert all(pid in _using(folder) for pid, folder in zip(words[::2], folders, strict=True))
        finally:
            parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_SECONDS
    while still := [pid for folder in folders for pid in _using(folder)]:
        assert time.monotonic() < deadline, f"still running: {still}"
        time.sleep(0.02)


def _using(folder: str) -> list[str]:
    """The processes whose working directory lies in the server's folder: it, and all that it has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            cwd = os.readlink(process / "cwd")
        except OSError:
            continue  # it ended, or is a zombie
        if cwd.startswith(folder):
            found.append(process.name)
    return found
