"""The disk that a history of checkpoints takes over a week, against keeping three.

The flow: a million keys (a count and a sum of each), of which 1 % change per minute; a checkpoint every ten seconds.

learned      A real flow on real Spark with that state runs one batch and one checkpoint after the other, each with a
             sixth of a percent of the keys. Of every checkpoint its files are noted: content and size.
simulated    The clock, and the checkpoints beyond those learned: per state partition, the checkpoints from one
             compaction of RocksDB to the next are repeated, with other content. The retention and the counting of
             what checkpoints share is Cutline's own code (``CompleteEpochs``, ``ReachedContent``). No state is written.
checked      The first simulated two hours are performed by the real store too, with files of a few bytes: it must hold
             exactly the content that was counted.

Counted is what checkpoints need: state files, each content once, manifests and records. Spark's own directory, the
channels' logs and the sinks' targets are not counted; they do not depend on how many checkpoints are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from incremental import FLOW, LOAD_ROWS, STATEFUL, Case

from cutline.config.options import WEEK
from cutline.config.values import Ladder
from cutline.connectors.replay_guard import ReplayGuard
from cutline.coordinator.manifests import operator_cut
from cutline.model.checkpoint import ChannelCut, Manifest, OperatorRecord
from cutline.model.cut import Timings
from cutline.model.ids import (
    NO_EPOCH,
    START,
    BatchId,
    Epoch,
    Generation,
    Position,
    Subtask,
)
from cutline.model.layout import Layout
from cutline.ports.query_dir import FileSet
from cutline.protocol.checkpoint.complete_epochs import CompleteEpochs
from cutline.protocol.history.retention import RetentionPolicy, Rung
from cutline.protocol.publish.publishing import CompleteEpoch, Publisher
from cutline.storage.local import LocalStore
from cutline.storage.reached import ReachedContent
from cutline.worker.snapshots import acknowledgement

KEYS, SHARE_PER_MINUTE, INTERVAL_S = 1_000_000, 0.01, 10
HOUR_S, DAY_S = 3_600, 86_400
#: When the disk is looked at.
MOMENTS_S = {"1 h": HOUR_S, "2 h": 2 * HOUR_S, "1 d": DAY_S, "2 d": 2 * DAY_S, "7 d": 7 * DAY_S, "8 d": 8 * DAY_S}
CHECKED_S = 2 * HOUR_S
#: Of the bytes of tables: if fewer are those of the checkpoint before, they were compacted.
_SHARED_SHARE = 0.1
#: With --quick, every so many checkpoints of an hour are looked at.
SAMPLE = 30


# ---------------------------------------------------------------------- learning from a real flow


class Learning(Case):
    """The flow of ``incremental.py``; notes the files of every checkpoint."""

    def learn(self, epochs: int) -> dict[str, Any]:
        import numpy as np

        for first in range(0, self._keys, LOAD_ROWS):
            self._feed(np.arange(first, min(first + LOAD_ROWS, self._keys)))
        self._wait_processed()
        self._checkpoint(self._keys)
        print(f"{self._keys:,} keys loaded", file=sys.stderr, flush=True)
        noted = []
        for number in range(epochs):
            epoch = self._round()["epoch"]
            record = self._record(epoch)
            own = sum(path.stat().st_size for path in self._layout.checkpoint(Epoch(epoch)).iterdir())
            noted.append(
                {
                    "subtasks": [
                        [[file.path, file.sha256, file.size_bytes] for file in one.files] for one in record.subtasks
                    ],
                    "records_bytes": own,
                }
            )
            if number % 20 == 19:
                print(f"{number + 1} of {epochs} checkpoints", file=sys.stderr, flush=True)
        self._run.stop()
        return {"keys": self._keys, "changed": self._changed, "epochs": noted}


def learn(arguments: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="cutline-history-"))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    try:
        share = SHARE_PER_MINUTE * INTERVAL_S / 60
        case = argparse.Namespace(keys=[arguments.keys], share=share, backend=["rocksdb-changelog"])
        found = Learning(case, folder, "", {}).learn(arguments.learned)
        Path(arguments.trace).write_text(json.dumps(found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------- a week of checkpoints


class Content(NamedTuple):
    """One file of a checkpoint: what tells its content from any other, and its size."""

    name: str
    size_bytes: int


class Partition:
    """The files of one state partition after each checkpoint, for as long as one likes."""

    def __init__(self, noted: Sequence[Sequence[Sequence[Any]]]) -> None:
        """``noted``: path, hash and size of the files of each learned checkpoint."""
        self._noted = noted
        tables = [{sha: size for path, sha, size in files if path.endswith(".sst")} for files in noted]
        #: The checkpoints of which nearly all tables are new: a compaction has rewritten them.
        self.compactions = [
            at
            for at in range(1, len(noted))
            if tables[at - 1]
            and sum(tables[at][sha] for sha in tables[at].keys() & tables[at - 1])
            < _SHARED_SHARE * sum(tables[at].values())
        ]
        if len(self.compactions) < 2:
            raise SystemExit("too few checkpoints were learned: no two compactions are among them (--learned)")
        self.first, self.last = self.compactions[0], self.compactions[-1]
        born: dict[str, int] = {}
        for at, files in enumerate(noted):
            for _, sha, _ in files:
                born.setdefault(sha, at)
        self._born = born

    def at(self, checkpoint: int) -> Iterator[Content]:
        """The learned checkpoints up to the last compaction, then those between compactions again and again."""
        period = self.last - self.first
        turn, step = (0, checkpoint) if checkpoint < self.last else divmod(checkpoint - self.first, period)
        for _, sha, size in self._noted[step if turn == 0 else self.first + step]:
            # A changelog of before the compaction belongs to the turn before.
            is_earlier = turn > 0 and self._born[sha] < self.first
            yield Content(f"{sha}/{turn - is_earlier}", size)


class Trace:
    """What every checkpoint of the flow needs."""

    def __init__(self, learned: dict[str, Any]) -> None:
        epochs = learned["epochs"]
        count = len(epochs[0]["subtasks"])
        self.partitions = [Partition([epoch["subtasks"][one] for epoch in epochs]) for one in range(count)]
        self.records_bytes = round(statistics.mean(epoch["records_bytes"] for epoch in epochs))
        self.full_bytes = round(statistics.mean(sum(f[2] for s in e["subtasks"] for f in s) for e in epochs))
        self.learned = len(epochs)
        self._newest: tuple[int, list[list[Content]]] = (-1, [])

    def at(self, checkpoint: int) -> list[list[Content]]:
        if self._newest[0] != checkpoint:
            self._newest = checkpoint, [list(partition.at(checkpoint)) for partition in self.partitions]
        return self._newest[1]


def policy_of(name: str) -> RetentionPolicy:
    ladder = tuple(Rung(until_ms=until, every_ms=every) for until, every in WEEK)
    return RetentionPolicy(count=3, ladder=ladder if name == "ladder" else ())


class Disk:
    """Counts what the checkpoints of a flow need, as they come and go."""

    def __init__(self, trace: Trace, policy: RetentionPolicy) -> None:
        self._trace = trace
        publisher = Publisher(FLOW, {}, {}, retry_ms=1, retry_limit_ms=1, silence_ms=1)
        self._epochs = CompleteEpochs([], publisher, policy, [])
        self._sizes: dict[str, int] = {}
        self._reached = ReachedContent(self._content)
        self.state_bytes = 0
        self.released: tuple[Epoch, ...] = ()

    def _content(self, epoch: Epoch) -> list[str]:
        names = []
        for partition in self._trace.at(epoch - 1):
            for name, size in partition:
                if name not in self._sizes:
                    self._sizes[name] = size
                    self.state_bytes += size
                names.append(name)
        return names

    def checkpoint(self, epoch: Epoch, now_ms: int) -> None:
        before = Epoch(epoch - 1)
        self._epochs.add(
            CompleteEpoch(epoch=epoch, generation=Generation(1), previous_epoch=before, batches={}, completed_ms=now_ms)
        )
        actions = self._epochs.release(now_ms, Epoch(epoch + 1))
        self.released = tuple(one for action in actions for one in action.drop)
        for name in self._reached.update([one.epoch for one in self._epochs.epochs]):
            self.state_bytes -= self._sizes.pop(name)

    @property
    def kept(self) -> list[Epoch]:
        return [one.epoch for one in self._epochs.epochs]

    @property
    def names(self) -> set[str]:
        return set(self._sizes)

    def used_bytes(self) -> int:
        return self.state_bytes + len(self.kept) * self._trace.records_bytes


def week(trace: Trace) -> list[dict[str, Any]]:
    """Bytes are means over the hour before each moment: what is used depends on when RocksDB has compacted last."""
    disks = {name: Disk(trace, policy_of(name)) for name in ("three", "ladder")}
    used = {name: deque[int](maxlen=HOUR_S // INTERVAL_S) for name in disks}
    rows = []
    for number in range(1, max(MOMENTS_S.values()) // INTERVAL_S + 1):
        now_s = number * INTERVAL_S
        for name, disk in disks.items():
            disk.checkpoint(Epoch(number), now_s * 1000)
            used[name].append(disk.used_bytes())
        for moment in (name for name, at_s in MOMENTS_S.items() if at_s == now_s):
            three, ladder = (statistics.mean(used[name]) for name in ("three", "ladder"))
            kept = len(disks["ladder"].kept)
            row = {"after": moment, "taken": number, "ladder_kept": kept, "ratio": round(ladder / three, 1)}
            row |= {"three_bytes": round(three), "ladder_bytes": round(ladder), "most_bytes": max(used["ladder"])}
            rows.append({**row, "per_kept_bytes": round(ladder / kept)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def quick_week(trace: Trace) -> list[dict[str, Any]]:
    """The same from the retention policy alone, at some moments: seconds instead of minutes."""

    def used(kept: Sequence[Epoch]) -> int:
        sizes = {name: size for epoch in kept for files in trace.at(epoch - 1) for name, size in files}
        return sum(sizes.values()) + len(kept) * trace.records_bytes

    policy, rows = policy_of("ladder"), []
    for moment, at_s in MOMENTS_S.items():
        three, ladder, kept = [], [], list[Epoch]()
        for newest in range((at_s - HOUR_S) // INTERVAL_S + SAMPLE, at_s // INTERVAL_S + 1, SAMPLE):
            last = [Epoch(number) for number in range(max(newest - 2, 1), newest + 1)]
            oldest = max(newest - (policy.ladder[-1].until_ms // 1000 // INTERVAL_S), 1)
            times = ((Epoch(number), number * INTERVAL_S * 1000) for number in range(oldest, newest + 1))
            kept = sorted({*policy.on_ladder(times, newest * INTERVAL_S * 1000), *last})
            three.append(used(last))
            ladder.append(used(kept))
        mean_three, mean_ladder = statistics.mean(three), statistics.mean(ladder)
        row = {"after": moment, "taken": at_s // INTERVAL_S, "ladder_kept": len(kept)}
        row |= {"three_bytes": round(mean_three), "ladder_bytes": round(mean_ladder), "most_bytes": max(ladder)}
        ratio = {"ratio": round(mean_ladder / mean_three, 1), "per_kept_bytes": round(mean_ladder / len(kept))}
        rows.append({**row, **ratio})
    return rows


# ---------------------------------------------------------------------- the real store


def check_with_store(trace: Trace, seconds: int) -> int:
    """The same checkpoints in a real store, with files of a few bytes; returns how many were compared."""
    folder = Path(tempfile.mkdtemp(prefix="cutline-history-"))
    durable_sync, os.fsync = os.fsync, lambda _: None  # the counting is checked here, not the disk
    try:
        layout = Layout(folder / "storage", FLOW)
        store = LocalStore.open(layout, ReplayGuard()).checkpoints
        disk = Disk(trace, policy_of("ladder"))
        count = seconds // INTERVAL_S
        for number in range(1, count + 1):
            store_checkpoint(store, layout, folder / "spark", Epoch(number), trace.at(number - 1))
            disk.checkpoint(Epoch(number), number * INTERVAL_S * 1000)
            store.collect(disk.released, Epoch(number + 1))
            if number % 60 == 0:
                stored = {path.read_text() for path in layout.blobs.glob("*/*")}
                if stored != disk.names or store.epochs() != disk.kept:
                    raise SystemExit(f"checkpoint {number}: the store holds other content than was counted")
        return count
    finally:
        os.fsync = durable_sync
        shutil.rmtree(folder, ignore_errors=True)


def store_checkpoint(store: Any, layout: Layout, spark: Path, epoch: Epoch, partitions: list[list[Content]]) -> None:
    """As an operator and the coordinator do it, on files whose text is the name of their content."""
    names: dict[int, list[str]] = {}
    shutil.rmtree(spark, ignore_errors=True)
    for number, contents in enumerate(partitions):
        for content in contents:
            path = spark / str(number) / content.name.replace("/", "-")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.name)
            names.setdefault(number, []).append(path.relative_to(spark).as_posix())
    files = FileSet(
        batch=BatchId(epoch), subtasks={Subtask(number): listed for number, listed in names.items()}, shared=[]
    )
    subtasks, shared = store.store_files(store.hold(STATEFUL, epoch, spark, files))
    record = OperatorRecord(
        flow=FLOW,
        operator=STATEFUL,
        epoch=epoch,
        generation=Generation(1),
        batch=BatchId(epoch),
        barrier=Position(epoch),
        positions={},
        aligned=True,
        watermark_ms=0,
        subtasks=subtasks,
        shared=shared,
        sinks={},
        timings=Timings(),
    )
    stored = store.store_record(record)
    cut = operator_cut(acknowledgement(stored))
    store.store_manifest(
        Manifest(
            flow=FLOW,
            epoch=epoch,
            generation=Generation(1),
            previous_epoch=NO_EPOCH,
            started_ms=0,
            completed_ms=0,
            operators={STATEFUL: cut},
            channels={STATEFUL: ChannelCut(lineage=[(Generation(1), START)], barrier=Position(epoch), in_flight={})},
        )
    )


# ---------------------------------------------------------------------- the command


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| after | checkpoints | keeping three | the ladder keeps | the ladder | ratio | per kept checkpoint |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        cells = [
            row["after"],
            f"{row['taken']:,}",
            f"{row['three_bytes'] / 1e6:,.0f} MB",
            f"{row['ladder_kept']:,}",
            f"{row['ladder_bytes'] / 1e6:,.0f} MB",
            f"{row['ratio']}",
            f"{row['per_kept_bytes'] / 1e6:,.1f} MB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--learned", type=int, default=200, help="checkpoints of the real flow")
    parser.add_argument("--trace", help="where the learned checkpoints are stored; an existing file is used as it is")
    parser.add_argument("--quick", action="store_true", help="ask the retention policy at some moments only")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        learn(arguments)
        return
    path = Path(arguments.trace or Path(tempfile.mkdtemp(prefix="cutline-history-")) / "trace.json")
    if not path.exists():
        command = [sys.executable, __file__, "--child", "--keys", str(arguments.keys)]
        subprocess.run([*command, "--learned", str(arguments.learned), "--trace", str(path)], check=True)
    trace = Trace(json.loads(path.read_text()))
    begun = time.monotonic()
    checked = 0 if arguments.quick else check_with_store(trace, CHECKED_S)
    rows = quick_week(trace) if arguments.quick else week(trace)
    figures = {
        "learned": trace.learned,
        "checkpoints_between_compactions": [one.last - one.first for one in trace.partitions],
        "full_bytes": trace.full_bytes,
        "records_bytes": trace.records_bytes,
        "checked": checked,
        "simulated_in_s": round(time.monotonic() - begun),
        "ladder": Ladder().show(WEEK),
    }
    if arguments.json:
        print(json.dumps({**figures, "rows": rows}))
    else:
        print(json.dumps(figures), file=sys.stderr)
        print(table(rows))


if __name__ == "__main__":
    main()
