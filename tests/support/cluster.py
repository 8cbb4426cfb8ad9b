"""A real standalone Spark cluster on loopback. Its workers may see little of this machine's files, as others would."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspark

from cutline.testing.servers.lifetime import start_child

_START_SECONDS = 60.0
#: Enough for an executor with the memory that Spark gives it by default.
_MEMORY = "1200m"


def can_hide_folders() -> bool:
    """Whether a process here may have mounts of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """One master, ``workers`` workers with a core each."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 1,
        hidden: Path | None = None,
        shown: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``hidden``: what workers do not see; ``shown``: folders in it that they see all the same."""
        self._folder = folder
        self._workers = workers
        self._hidden = hidden
        self._shown = shown
        self._environment = {
            **os.environ,
            **(environment or {}),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_NO_DAEMONIZE": "1",
        }
        self._port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def __enter__(self) -> Cluster:
        self._folder.mkdir(parents=True, exist_ok=True)
        launcher = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        package = "org.apache.spark.deploy"
        ports = ["--host", "127.0.0.1", "--webui-port", str(free_port())]
        self._start("master", [launcher, f"{package}.master.Master", *ports, "--port", str(self._port)])
        self._wait_listening()
        for number in range(self._workers):
            ports = ["--host", "127.0.0.1", "--webui-port", str(free_port())]
            place = ["--work-dir", str(self._folder / f"work-{number}"), "--cores", "1", "--memory", _MEMORY]
            worker = [launcher, f"{package}.worker.Worker", *ports, *place, self.url]
            if self._hidden is not None:
                worker = ["unshare", "-m", "sh", "-ec", f"{self._mounts(self._hidden)}\nexec {shlex.join(worker)}"]
            self._start(f"worker-{number}", worker)
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _mounts(self, hidden: Path) -> str:
        """Set the folders to be seen aside, hide everything, and put them back."""
        aside = self._folder / "aside"
        lines = []
        for number, shown in enumerate(self._shown):
            held = aside / str(number)
            held.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(shown))} {shlex.quote(str(held))}")
        lines.append(f"mount -t tmpfs none {shlex.quote(str(hidden))}")
        for number, shown in enumerate(self._shown):
            target = shlex.quote(str(shown))
            lines.append(f"mkdir -p {target}")
            lines.append(f"mount --bind {shlex.quote(str(aside / str(number)))} {target}")
        return "\n".join(lines)

    def _start(self, name: str, command: list[str]) -> None:
        with open(self._folder / f"{name}.log", "ab") as log:
            self._processes.append(
                start_child(
                    command,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env={**self._environment, "PYSPARK_PYTHON": sys.executable},
                    start_new_session=True,
                )
            )

    def _wait_listening(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError((self._folder / "master.log").read_text())
            time.sleep(0.1)
