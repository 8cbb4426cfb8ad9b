"""The cost of a checkpoint of large state when little of it has changed.

The flow: a source that reads files, and one stateful operator (a count and a sum per key). After loading all keys
the benchmark runs rounds: a file with a random share of the keys, each once; a batch; a checkpoint; its upload.

changed      changed keys × 42 bytes: the encoded size of a key in Spark here. A row of one long takes 16 bytes, one of
             two longs 24, and each begins with a version byte. Spark's changelog writes 9 more bytes per key (type,
             lengths) and a header per file, then compresses all; "raw" is its size before, read from its blocks.
new          bytes of state files that the local disk did not have before this checkpoint (manifest, ``new_bytes``)
full         bytes of all state files that the checkpoint needs (``size_bytes``): a copy of everything
pause        finding and holding the files (``sync_ms``)
local        from the trigger to the manifest (``duration_ms``)
remote       from the trigger until the checkpoint is in the remote tier

Spark folds changelogs into a new snapshot (zip and SST files; the heap backend: a snapshot file) after ten versions,
on a separate thread. The interval of that thread is set to a few seconds, so that short runs have such rounds too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline import Flow
from cutline.model.ids import Epoch, FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.sinks import Parquet
from cutline.storage.local import LocalStore

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import DataFrame, SparkSession

    from cutline.model.checkpoint import OperatorRecord
    from cutline.runtime.handle import RunningFlow

FLOW, STATEFUL = FlowName("incremental"), OperatorId("totals")
BACKENDS = ("rocksdb-changelog", "rocksdb", "heap")
LARGE_KEYS = 4_000_000
LOAD_ROWS = 250_000
#: Encoded key and value: 8 bytes of null bits, 8 per column, and a version byte each.
KEY_VALUE_BYTES = (1 + 8 + 8) + (1 + 8 + 16)
MAINTENANCE = "5s"
WARM_UP_LIMIT = 30
_LZ4_HEAD = struct.Struct("<8sBIII")
_SNAPSHOT_SUFFIXES = (".zip", ".snapshot", ".sst")


def build(folder: Path) -> Flow:
    flow = Flow(FLOW)

    @flow.operator()
    def changes(spark: SparkSession) -> DataFrame:
        files = spark.readStream.schema("key long, amount long").option("maxFilesPerTrigger", 1)
        return files.parquet(str(folder / "in"))

    @flow.operator(inputs=[changes], subtasks=2, name=STATEFUL)
    def totals(changes: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        return changes.groupBy("key").agg(F.count("*").alias("changes"), F.sum("amount").alias("amount"))

    flow.sink(totals, Parquet(str(folder / "out")), output_mode="update")
    return flow


def write_rows(folder: Path, number: int, keys: np.ndarray, rng: np.random.Generator) -> None:
    """Write one input file, which readers see whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = folder / "in" / f".{number}"
    pq.write_table(pa.table({"key": keys, "amount": rng.integers(1, 10_000, len(keys))}), temporary)
    temporary.rename(folder / "in" / f"{number:06d}.parquet")


def raw_changelog_bytes(path: Path) -> int:
    """Return the size of a changelog before compression, as its lz4 blocks record it."""
    data, position, size = path.read_bytes(), 0, 0
    while position < len(data):
        magic, _, packed, original, _ = _LZ4_HEAD.unpack_from(data, position)
        if magic != b"LZ4Block":
            raise ValueError(f"no lz4 block at {position} of {path}")
        position += _LZ4_HEAD.size + packed
        size += original
    return size


