"""The cost of one checkpoint for the coordinator, with 100 to 100,000 acknowledging subtasks.

The real core and the real stores (SQLite metadata, manifest on disk, both synced), driven as in production: after every
event the benchmark asks for the next deadline, and it performs the core's actions before the next event. It creates the
acknowledgements before the clock starts; there is no Spark and no network.

Two shapes: few large operators, and many small ones. Two ways to acknowledge: one message for all subtasks of an
operator (what Cutline's workers send), and one for each subtask.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from cutline.coordinator.history import statistics as figures
from cutline.coordinator.manifests import operator_cut
from cutline.model.checkpoint import Manifest
from cutline.model.cut import CutPoint, OperatorAck, SubtaskAck, Timings
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.model.layout import Layout
from cutline.ports.metadata import EpochOutcome, PendingRecord
from cutline.protocol.checkpoint.coordinator import Coordinator
from cutline.protocol.checkpoint.setup import Settings, Topology
from cutline.protocol.checkpoint.trigger import TriggerPolicy, TriggerSettings
from cutline.protocol.history.retention import RetentionPolicy
from cutline.protocol.messages.coordinator import (
    CheckpointRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    InjectBarrier,
    ManifestStored,
    PendingStored,
    StoreManifest,
    StorePending,
)
from cutline.protocol.messages.wire import OperatorAcked, SinkCommitted
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.metadata.sqlite import SqliteMetadata

FLOW = FlowName("scale")
GOAL_SUBTASKS = 10_000
GOAL_SECONDS = 1.0
DECADES = (100, 1_000, 10_000, 100_000)
#: Subtasks → operators.
SHAPES: dict[str, Callable[[int], int]] = {
    "10 operators": lambda subtasks: 10,
    "10 subtasks each": lambda subtasks: subtasks // 10,
}


class Shell:
    """Performs the core's actions on one thread, as in production."""

    def __init__(self, folder: Path, operators: dict[OperatorId, int]) -> None:
        layout = Layout(folder, FLOW)
        layout.root.mkdir(parents=True)
        self._metadata = SqliteMetadata(layout.metadata)
        self._snapshots = LocalCheckpointStore(layout)
        self.generation = self._metadata.next_generation(Generation(1))
        names = list(operators)
        self._core = Coordinator(
            topology=Topology(
                flow=FLOW,
                subtasks=operators,
                sources=frozenset(names[: max(len(names) // 10, 1)]),
                sinks={names[-1]: (SinkId("out"),)},
            ),
            generation=self.generation,
            settings=Settings(
                timeout_ms=600_000,
                operator_timeouts_ms={names[0]: 300_000},
                alignment_limit_ms=50,
                retention=RetentionPolicy(count=3),
                trigger=TriggerPolicy(TriggerSettings(interval_ms=0)),
            ),
        )
        self._core.start([], now_ms=_now_ms())
        self.injected: set[Epoch] = set()

    def take(self, event: CoordinatorEvent) -> None:
        self._core.next_deadline_ms(now_ms=_now_ms())
        todo = deque(self._core.handle(event, now_ms=_now_ms()))
        while todo:
            outcome = self._perform(todo.popleft())
            if outcome is not None:
                todo.extend(self._core.handle(outcome, now_ms=_now_ms()))

    def is_settled(self) -> bool:
        return self._core.is_settled()

    @property
    def complete(self) -> int:
        return len(self._core.complete)

    def _perform(self, action: CoordinatorAction) -> CoordinatorEvent | None:
        match action:
            case StorePending():
                self._metadata.store_pending(
                    PendingRecord(epoch=action.epoch, generation=self.generation, terms=action.terms)
                )
                return PendingStored(epoch=action.epoch)
            case InjectBarrier():
                self.injected.add(action.epoch)
            case StoreManifest():
                return self._store_manifest(action)
            case CommitSink():
                self._metadata.store_published(action.permit.sink, action.permit.epoch)
                permit = action.permit
                return SinkCommitted(operator=permit.operator, sink=permit.sink, epoch=permit.epoch)
            case _:
                pass
        return None

    def _store_manifest(self, action: StoreManifest) -> CoordinatorEvent:
        manifest = Manifest(
            flow=FLOW,
            epoch=action.epoch,
            generation=self.generation,
            previous_epoch=action.previous_epoch,
            started_ms=action.started_ms,
            completed_ms=_now_ms(),
            operators={name: operator_cut(ack) for name, ack in action.acks.items()},
            channels={},
        )
        self._snapshots.store_manifest(manifest)
        self._metadata.store_outcome(
            EpochOutcome(
                epoch=action.epoch,
                generation=self.generation,
                started_ms=manifest.started_ms,
                ended_ms=manifest.completed_ms,
                outcome="completed",
                reason="",
                details=figures(manifest),
            )
        )
        return ManifestStored(epoch=action.epoch, completed_ms=manifest.completed_ms)

    def make_room(self, epoch: Epoch) -> None:
        """In production the operators' records have already created the epoch's folder."""
        self._folder(epoch).mkdir(parents=True, exist_ok=True)

    def _folder(self, epoch: Epoch) -> Path:
        return self._snapshots._layout.checkpoint(epoch)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def acknowledgements(
    operators: dict[OperatorId, int], epoch: Epoch, generation: Generation, *, batched: bool
) -> list[OperatorAcked]:
    """Alternate between the operators, subtask by subtask, as the messages would arrive."""
    events = []
    for name, count in operators.items():
        parts = tuple(
            SubtaskAck(subtask=Subtask(i), files=12, size_bytes=1 << 20, new_bytes=1 << 14, async_ms=1.5)
            for i in range(count)
        )
        for part in [parts] if batched else [(one,) for one in parts]:
            ack = OperatorAck(
                operator=name,
                epoch=epoch,
                generation=generation,
                cut=CutPoint(batch=BatchId(epoch), barrier=Position(epoch), positions={}, aligned=True),
                subtasks=part,
                record_sha256="0" * 64,
                timings=Timings(sync_ms=1.0, async_ms=20.0),
            )
            events.append((part[0].subtask, OperatorAcked(ack=ack)))
    events.sort(key=lambda event: event[0])
    return [event for _, event in events]


def measure(subtasks: int, operators: int, *, batched: bool, checkpoints: int) -> dict[str, Any]:
    per_operator = {OperatorId(f"op{i:05d}"): subtasks // operators for i in range(operators)}
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    ack_seconds: list[float] = []
    messages = 0
    with tempfile.TemporaryDirectory(prefix="cutline-scale-") as folder:
        shell = Shell(Path(folder), per_operator)
        for number in range(1, checkpoints + 1):
            epoch = Epoch(number)
            acks = acknowledgements(per_operator, epoch, shell.generation, batched=batched)
            messages = len(acks)
            shell.make_room(epoch)
            gc.collect()
            begun, cpu_begun = time.perf_counter(), time.process_time()
            shell.take(CheckpointRequested(request=f"r{number}"))
            assert epoch in shell.injected
            collecting = time.perf_counter()
            for ack in acks[:-1]:
                shell.take(ack)
            collected = time.perf_counter()
            shell.take(acks[-1])
            seconds.append(time.perf_counter() - begun)
            cpu_seconds.append(time.process_time() - cpu_begun)
            ack_seconds.append(collected - collecting)
            assert shell.is_settled()
            assert shell.complete == min(number, 3)
    median = statistics.median(seconds)
    return {
        "subtasks": subtasks,
        "operators": operators,
        "messages": messages,
        "checkpoint_ms": round(median * 1_000, 2),
        "min_ms": round(min(seconds) * 1_000, 2),
        "max_ms": round(max(seconds) * 1_000, 2),
        "cpu_ms": round(statistics.median(cpu_seconds) * 1_000, 2),
        "tally_ms": round(statistics.median(ack_seconds) * 1_000, 2),
        "subtasks_per_s": round(subtasks / median),
        #: Without the last message, which also stores the manifest.
        "acks_per_s": round((messages - 1) / statistics.median(ack_seconds)),
    }


def run(decades: list[int], checkpoints: int) -> dict[str, Any]:
    series: dict[str, list[dict[str, Any]]] = {}
    for shape, operators_of in SHAPES.items():
        for way, batched in (("one message per operator", True), ("one message per subtask", False)):
            rows: list[dict[str, Any]] = []
            for subtasks in decades:
                row = measure(subtasks, operators_of(subtasks), batched=batched, checkpoints=checkpoints)
                # By CPU time: with wall-clock time, disk waits would hide the growth of small checkpoints.
                row["growth"] = round(row["cpu_ms"] / rows[-1]["cpu_ms"], 2) if rows else None
                rows.append(row)
                print(f"{shape}, {way}: {row}", file=sys.stderr)
            series[f"{shape}, {way}"] = rows
    every = [row for rows in series.values() for row in rows]
    at_goal = [row["checkpoint_ms"] for row in every if row["subtasks"] == GOAL_SUBTASKS]
    growths = [
        row["growth"] / (row["subtasks"] / before["subtasks"])
        for rows in series.values()
        for before, row in pairwise(rows)
    ]
    return {
        "benchmark": "coordinator_scale",
        "checkpoints": checkpoints,
        "series": series,
        "slowest_ms_at_10000": max(at_goal, default=None),
        "is_fast_enough": all(ms <= GOAL_SECONDS * 1_000 for ms in at_goal),
        #: 1: time grows in proportion to the subtasks.
        "worst_growth_over_linear": round(max(growths, default=0.0), 2),
    }


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, rows in result["series"].items():
        titles = ("subtasks", 9), ("messages", 9), ("ms", 10), ("cpu ms", 10), ("of it tally", 12), ("acks/s", 9)
        lines += [name, " ".join(f"{title:>{width}}" for title, width in (*titles, ("growth", 7)))]
        lines += [
            f"{row['subtasks']:>9} {row['messages']:>9} {row['checkpoint_ms']:>10} {row['cpu_ms']:>10} "
            f"{row['tally_ms']:>12} {row['acks_per_s']:>9} {row['growth'] or '':>7}"
            for row in rows
        ]
    goal = "met" if result["is_fast_enough"] else "NOT MET"
    lines.append(f"10,000 subtasks under 1 s: {goal} ({result['slowest_ms_at_10000']} ms at worst)")
    lines.append(f"worst growth per decade over linear: {result['worst_growth_over_linear']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subtasks", type=int, nargs="+", default=list(DECADES))
    parser.add_argument("--checkpoints", type=int, default=5, help="checkpoints of each size; the median counts")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    arguments = parser.parse_args()
    result = run(arguments.subtasks, arguments.checkpoints)
    print(json.dumps(result) if arguments.json else table(result))


if __name__ == "__main__":
    main()
