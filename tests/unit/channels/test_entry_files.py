"""The stored form of entries."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cutline.base import records
from cutline.channels import entry_files as codec
from cutline.errors import DamagedRecordError
from cutline.model.cut import BarrierTerms
from cutline.model.entries import BarrierEntry, DataEntry, Entry, Segment
from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, Position, SinkId
from cutline.model.staging import StagedBatch

DATA = DataEntry(
    seq=Position(7),
    generation=Generation(3),
    batch=BatchId(5),
    rows=12,
    segments=[
        Segment(name="g3-b5-p0.arrow", rows=8, size_bytes=900, crc32=4_294_967_295),
        Segment(name="g3-b5-p1.arrow", rows=4, size_bytes=100, crc32=0),
    ],
    staged={
        SinkId("table"): StagedBatch(
            generation=Generation(3),
            batch=BatchId(5),
            rows=12,
            bytes=77,
            pieces=[{"path": "naïve ☃.parquet", "stats": {"min": None, "max": 1.5}}],
        )
    },
    positions={OperatorId("left"): Position(4), OperatorId("right"): Position(0)},
)
BARRIERS = [
    BarrierEntry(
        seq=Position(8),
        generation=Generation(3),
        epoch=Epoch(2),
        batch=BatchId(-1),
        positions={OperatorId("left"): Position(4)},
        aligned=aligned,
        alignment_limit_ms=limit_ms,
        is_binding=aligned,
        started_ms=1_700_000_000_000,
    )
    for aligned, limit_ms in [(True, None), (False, 0), (True, 50)]
]


@pytest.mark.parametrize("entry", [DATA, *BARRIERS])
def test_an_entry_comes_back_from_disk_as_it_was(tmp_path: Path, entry: Entry) -> None:
    path = tmp_path / "entry.json"
    path.write_bytes(codec.encode(entry))
    assert codec.load(path) == entry


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_barrier_carries_its_terms(barrier: BarrierEntry) -> None:
    assert barrier.terms == BarrierTerms(
        alignment_limit_ms=barrier.alignment_limit_ms, is_binding=barrier.aligned, started_ms=1_700_000_000_000
    )


def test_the_size_of_an_entry_is_that_of_its_segments() -> None:
    assert DATA.size_bytes == 1_000


def test_the_reader_beside_spark_finds_what_it_looks_for() -> None:
    """``cutline.spark.channel_source`` reads the JSON itself, because what it imports is paid many times."""
    body = msgspec.json.decode(codec.encode(DATA))["body"]
    assert (body["type"], body["rows"], body["seq"]) == ("data", 12, 7)
    assert body["segments"][0] == {"name": "g3-b5-p0.arrow", "rows": 8, "size_bytes": 900, "crc32": 4_294_967_295}
    assert msgspec.json.decode(codec.encode(BARRIERS[0]))["body"]["type"] == "barrier"


def test_names_sort_in_the_order_of_the_log() -> None:
    names = [codec.entry_name(Position(seq)) for seq in (0, 9, 10, 99_999, 1_000_000)]
    assert names == sorted(names)


def test_every_generation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    paths = {codec.entry_path(tmp_path, Generation(number), Position(0)) for number in (1, 2, 11)}
    assert len({path.parent for path in paths}) == 3
    assert codec.data_dir(tmp_path) not in {path.parent for path in paths}


def test_an_entry_is_no_other_record(tmp_path: Path) -> None:
    path = tmp_path / "entry.json"
    path.write_bytes(records.encode("manifest", DATA))
    with pytest.raises(DamagedRecordError):
        codec.load(path)


def test_an_entry_that_is_not_there_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecordError):
        codec.load(tmp_path / "nothing.json")