class Case:
    """One flow with a number of keys on one state backend."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, remote: str, options: dict[str, str]) -> None:
        import numpy as np

        from cutline.config.spark_settings import SparkStart
        from cutline.spark.session import open_session

        self._keys = arguments.keys[0]
        self._changed = max(round(self._keys * arguments.share), 1)
        self._folder = folder
        (folder / "in").mkdir()
        self._rng = np.random.default_rng(1)
        self._files = 0
        self._rows = 0
        self._layout = Layout(folder / "storage", FLOW)
        self._seen: set[str] = set()
        spark = open_session(
            FLOW, None, SparkStart(settings={"spark.sql.streaming.stateStore.maintenanceInterval": MAINTENANCE})
        )
        self._has_remote = bool(remote)
        self._run: RunningFlow = build(folder).start(
            spark=spark,
            storage=str(folder / "storage"),
            checkpoint_interval=0,
            checkpoint_timeout="120s",
            state_backend=arguments.backend[0],
            remote=remote,
            remote_options=options,
        )

    def measure(self, epochs: int) -> dict[str, Any]:
        import numpy as np

        begun = time.monotonic()
        for first in range(0, self._keys, LOAD_ROWS):
            self._feed(np.arange(first, min(first + LOAD_ROWS, self._keys)))
        self._wait_processed()
        load = self._checkpoint(self._keys)
        print(f"{self._keys:,} keys loaded after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        # The first snapshot holds everything in any case: the steady state begins after it.
        warm = 0
        while warm < 3 or (warm < WARM_UP_LIMIT and not self._has_snapshot()):
            self._round()
            warm += 1
        rounds = [self._round() for _ in range(epochs)]
        self._run.stop()
        return summary(self._keys, self._changed, warm, load, rounds)

    def _feed(self, keys: np.ndarray) -> None:
        write_rows(self._folder, self._files, keys, self._rng)
        self._files += 1
        self._rows += len(keys)

    def _wait_processed(self, seconds: float = 300) -> None:
        """Every key is one row of output, so the operator's row count shows its progress."""
        deadline = time.monotonic() + seconds
        while (rows := self._run.status().operators[STATEFUL].rows) < self._rows:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{rows} of {self._rows} rows")
            self._run.await_termination(timeout=0.01)  # raises the error that ended the flow, if any

    def _round(self) -> dict[str, Any]:
        self._feed(self._rng.choice(self._keys, self._changed, replace=False))
        self._wait_processed()
        return self._checkpoint(self._changed)

    def _checkpoint(self, changed: int) -> dict[str, Any]:
        sent = self._sent_bytes()
        begun = time.monotonic()
        epoch = self._run.trigger_checkpoint()
        if self._has_remote and not self._run.wait_remote(epoch, timeout="120s"):
            raise TimeoutError("not in the remote tier")
        remote_ms = (time.monotonic() - begun) * 1000
        details = self._run.checkpoints(1)[0].details
        own = details["operators"][STATEFUL]
        record = self._record(epoch)
        new = [file for subtask in record.subtasks for file in subtask.files if file.path not in self._seen]
        self._seen = {file.path for subtask in record.subtasks for file in subtask.files}
        changelogs = [self._layout.blob(file.sha256) for file in new if file.path.endswith(".changelog")]
        return {
            "epoch": epoch,
            "changed_bytes": changed * KEY_VALUE_BYTES,
            "raw_changelog_bytes": sum(raw_changelog_bytes(path) for path in changelogs),
            "new_bytes": own["new_bytes"],
            "full_bytes": own["size_bytes"],
            "new_snapshot_files": sum(file.path.endswith(_SNAPSHOT_SUFFIXES) for file in new),
            "sync_ms": own["sync_ms"],
            "async_ms": own["async_ms"],
            "duration_ms": details["duration_ms"],
            "remote_ms": remote_ms if self._has_remote else None,
            "sent_bytes": self._sent_bytes() - sent,
        }

    def _record(self, epoch: int) -> OperatorRecord:
        store = LocalStore.reading(self._layout)
        return store.checkpoints.load_record(store.checkpoints.load_manifest(Epoch(epoch)), STATEFUL)

    def _has_snapshot(self) -> bool:
        return any(name.endswith(_SNAPSHOT_SUFFIXES) for name in self._seen)

    def _sent_bytes(self) -> int:
        remote = self._run.status().remote
        return remote.sent_bytes if remote is not None else 0


