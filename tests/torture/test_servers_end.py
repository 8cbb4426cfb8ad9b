"""A server that a test has started ends with the test's process, also when that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
LIMIT_SECONDS = 30.0


@pytest.mark.parametrize(
    ("module", "server"), [("nats", "NatsServer"), ("postgres", "PostgresServer"), ("s3", "S3Server")]
)
def test_a_server_ends_with_its_parent_and_not_with_the_thread_that_started_it(module: str, server: str) -> None:
    script = PARENT.format(module=module, server=server)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        try:
            assert pid in _using(folder)
        finally:
            parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_SECONDS
    while still := _using(folder):
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
