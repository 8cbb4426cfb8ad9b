"""Segments: what executors write and read back."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from cutline.channels.segments import SegmentWriter, crc32_of, read_segment
from cutline.model.entries import Segment
from cutline.ports.engine import SegmentPlace

RICH = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("price", pa.decimal128(20, 4)),
        pa.field("point", pa.struct([pa.field("x", pa.int32()), pa.field("inner", pa.list_(pa.int8()))])),
        pa.field("tags", pa.list_(pa.list_(pa.string()))),
        pa.field("counts", pa.map_(pa.string(), pa.struct([pa.field("n", pa.int64())]))),
    ]
)
ROWS = [
    {
        "id": 1,
        "text": "naïve — ☃",
        "raw": b"\x00\xff",
        "day": date(1969, 7, 20),
        "at": datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
        "price": Decimal("-1234567890123456.7891"),
        "point": {"x": None, "inner": [1, None, -1]},
        "tags": [["a", None], [], None],
        "counts": [("k", {"n": 1}), ("m", None)],
    },
    dict.fromkeys(RICH.names) | {"id": 2},
]


def batch_of(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": list(numbers)})


def read_ids(path: Path) -> list[int]:
    return [
        number
        for batch in read_segment(SegmentPlace(url=str(path.parent)), path.name)
        for number in batch["id"].to_pylist()
    ]


def test_rows_of_every_type_come_back(tmp_path: Path) -> None:
    writer = SegmentWriter(SegmentPlace(url=str(tmp_path)), "one.arrow")
    writer.write(pa.RecordBatch.from_pylist(ROWS, schema=RICH))
    writer.close()
    (batch,) = read_segment(SegmentPlace(url=str(tmp_path)), "one.arrow")
    assert batch.schema == RICH
    assert batch.to_pylist() == ROWS


def test_what_is_said_of_a_segment_is_what_is_on_disk(tmp_path: Path) -> None:
    writer = SegmentWriter(SegmentPlace(url=str(tmp_path)), "one.arrow")
    writer.write(batch_of(1, 2))
    writer.write(batch_of(3))
    described = writer.close()
    assert described is not None
    segment = Segment(**described)
    path = tmp_path / segment.name
    assert (segment.rows, segment.size_bytes, segment.crc32) == (3, path.stat().st_size, crc32_of(path))
    assert read_ids(path) == [1, 2, 3]


def test_small_batches_are_written_in_few_blocks_and_in_order(tmp_path: Path) -> None:
    writer = SegmentWriter(SegmentPlace(url=str(tmp_path)), "one.arrow")
    for start in range(0, 200_000, 1_000):
        writer.write(batch_of(*range(start, start + 1_000)))
    described = writer.close()
    assert described is not None
    assert described["rows"] == 200_000
    assert len(list(read_segment(SegmentPlace(url=str(tmp_path)), "one.arrow"))) <= 5
    assert read_ids(tmp_path / "one.arrow") == list(range(200_000))


def test_a_task_without_rows_writes_nothing(tmp_path: Path) -> None:
    writer = SegmentWriter(SegmentPlace(url=str(tmp_path)), "one.arrow")
    writer.write(batch_of())
    assert writer.close() is None
    assert list(tmp_path.iterdir()) == []


def test_batches_without_rows_leave_no_trace(tmp_path: Path) -> None:
    writer = SegmentWriter(SegmentPlace(url=str(tmp_path)), "one.arrow")
    for batch in (batch_of(), batch_of(5), batch_of()):
        writer.write(batch)
    writer.close()
    assert read_ids(tmp_path / "one.arrow") == [5]


@pytest.mark.parametrize("at", [0, 100, -1])
def test_a_changed_byte_changes_the_checksum(tmp_path: Path, at: int) -> None:
    writer = SegmentWriter(SegmentPlace(url=str(tmp_path)), "one.arrow")
    writer.write(batch_of(1, 2, 3))
    described = writer.close()
    assert described is not None
    path = tmp_path / "one.arrow"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert crc32_of(path) != described["crc32"]


def test_the_checksum_of_a_large_file_is_that_of_its_whole_content(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (3 << 20))
    before = crc32_of(path)
    path.write_bytes(b"x" * ((3 << 20) - 1) + b"y")
    assert crc32_of(path) != before
