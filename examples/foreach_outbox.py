"""Your own function as a sink: each checkpoint's messages go to an outbox, under a key that never changes.

    cutline run examples/foreach_outbox.py --until-done     # or: python examples/foreach_outbox.py

The outbox represents any receiver that remembers idempotency keys (most payment and mail services do). A crash may
repeat a call; the outbox then finds the key and keeps one message. INPUT_DIR and OUTPUT_DIR select other folders.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from cutline import Flow, sinks


class Outbox:
    """Accepts each key once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rows: Iterator[pa.RecordBatch], epoch: int, idempotency_key: str) -> None:
        """If this raises, Cutline calls it again later, with the same rows and the same key."""
        target = self.folder / f"{idempotency_key.replace('/', '_')}.json"
        if target.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        messages = [row for batch in rows for row in batch.to_pylist()]
        half = target.with_suffix(".half")
        half.write_text(json.dumps({"epoch": epoch, "messages": messages}))
        half.rename(target)


def build(input_dir: Path, output_dir: Path) -> Flow:
    flow = Flow("foreach_outbox")

    @flow.operator()
    def messages(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("to string, text string").json(str(input_dir))

    sink = sinks.Foreach(Outbox(output_dir / "sent"), staging=output_dir / "staging")
    # A sent message cannot be rewound: after a restore, repeated work is sent again.
    flow.sink(messages, sink, name="outbox", on_rollback="keep")
    return flow


def write_samples(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"to": f"user{n}@example.org", "text": f"message {n}"} for n in range(20)]
        (folder / "samples.json").write_text("\n".join(map(json.dumps, rows)))


DATA = Path("cutline-data/examples/foreach_outbox")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['outbox'].published_epoch}: {OUTPUT}")
