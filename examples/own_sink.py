"""Your own two-phase sink: one file of JSON lines per epoch. No base class, nothing to register.

    cutline run examples/own_sink.py --until-done     # or: python examples/own_sink.py

docs/sinks.md, "Write your own", says what must hold, and tests/torture/test_own_sink.py runs Cutline's suite on it.
INPUT_DIR and OUTPUT_DIR select other folders.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from cutline import Flow
from cutline.base.crashpoints import crashpoint
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.model.staging import Piece, StagedBatch
from cutline.ports.sinks import SinkContext, StageAttempt
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.sink_ledger import SinkLedger, Verdict, judge, refusal


class LineWriter:
    """Receives the rows of one task, on an executor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.lines += [json.dumps(row) for row in batch.to_pylist()]

    def close(self) -> list[Piece]:
        """The file is durable when this returns. A task without rows stages nothing."""
        if not self.lines:
            return []
        put(self.path, "\n".join(self.lines) + "\n")
        return [{"name": self.path.name, "size_bytes": self.path.stat().st_size}]


@dataclass(frozen=True)
class LineStager:
    """Small, because Spark sends it to the executors."""

    folder: Path

    def open(self, attempt: StageAttempt) -> LineWriter:
        # No other attempt, batch or generation has this name.
        name = f"g{attempt.generation}-b{attempt.batch}-p{attempt.partition}-{attempt.attempt}"
        return LineWriter(self.folder / name)


class JsonLines:
    """Exactly once. ``epoch-000007-<digest>.jsonl`` exists whole or not at all: creating it is the commit."""

    output_modes = frozenset({"append"})
    can_rewind = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.staged = self.folder / "staged"
        self.ledger = self.folder / "ledger.json"

    def open(self, context: SinkContext) -> None:
        self.staged.mkdir(parents=True, exist_ok=True)
        schema = str(pa.ipc.read_schema(pa.BufferReader(context.schema_ipc)))
        owner = {"flow": context.flow, "sink": context.sink, "schema": schema, "rewound": NO_EPOCH}
        if not self.ledger.exists():
            put(self.ledger, json.dumps(owner))
        found = json.loads(self.ledger.read_text())
        if found | {"rewound": NO_EPOCH} != owner:
            raise SinkError(
                f"the folder is for other rows: {found}, not {owner}", next_step="give the sink another folder"
            )

    def stager(self) -> LineStager:
        return LineStager(self.staged)

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        return {}  # staged files are already durable

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        crashpoint("sink-commit-begun", permit.sink)
        names = [piece["name"] for batch in staged for piece in batch.pieces]
        if names and self.is_due(permit, names):
            # Exactly the given pieces: the folder also holds other attempts and later batches.
            content = "".join((self.staged / name).read_text() for name in names)
            crashpoint("sink-commit-half", permit.sink)
            put(self.path_of(permit.epoch, names), content)
        crashpoint("sink-commit-done", permit.sink)
        self.abort(staged)  # published, so no longer needed

    def is_due(self, permit: CommitPermit, names: list[str]) -> bool:
        """Cutline judges; the sink only says what its folder shows."""
        ledger = self.as_ledger()
        verdict = judge(ledger, permit, digest_of(names))
        if verdict not in (Verdict.PUBLISH, Verdict.ALREADY):
            raise refusal(verdict, ledger, permit, target="the folder", path=self.folder)
        return verdict is Verdict.PUBLISH

    def as_ledger(self) -> SinkLedger:
        """What is published and with which content, and the highest epoch that was rewound."""
        epochs = self.epochs()
        record = json.loads(self.ledger.read_text())
        return SinkLedger(
            flow=record["flow"],
            sink=record["sink"],
            published=max(epochs, default=NO_EPOCH),
            rewound=record["rewound"],
            digests={epoch: path.stem.split("-")[2] for epoch, path in epochs.items()},
        )

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        for batch in staged:
            for piece in batch.pieces:
                (self.staged / piece["name"]).unlink(missing_ok=True)

    def published(self) -> Epoch | None:
        return max(self.epochs(), default=None)

    def highest(self) -> Epoch:
        return self.as_ledger().highest

    def rewind(self, epoch: Epoch) -> None:
        # Recorded first, so that a late commit of the abandoned history is refused.
        put(self.ledger, json.dumps(json.loads(self.ledger.read_text()) | {"rewound": self.highest()}))
        for later in sorted(self.epochs(), reverse=True):
            if later > epoch:
                self.epochs()[later].unlink()
                crashpoint("sink-rewind-half")

    def path_of(self, epoch: Epoch, names: list[str]) -> Path:
        """The digest is part of the name: so a repeat is told from an epoch of another history."""
        return self.folder / f"epoch-{epoch:06}-{digest_of(names)}.jsonl"

    def epochs(self) -> dict[Epoch, Path]:
        return {Epoch(int(path.name.split("-")[1])): path for path in self.folder.glob("epoch-*.jsonl")}


def digest_of(names: list[str]) -> str:
    """Identifies what an epoch publishes."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def put(path: Path, text: str) -> None:
    """Write a file that exists whole or not at all, and survives a power cut."""
    temp = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    with temp.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temp.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def build(input_dir: Path, output_dir: Path) -> Flow:
    flow = Flow("own_sink")

    @flow.operator()
    def words(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("word string, length int").json(str(input_dir))

    flow.sink(words, JsonLines(output_dir), name="words")
    return flow


def write_samples(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        words = ("one", "class", "with", "nine", "methods", "is", "all", "there", "is", "to", "it")
        lines = [json.dumps({"word": word, "length": len(word)}) for word in words]
        (folder / "samples.json").write_text("\n".join(lines))


DATA = Path("cutline-data/examples/own_sink")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['words'].published_epoch}: {OUTPUT}")