def percentile(values: Iterable[float], share: float) -> float:
    """By nearest rank: one of the values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def spread(rounds: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    values = [item[name] for item in rounds if item[name] is not None]
    if not values:
        return {}
    return {
        "p50": round(statistics.median(values), 2),
        "p99": round(percentile(values, 0.99), 2),
        "max": round(max(values), 2),
    }


def summary(keys: int, changed: int, warm: int, load: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    plain = [item for item in rounds if not item["new_snapshot_files"]]
    folded = [item for item in rounds if item["new_snapshot_files"]]

    def over_changed(items: Sequence[dict[str, Any]], name: str) -> float | None:
        total = sum(item["changed_bytes"] for item in items)
        return round(sum(item[name] for item in items) / total, 3) if total else None

    full = statistics.mean(item["full_bytes"] for item in rounds)
    return {
        "keys": keys,
        "changed_keys": changed,
        "changed_bytes": changed * KEY_VALUE_BYTES,
        "load_new_bytes": load["new_bytes"],
        "load_ms": load["duration_ms"],
        "warm_up_epochs": warm,
        "epochs": len(rounds),
        "epochs_with_new_snapshot_files": len(folded),
        "raw_over_changed": over_changed(plain, "raw_changelog_bytes"),
        "new_over_changed": over_changed(plain, "new_bytes"),
        "new_over_changed_of_snapshot_epochs": over_changed(folded, "new_bytes"),
        "new_over_changed_of_all": over_changed(rounds, "new_bytes"),
        "full_bytes": round(full),
        "new_over_full": round(statistics.median(item["new_bytes"] for item in rounds) / full, 4),
        "sent_over_changed_of_all": over_changed(rounds, "sent_bytes"),
        "pause_ms": spread(rounds, "sync_ms"),
        "local_ms": spread(rounds, "duration_ms"),
        "local_ms_of_snapshot_epochs": spread(folded, "duration_ms"),
        "local_ms_of_other_epochs": spread(plain, "duration_ms"),
        "remote_ms": spread(rounds, "remote_ms"),
        "rounds": rounds,
    }


def child(arguments: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="cutline-incremental-"))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    server = None
    try:
        remote, options = {"none": "", "folder": str(folder / "remote")}.get(arguments.remote, ""), {}
        if arguments.remote == "s3":
            from cutline.testing.servers.s3 import S3Server

            server = S3Server()
            server.start()
            remote, options = server.fresh_url(), server.options
        print(json.dumps(Case(arguments, folder, remote, options).measure(arguments.epochs)))
    finally:
        if server is not None:
            server.remove()
        shutil.rmtree(folder, ignore_errors=True)


def run_case(arguments: argparse.Namespace, backend: str, keys: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--keys", str(keys), "--backend", backend]
    command += ["--epochs", str(arguments.epochs), "--share", str(arguments.share), "--remote", arguments.remote]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"backend": backend, **result}


def table(results: list[dict[str, Any]]) -> str:
    head = [
        "backend",
        "keys",
        "changed",
        "new / changed: changelog epochs, all",
        "full",
        "new / full",
        "pause p50 / p99",
    ]
    head += ["local p50 / max", "with new tables: epochs, local max", "remote p50 / max", "sent / changed"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for item in results:
        folded, remote = item["local_ms_of_snapshot_epochs"], item["remote_ms"]
        cells = [
            item["backend"],
            f"{item['keys']:,}",
            f"{item['changed_bytes'] / 1000:,.0f} kB",
            f"{item['new_over_changed'] or '–'}, {item['new_over_changed_of_all']}",
            f"{item['full_bytes'] / 1e6:,.1f} MB",
            f"{item['new_over_full']:.4f}",
            f"{item['pause_ms']['p50']:.1f} / {item['pause_ms']['p99']:.1f} ms",
            f"{item['local_ms']['p50']:.0f} / {item['local_ms']['max']:.0f} ms",
            f"{item['epochs_with_new_snapshot_files']} of {item['epochs']}, {folded.get('max', 0):.0f} ms",
            f"{remote['p50']:.0f} / {remote['max']:.0f} ms" if remote else "–",
            f"{item['sent_over_changed_of_all']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--large", action="store_true", help=f"also {LARGE_KEYS:,} keys")
    parser.add_argument("--share", type=float, default=0.01, help="share of the keys that changes per epoch")
    parser.add_argument("--epochs", type=int, default=40, help="measured checkpoints")
    parser.add_argument("--backend", choices=BACKENDS, nargs="+", default=["rocksdb-changelog"])
    parser.add_argument("--remote", choices=("none", "folder", "s3"), default="folder")
    parser.add_argument("--s3", action="store_const", const="s3", dest="remote", help="a real S3 server on loopback")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    sizes = [*arguments.keys, LARGE_KEYS] if arguments.large else arguments.keys
    results = [run_case(arguments, backend, keys) for backend in arguments.backend for keys in sizes]
    print(json.dumps(results) if arguments.json else table(results))


if __name__ == "__main__":
    main()
