"""The gated source: a Python data source that reads a channel as far as the gate allows.

``latestOffset`` runs in a Python process beside the driver and reads the gate from a small file, which the driver
replaces atomically. Every source of every query starts such a process: each pays for the imports of this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

FORMAT = "cutline_channel"


class SegmentsPartition(InputPartition):
    """The segments that one task reads, all from one place."""

    def __init__(self, url: str, options: dict[str, str], names: list[str]) -> None:
        self.url = url
        self.options = options
        self.names = names


class ChannelSource(DataSource):
    """``spark.readStream.format("cutline_channel")``; created by the engine, not by users."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ChannelReader(self.options)


class ChannelReader(DataSourceStreamReader):
    """Reads entries in [start, end); positions count neither barriers nor empty entries."""

    def __init__(self, options: Any) -> None:
        self._channel = options["channel"]
        self._folder = Path(options["folder"])
        self._gate_path = options["gate"]
        self._parallelism = int(options["parallelism"])
        self._gate: dict[str, Any] = {}
        #: Entries read before; they never change.
        self._entries: dict[int, dict[str, Any]] = {}

    def initialOffset(self) -> dict[str, Any]:
        """Not always the beginning: an operator added to a flow later finds logs whose beginning was collected."""
        return self._offset(int(self._read_gate()["first"]))

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        self._check(start)
        gate = self._read_gate()
        admit = int(gate["admit"])
        position = int(start["position"])
        if admit <= position:
            return start
        end, size = position, 0
        for entry in self._rows_between(position, admit):
            size += entry["size_bytes"]
            if end > position and size > gate["max_bytes"]:
                break
            end = entry["seq"] + 1
        return self._offset(end)

    def furthest(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        own = [position for position in positions if position.get("channel") == self._channel]
        return max(own, key=lambda position: int(position["position"]), default=None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._check(start)
        self._check(end)
        first, last = int(start["position"]), int(end["position"])
        segments = [
            (segment["size_bytes"], segment["name"])
            for entry in self._rows_between(first, last)
            for segment in entry["segments"]
        ]
        for old in [seq for seq in self._entries if seq < first]:
            del self._entries[old]
        url, store_options = self._place()
        return [SegmentsPartition(url, store_options, names) for names in _balanced(segments, self._parallelism)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from cutline.channels.segments import read_segment  # executors only
        from cutline.ports.engine import SegmentPlace

        if isinstance(partition, SegmentsPartition):
            place = SegmentPlace(url=partition.url, options=partition.options)
            for name in partition.names:
                yield from read_segment(place, name)

    # ------------------------------------------------------------------ inside

    def _place(self) -> tuple[str, dict[str, str]]:
        """Where the segments are, as ``cutline.channels.segment_store`` writes it; importing it here costs too much."""
        try:
            with open(self._folder.parent / "segments.json", "rb") as file:
                place: dict[str, Any] = json.loads(file.read())["body"]["place"]
        except FileNotFoundError:
            place = {"url": ""}
        if not place["url"]:
            return str(self._folder / "data"), {}
        return f"{place['url']}/{self._folder.name}", place.get("options", {})

    def _offset(self, position: int) -> dict[str, Any]:
        return {"channel": self._channel, "position": position}

    def _check(self, offset: dict[str, Any]) -> None:
        """Spark identifies sources by their place in the plan: if that changes, a source gets another one's offsets."""
        if offset["channel"] != self._channel:
            raise ValueError(
                f"a position in channel {offset['channel']!r} was given to the reader of {self._channel!r}: "
                "the operator uses its inputs in a new order; use them in the old order"
            )

    def _read_gate(self) -> dict[str, Any]:
        with open(self._gate_path, "rb") as file:
            self._gate = json.loads(file.read())
        return self._gate

    def _rows_between(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        """Data entries with rows in [first, end)."""
        if not self._gate:
            self._read_gate()
        for seq in range(first, end):
            entry = self._entries.get(seq)
            if entry is None:
                entry = self._entries[seq] = self._load(seq)
            if entry["type"] == "data" and entry["rows"]:
                yield entry

    def _load(self, seq: int) -> dict[str, Any]:
        generation = next(g for g, start in reversed(self._gate["lineage"]) if start <= seq)
        path = self._folder / f"g{generation:06d}" / f"{seq:012d}.json"
        with open(path, "rb") as file:
            body: dict[str, Any] = json.loads(file.read())["body"]
        if body["type"] == "data":
            body["size_bytes"] = sum(segment["size_bytes"] for segment in body["segments"])
        return body


def _balanced(segments: list[tuple[int, str]], parallelism: int) -> list[list[str]]:
    """A few partitions of similar size, for any number of segments."""
    count = min(len(segments), max(parallelism, 1))
    groups: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for size, path in sorted(segments, reverse=True):
        smallest = min(range(count), key=lambda index: groups[index][0])
        groups[smallest] = (groups[smallest][0] + size, [*groups[smallest][1], path])
    return [paths for _, paths in groups]
