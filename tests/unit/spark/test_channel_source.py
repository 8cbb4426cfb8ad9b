"""The gated source's planning side, as Spark's Python process runs it; no JVM is needed for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutline.spark.channel_source import ChannelReader, SegmentsPartition
from tests.support.channels import append_barrier, append_batch, open_log


def write_gate(folder: Path, admit: int, *, first: int = 0, max_bytes: int = 1 << 30) -> None:
    gate = {"admit": admit, "first": first, "lineage": [[1, 0]], "max_bytes": max_bytes}
    (folder / "gate.json").write_text(json.dumps(gate))


@pytest.fixture
def reader(tmp_path: Path) -> ChannelReader:
    log = open_log(tmp_path)
    append_batch(log)
    append_barrier(log, 1)
    append_batch(log, rows=0)
    append_batch(log)
    append_batch(log)
    write_gate(tmp_path, log.end)
    gate = str(tmp_path / "gate.json")
    return ChannelReader({"channel": "op", "folder": str(tmp_path), "gate": gate, "parallelism": "2"})


def at(position: int) -> dict[str, Any]:
    return {"channel": "op", "position": position}


def paths(reader: ChannelReader, first: int, end: int) -> list[str]:
    found = reader.partitions(at(first), at(end))
    return sorted(name for part in found if isinstance(part, SegmentsPartition) for name in part.names)


def test_it_reads_up_to_the_gate_and_no_further(reader: ChannelReader, tmp_path: Path) -> None:
    write_gate(tmp_path, 1)
    assert reader.latestOffset(at(0), None) == at(1)
    assert reader.latestOffset(at(1), None) == at(1)
    write_gate(tmp_path, 5)
    assert reader.latestOffset(at(1), None) == at(5)


def test_one_that_joins_later_begins_where_the_gate_says(reader: ChannelReader, tmp_path: Path) -> None:
    assert reader.initialOffset() == at(0)
    write_gate(tmp_path, 5, first=3)
    assert reader.initialOffset() == at(3)


def test_a_gate_that_is_replaced_is_seen_at_once(reader: ChannelReader, tmp_path: Path) -> None:
    for admit in (1, 4, 5):
        write_gate(tmp_path, admit)
        assert reader.latestOffset(at(0), None) == at(admit)


def test_barriers_and_empty_entries_move_no_position(reader: ChannelReader, tmp_path: Path) -> None:
    write_gate(tmp_path, 3)
    assert reader.latestOffset(at(1), None) == at(1)


def test_a_batch_is_limited_in_bytes_but_reads_at_least_one_entry(reader: ChannelReader, tmp_path: Path) -> None:
    write_gate(tmp_path, 5, max_bytes=1)
    assert reader.latestOffset(at(0), None) == at(1)
    assert reader.latestOffset(at(1), None) == at(4)


def test_segments_are_grouped_into_few_partitions(reader: ChannelReader) -> None:
    assert len(reader.partitions(at(0), at(5))) == 2
    assert paths(reader, 0, 5) == ["g1-b0.arrow", "g1-b2.arrow", "g1-b3.arrow"]
    assert paths(reader, 1, 4) == ["g1-b2.arrow"]
    assert reader.partitions(at(5), at(5)) == []


def test_a_position_of_another_channel_is_refused(reader: ChannelReader) -> None:
    other = {"channel": "other", "position": 1}
    with pytest.raises(ValueError, match="use them in the old order"):
        reader.latestOffset(other, None)
    with pytest.raises(ValueError, match="use them in the old order"):
        reader.partitions(other, at(5))
