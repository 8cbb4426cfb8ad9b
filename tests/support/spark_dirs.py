"""A ``spark_checkpoint_dir`` as Spark leaves it, written by hand: a heap state of format 1 and no source logs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from cutline.model.ids import NO_BATCH


class SparkDir:
    """Plans, runs and commits batches in a folder."""

    def __init__(self, root: Path, *, subtasks: int = 2) -> None:
        self.root = root
        self.subtasks = subtasks
        if not (root / "metadata").exists():
            self._write("metadata", '{"id":"6b0e"}')

    def _write(self, name: str, data: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # As Spark does it: the name appears with the whole content.
        temp = path.with_name(f".{path.name}.tmp")
        temp.write_text(data)
        os.replace(temp, path)

    @property
    def committed(self) -> int:
        return max((int(path.name) for path in self.root.glob("commits/*") if path.name.isdigit()), default=NO_BATCH)

    def plan(self, batch: int, positions: Mapping[str, int] | None = None) -> None:
        head = json.dumps({"batchWatermarkMs": 0, "conf": {"spark.sql.shuffle.partitions": str(self.subtasks)}})
        lines = [json.dumps({"channel": name, "position": at}) for name, at in (positions or {}).items()]
        self._write(f"offsets/{batch}", "\n".join(["v1", head, *lines]))

    def planned(self, batch: int) -> dict[str, int] | None:
        """The positions a batch was planned with; None if it was not."""
        try:
            lines = (self.root / "offsets" / str(batch)).read_text().split("\n")[2:]
        except FileNotFoundError:
            return None
        return {offset["channel"]: offset["position"] for offset in map(json.loads, lines)}

    def commit(self, batch: int, *, state: str = "") -> None:
        """State of the batch in every partition, then Spark's commit."""
        for subtask in range(self.subtasks):
            self._write(f"state/0/{subtask}/{batch + 1}.delta", f"{state or batch}-{subtask}")
        self._write(f"commits/{batch}", f'v1\n{{"nextBatchWatermarkMs":{1_000 + batch}}}')

    def run(self, batch: int, positions: Mapping[str, int] | None = None, *, state: str = "") -> None:
        self.plan(batch, positions)
        self.commit(batch, state=state)


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
