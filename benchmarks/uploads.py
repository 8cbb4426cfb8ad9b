"""How fast blobs are uploaded to a remote tier: by threads of the driver, and by Spark's executors in their own jobs.

Both transfer the same files with the same code, alternately, to a folder and to a real S3 server on loopback. Besides
the rate, the benchmark reports the CPU time of the driver's own process, which also handles the queries' batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cutline.model.layout import Layout
from cutline.objects import open_store
from cutline.ports.objects import ObjectStore
from cutline.spark.executor_jobs import SparkExecutors
from cutline.spark.session import open_session
from cutline.tiers.driver_transfer import PARALLELISM, DriverTransfer, Transfer
from cutline.tiers.executor_transfer import ExecutorTransfer
from cutline.tiers.transfer import DOWNLOAD, UPLOAD, File

MB = 1 << 20
Opening = Callable[[], ObjectStore]


def content(kind: str, size_bytes: int, seed: int) -> bytes:
    """Return noise, or lines that zstd compresses to about a fifth."""
    chance = random.Random(seed)
    if kind == "noise":
        return chance.randbytes(size_bytes)
    lines = [f"key-{chance.randrange(10**9):09d},total={chance.randrange(10**4)},currency=INR\n" for _ in range(4_000)]
    block = "".join(chance.choices(lines, k=40_000)).encode()
    return (block * (size_bytes // len(block) + 1))[: size_bytes - 8] + seed.to_bytes(8, "little")


def make_blobs(root: Path, kind: str, size_mb: int, blob_mb: int) -> list[File]:
    files = []
    for seed in range(max(size_mb // blob_mb, 1)):
        data = content(kind, min(blob_mb, size_mb) * MB, seed)
        digest = hashlib.sha256(data).hexdigest()
        path = root / "blobs" / digest[:2] / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files.append(File(f"blobs/{digest[:2]}/{digest}", len(data)))
    return files


def measure(carrier: Transfer, files: list[File], root: Path) -> dict[str, float]:
    """Upload all, then download all; the caller gives a new place each time."""
    figures: dict[str, float] = {}
    size_mb = sum(file.size_bytes for file in files) / MB
    for name, errand in (("send", UPLOAD), ("fetch", DOWNLOAD)):
        if errand is DOWNLOAD:
            shutil.rmtree(root / "blobs")
        begun, cpu = time.monotonic(), time.process_time()
        carrier.run(errand, files, lambda *_: None)
        figures[f"{name}_mb_per_s"] = round(size_mb / (time.monotonic() - begun), 1)
        figures[f"{name}_driver_cpu_s"] = round(time.process_time() - cpu, 2)
    return figures


def run(arguments: argparse.Namespace, executors: SparkExecutors, fresh: Callable[[], Opening], kind: str) -> Any:
    results = []
    for size_mb in arguments.sizes:
        by: dict[str, list[dict[str, float]]] = {"driver": [], "executors": []}
        for number in range(arguments.rounds):
            for who in ("driver", "executors") if number % 2 else ("executors", "driver"):
                layout = Layout(Path(tempfile.mkdtemp(prefix="cutline-uploads-")), "uploads")
                root = layout.root
                root.mkdir()
                layout.identity.write_bytes(b"the flow's folder")
                try:
                    files = make_blobs(root, kind, size_mb, arguments.blob)
                    opening = fresh()
                    driver = DriverTransfer(opening(), root, PARALLELISM)
                    other = ExecutorTransfer(executors, opening, layout, driver, least_bytes=1)
                    by[who].append(measure(driver if who == "driver" else other, files, root))
                finally:
                    shutil.rmtree(root.parent)
        medians = {
            who: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            for who, rounds in by.items()
        }
        results.append({"content": kind, "size_mb": size_mb, **medians, "rounds": by})
    return results


def table(results: list[dict[str, Any]]) -> str:
    head = ["store", "content", "MB", "upload: driver", "executors", "ratio", "driver's CPU s", "with executors"]
    head += ["download: driver", "executors", "ratio"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for item in results:
        one, two = item["driver"], item["executors"]
        cells = [item["store"], item["content"], item["size_mb"], one["send_mb_per_s"], two["send_mb_per_s"]]
        cells += [round(two["send_mb_per_s"] / one["send_mb_per_s"], 2), one["send_driver_cpu_s"]]
        cells += [two["send_driver_cpu_s"], one["fetch_mb_per_s"], two["fetch_mb_per_s"]]
        cells += [round(two["fetch_mb_per_s"] / one["fetch_mb_per_s"], 2)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 512], help="MB in total")
    parser.add_argument("--blob", type=int, default=16, help="MB per blob")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stores", choices=("folder", "s3"), nargs="+", default=["folder", "s3"])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from cutline.testing.servers.s3 import S3Server

    server = S3Server()
    folder = Path(tempfile.mkdtemp(prefix="cutline-uploads-store-"))
    try:
        executors = SparkExecutors(open_session("uploads", None), "uploads")
        executors.run(abs, [1, 2], limit_s=60)  # the first job starts the Python workers
        if "s3" in arguments.stores:
            server.start()

        def fresh_folder() -> Opening:
            shutil.rmtree(folder)
            return partial(open_store, str(folder))

        def fresh_bucket() -> Opening:
            bucket = open_store(server.url, server.options)
            bucket.delete([info.path for info in bucket.walk()])  # each round starts with an empty bucket
            return partial(open_store, server.fresh_url(), server.options)

        fresh = {"folder": fresh_folder, "s3": fresh_bucket}
        results = [
            {"store": store, **result}
            for store in arguments.stores
            for kind in ("noise", "lines")
            for result in run(arguments, executors, fresh[store], kind)
        ]
        print(json.dumps(results) if arguments.json else table(results))
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
