"""Run as a program: executors send files to a folder, and the JVM is killed meanwhile. Writes down what has arrived."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from cutline.model.layout import Layout
from cutline.objects import open_store
from cutline.ports.objects import ObjectStore
from cutline.spark.executor_jobs import SparkExecutors
from cutline.spark.session import jvm_pid, open_session
from cutline.tiers.driver_transfer import DriverTransfer
from cutline.tiers.executor_transfer import ExecutorTransfer
from cutline.tiers.transfer import UPLOAD, File


def open_slowly(place: str, begun: str) -> ObjectStore:
    Path(begun).touch()
    time.sleep(30)
    return open_store(place)


def main(folder: Path) -> None:
    layout = Layout(folder, "flow")
    root = layout.root
    root.mkdir()
    layout.identity.write_bytes(b"the flow's folder")
    files = [File(f"file-{number}", 1_000) for number in range(5)]
    for file in files:
        (root / file.name).write_bytes(os.urandom(file.size_bytes))
    session = open_session("sending", None)
    victim = jvm_pid(session)
    place, begun = str(folder / "store"), folder / "begun"

    def kill() -> None:
        while not begun.exists():
            time.sleep(0.05)
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    carrier = ExecutorTransfer(
        SparkExecutors(session, "sending"),
        partial(open_slowly, place, str(begun)),
        layout,
        DriverTransfer(open_store(place), root, 2),
        least_bytes=1,
    )
    arrived: list[str] = []
    carrier.run(UPLOAD, files, lambda carried, _: arrived.append(carried.file.name))
    # Not to its output, which Spark's workers hold open for as long as they live.
    (folder / "arrived.json").write_text(json.dumps(sorted(arrived)))
    os._exit(0)  # pyspark would wait for the JVM


if __name__ == "__main__":
    main(Path(sys.argv[1]))
