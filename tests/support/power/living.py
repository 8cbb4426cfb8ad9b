"""The flow whose disk is recorded: real channels, segments and sinks; only Spark's queries are steps of the test.

``python -m tests.support.power.living <folder> <mode> <seed> <trouble> <life> …`` runs a story; see ``LIVES``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable

import cutline
import cutline.connectors.delta.maintenance
import tests.support.changing
from cutline.base import durable
from cutline.channels.segments import SegmentWriter, read_segment
from cutline.errors import CheckpointFailedError
from cutline.model.entries import Segment
from cutline.model.ids import FlowName, Generation, OperatorId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.objects import open_store
from cutline.ports.engine import SegmentPlace, StagedTask, StageJob
from cutline.ports.sinks import Sink, StageAttempt
from cutline.savepoints.store import Savepoints
from cutline.sinks import Delta, Parquet, SQLite
from cutline.storage.detached import DetachedLogs
from tests.support.changing import changing, counted
from tests.support.power.recording import BEGINS, KILLED, NOTES, SITE
from tests.support.spark_dirs import SparkDir
from tests.support.sparkless import NUMBERS, TOTALS, HandDrivenBatch, HandDrivenEngine, Row, SparklessFlow

SCHEMA = pa.schema([pa.field("number", pa.int64(), nullable=False), pa.field("seen", pa.int64(), nullable=False)])
SOURCE = os.path.dirname(cutline.__file__)

#: How the recorded flows differ: options, and what their sinks do.
MODES: dict[str, dict[str, Any]] = {
    "aligned": {"mode": "aligned"},
    # Its older checkpoints are kept without logs.
    "unaligned": {"mode": "unaligned", "max_concurrent_checkpoints": 2, "retain": "1h"},
    "per-operator": {"mode": "per-operator"},
    "at-once-rewind": {"mode": "unaligned", "publish": "at_once", "on_rollback": "rewind"},
    "at-once-keep": {"mode": "unaligned", "publish": "at_once", "on_rollback": "keep"},
}


class _StagedBatch(HandDrivenBatch):
    """Staged as executors do it, see ``cutline.spark.executor_staging``."""

    def stage(self, job: StageJob) -> list[StagedTask]:
        attempt = os.urandom(6).hex()
        named = StageAttempt(
            flow=job.flow,
            operator=job.operator,
            generation=job.generation,
            batch=job.batch,
            partition=0,
            attempt=attempt,
        )
        name = f"g{job.generation:06d}-b{job.batch:08d}-p0000-{attempt}.arrow"
        segment = SegmentWriter(job.segments, name) if job.segments is not None else None
        writers = {sink: stager.open(named) for sink, stager in job.stagers.items()}
        rows = pa.RecordBatch.from_pylist([{"number": one, "seen": seen} for one, seen in self._rows], schema=SCHEMA)
        if segment is not None:
            segment.write(rows)
        for writer in writers.values():
            writer.write(rows)
        described = segment.close() if segment is not None else None
        return [
            StagedTask(
                rows=len(self._rows),
                segment=Segment(**described) if described else None,
                pieces={sink: writer.close() for sink, writer in writers.items()},
            )
        ]


class _Engine(HandDrivenEngine):
    def plan(self) -> dict[OperatorId, OperatorPlan]:
        schema = SCHEMA.serialize().to_pybytes()
        return {
            name: OperatorPlan(operator=name, subtasks=1, is_stateful=True, schema_ipc=schema)
            for name in self._graph.names
        }


class RealSinksFlow(SparklessFlow):
    """The counting flow with a Parquet, a Delta and a SQLite sink, and a remote tier in a folder."""

    engine_type = _Engine
    batch_type = _StagedBatch

    def sinks(self, storage: Path) -> dict[str, Sink]:
        return {
            "files": Parquet(storage / "files"),
            "lake": Delta(storage / "lake"),
            "base": SQLite(storage / "base" / "base.sqlite", "totals"),
        }

    def numbers_in(self, place: SegmentPlace, name: str) -> list[int]:
        return [number for batch in read_segment(place, name) for number in batch.column("number").to_pylist()]

    def run_planned(self) -> None:
        """Run what Spark has planned or the log remembers, as queries do when they start."""
        for operator in self.graph.names:
            for _ in range(200):
                if (
                    SparkDir(self.spark_dir(operator), subtasks=1).committed
                    >= self.operators[operator].channel.last_batch
                ):
                    break
                self.step(operator)


def published(storage: Path) -> dict[str, list[Row]]:
    """What readers of each sink see, sorted."""
    found: dict[str, list[dict[str, Any]]] = {"files": [], "lake": [], "base": []}
    # Only what is published: other folders come and go while they are listed.
    if files := [str(path) for path in (storage / "files").glob("cutline_epoch=*/**/*.parquet")]:
        found["files"] = ds.dataset(files, format="parquet", schema=SCHEMA).to_table().to_pylist()
    if DeltaTable.is_deltatable(str(storage / "lake")):
        found["lake"] = pa.table(DeltaTable(storage / "lake").to_pyarrow_table()).to_pylist()
    if (storage / "base/base.sqlite").exists():
        with contextlib.closing(sqlite3.connect(storage / "base/base.sqlite")) as db:
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name = 'totals'")]
            rows = db.execute("SELECT number, seen FROM totals").fetchall() if names else []
        found["base"] = [{"number": number, "seen": seen} for number, seen in rows]
    return {name: sorted([row["number"], row["seen"]] for row in rows) for name, rows in found.items()}


def settings_of(storage: Path, mode: str) -> dict[str, Any]:
    settings = {"retain_checkpoints": 1, "channel_capacity_entries": 1_000, **MODES[mode]}
    if settings["mode"] != "per-operator":
        settings["remote"] = str(storage / "remote")
    return settings


# ---------------------------------------------------------------------- the lives


class Life:
    """One process of a story. Every life of a story has its own random choices."""

    def __init__(self, storage: Path, mode: str, seed: int, say: Callable[[str], None]) -> None:
        self.storage = storage
        self.mode = mode
        self.chance = random.Random(seed)
        self.say = say

    def start(self) -> RealSinksFlow:
        flow = RealSinksFlow(self.storage, **settings_of(self.storage, self.mode))
        flow.run_planned()
        self.say(f"recovered {flow.recovered.path}")
        return flow

    def checkpoint(self, flow: RealSinksFlow) -> None:
        is_immediate = MODES[self.mode].get("publish") == "at_once"
        shown = self.rows()
        flow.checkpoint(aligned=self.mode == "aligned")
        flow.wait(flow.coordinator.is_settled)
        # With immediate publishing, the newest batch may just be visible; those before the checkpoint are published.
        self.say(f"showed {shown}" if is_immediate else f"published {self.rows()}")

    def rows(self) -> int:
        """How many rows the readers of every sink see."""
        return min(len({number for number, _ in rows}) for rows in published(self.storage).values())

    def random_steps(self, flow: RealSinksFlow, count: int) -> None:
        asked = []
        for _ in range(count):
            match self.chance.choice(["number", "number", "count", "count", "ask", "publish"]):
                case "number":
                    flow.step(NUMBERS)
                case "count":
                    flow.step(TOTALS)
                case "ask":
                    asked.append(flow.request(aligned=self.mode == "aligned"))
                case _:
                    self.checkpoint(flow)
        for future in asked:
            flow.wait(lambda future=future: future.done() or (not flow.step(TOTALS) and future.done()))  # type: ignore[misc]
            with contextlib.suppress(CheckpointFailedError):  # subsumed by a later one
                future.result(0)

    def die(self, flow: RealSinksFlow) -> None:
        """In the middle of a checkpoint whose barrier waits for Spark."""
        flow.step(NUMBERS)
        flow.wait(lambda: flow.step(TOTALS, commit=False))
        flow.request(aligned=self.mode == "aligned")
        flow.wait(lambda: flow.operators[NUMBERS].channel.barriers() != [])
        os._exit(KILLED)

    def first(self) -> None:
        """It runs, with checkpoints, collection, copies and a savepoint, until it is killed."""
        flow = self.start()
        self.random_steps(flow, 12)
        self.checkpoint(flow)
        if self.mode != "per-operator":
            self.save(flow)
        self.random_steps(flow, 6)
        self.die(flow)

    def save(self, flow: RealSinksFlow) -> None:
        flow.emit(1)
        flow.run.savepoint("kept", drain=False)
        self.say("saved kept")

    def second(self) -> None:
        """It continues after the kill, and ends in order."""
        flow = self.start()
        self.random_steps(flow, 6)
        self.checkpoint(flow)
        if self.mode != "per-operator":
            flow.run.savepoint("spare", drain=False)
        flow.emit(3)
        flow.stop()
        if self.mode != "per-operator":
            self.clone_and_delete(flow.layout)

    def idle(self) -> None:
        """It starts, publishes what is left to publish, and does nothing more."""
        flow = self.start()
        flow.wait(flow.coordinator.is_settled)
        self.say(f"published {self.rows()}")
        flow.stop()

    def clone_and_delete(self, layout: Layout) -> None:
        savepoints = Savepoints(layout, open_store)
        savepoints.clone("spare", Layout(self.storage / "storage", "copy"), FlowName("copy"))
        self.say("cloned copy")
        savepoints.delete("spare")

    def third(self) -> None:
        """The directory of an operator is lost: it is restored, and runs on until it is killed."""
        self.lose("storage/counting/spark/totals")
        flow = self.start()
        self.random_steps(flow, 6)
        self.checkpoint(flow)
        self.die(flow)

    def lose(self, name: str) -> None:
        """In one step: what a half-deleted folder does is not asked here."""
        self.say(f"lost {name}")
        os.rename(self.storage / name, self.storage / f"lost-{Path(name).name}")

    def fourth(self) -> None:
        """The whole folder is lost: the flow comes back from the remote tier."""
        if self.mode == "per-operator":
            return
        self.lose("storage")
        flow = self.start()
        self.random_steps(flow, 6)
        self.checkpoint(flow)
        flow.stop()

    def goes_back(self) -> None:
        """It goes back to a checkpoint whose logs are gone; a start before that was killed when it had begun to."""
        flow = self.start()
        epochs = []
        for _ in range(4):
            flow.step(NUMBERS)
            flow.step(TOTALS)
            flow.step(NUMBERS)
            epochs.append(flow.checkpoint())
            flow.wait(flow.coordinator.is_settled)
        detached = DetachedLogs(flow.layout)
        flow.wait(lambda: detached.has(epochs[1]) and flow.operators[NUMBERS].channel.start > 3)
        manifest = flow.checkpoints.load_manifest(epochs[1])
        generation = flow.recovered.generation
        flow.stop()
        detached.put_back(manifest, Generation(generation + 1))
        self.start().stop()
        flow = RealSinksFlow(self.storage, **settings_of(self.storage, self.mode), restore_to=epochs[1])
        flow.run_planned()
        self.say(f"recovered {flow.recovered.path}")
        flow.drain()
        self.checkpoint(flow)
        flow.stop()

    def renamed(self) -> None:
        """Another flow, whose source is renamed while rows are in flight."""
        tests.support.changing.__dict__["HandDrivenBatch"] = _SyncedBatch
        with changing(self.storage, {"source": (), "counter": ("source",)}, {"table": "counter"}) as flow:
            flow.emit(3)
            flow.settle()
            flow.emit(2)
            epoch = flow.checkpoint()
        new = {"origin": (), "counter": ("origin",)}
        with changing(self.storage, new, {"table": "counter"}, restore_to=epoch, rename={"source": "origin"}) as flow:
            flow.emit(1)
            flow.settle()
            assert flow.table("table") == counted(0, 6)


LIVES = ("first", "second", "third", "fourth")


class _SyncedBatch(HandDrivenBatch):
    """Its rows are durable when it is staged, as those that executors write."""

    def stage(self, job: StageJob) -> list[StagedTask]:
        staged = super().stage(job)
        for task in staged:
            if task.segment is not None and job.segments is not None:
                durable.fsync_file(Path(job.segments.url) / task.segment.name)
        return staged


def _note(text: str) -> None:
    os.write(_notes(), text.encode())


_descriptor: list[int] = []


def _notes() -> int:
    if not _descriptor:
        _descriptor.append(os.open(NOTES, os.O_WRONLY))
    return _descriptor[0]


@dataclass(frozen=True)
class Trouble:
    """What happens to a life: at the n-th sync of a place in the source, it is killed, or the sync fails."""

    kind: str = ""
    site: str = ""
    number: int = 1

    @classmethod
    def parse(cls, text: str) -> Trouble:
        kind, site, number = text.split(",") if text else ("", "", "1")
        return cls(kind, site, int(number))


def _without_links() -> None:
    """As on a file system without hard links, for the sinks and for what is kept without logs."""
    link = os.link

    def refused(src: Any, dst: Any, **more: Any) -> None:
        if "/files/_cutline/prepared/" in str(dst) or "/detached/" in f"{src} {dst}":
            raise OSError(errno.EPERM, "no links here")
        link(src, dst, **more)

    os.__dict__["link"] = refused


def _name_syncs(trouble: Trouble) -> None:
    """Every sync is preceded by a note that names the calls in the source which led to it."""
    sync = os.fsync
    hits = itertools.count(1)

    def noted(fd: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        found: list[str] = []
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(SOURCE):
                found.append(f"{path[len(SOURCE) + 1 :]}:{frame.f_lineno}")
            frame = frame.f_back
        if trouble.site in found and next(hits) == trouble.number:
            if trouble.kind == "die":
                os._exit(KILLED)
            raise OSError(errno.EIO, "the disk says no")
        _note(SITE + " ".join(reversed(found)))
        sync(fd)

    os.fsync = noted


def condense_often() -> None:
    """Delta's log gets its checkpoints after some hundred versions; a story has about twenty."""
    cutline.connectors.delta.maintenance.CHECKPOINT_INTERVAL = 4


def main(storage: Path, mode: str, seed: int, life: str, trouble: Trouble) -> None:
    _name_syncs(trouble)
    _notes()
    condense_often()
    if trouble.kind == "nolinks":
        _without_links()
    getattr(Life(storage, mode, seed, _note), life)()


def main_of_all(storage: Path, mode: str, seed: int, trouble: str, lives: Sequence[str]) -> None:
    """Each life is a process of its own, forked from this one: what they import is imported, and traced, once."""
    for number, life in enumerate(lives):
        notes = os.open(NOTES, os.O_WRONLY)
        os.write(notes, BEGINS)
        os.close(notes)
        child = os.fork()
        if child == 0:
            return main(storage, mode, seed, life, Trouble.parse(trouble if number == 0 else ""))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, KILLED):
            sys.exit(f"the life {life} failed: {status}")
    return None


if __name__ == "__main__":
    main_of_all(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
