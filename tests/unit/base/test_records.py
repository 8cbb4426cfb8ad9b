"""Stored records: whatever is not exactly what was written is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.base import records
from cutline.errors import DamagedRecordError, UnknownFormatError


class Note(msgspec.Struct, kw_only=True):
    text: str
    number: int = 0


NOTE = Note(text='naïve ☃ \\ " \n', number=7)
STORED = records.encode("note", NOTE)


def decode(data: bytes) -> Note:
    return records.decode("note", data, Note)


def test_a_record_comes_back_as_it_was() -> None:
    assert decode(STORED) == NOTE


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=20))
def test_any_content_comes_back(content: Any) -> None:
    assert records.decode("any", records.encode("any", {"content": content}), dict) == {"content": content}


def test_equal_records_have_equal_bytes() -> None:
    assert records.encode("x", {"b": 1, "a": 2}) == records.encode("x", {"a": 2, "b": 1})
    assert records.checksum(STORED) == records.checksum(records.encode("note", NOTE))


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(DamagedRecordError, match="expected a manifest record, found note"):
        records.decode("manifest", STORED, Note)


def test_a_record_of_a_newer_format_says_what_to_do() -> None:
    newer = STORED.replace(b'"format":1', b'"format":2')
    with pytest.raises(UnknownFormatError) as caught:
        decode(newer)
    assert "newer" in caught.value.next_step


def test_a_body_that_does_not_match_the_checksum_is_refused() -> None:
    with pytest.raises(DamagedRecordError, match="does not match its checksum"):
        decode(STORED.replace(b'"number":7', b'"number":8'))


def test_a_body_that_lacks_a_field_is_refused() -> None:
    with pytest.raises(DamagedRecordError, match="is incomplete"):
        decode(records.encode("note", {"number": 7}))


def test_a_body_with_fields_of_a_later_version_is_read() -> None:
    assert decode(records.encode("note", {"text": "old", "number": 1, "colour": "red"})) == Note(text="old", number=1)


@pytest.mark.parametrize("size", range(len(STORED)))
def test_a_record_that_is_cut_short_is_refused(size: int) -> None:
    with pytest.raises(DamagedRecordError):
        decode(STORED[:size])


@pytest.mark.parametrize("at", range(len(STORED)))
def test_a_record_with_one_wrong_bit_is_refused(at: int) -> None:
    for bit in range(8):
        damaged = bytearray(STORED)
        damaged[at] ^= 1 << bit
        with pytest.raises((DamagedRecordError, UnknownFormatError)):
            decode(bytes(damaged))


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedRecordError):
        decode(data)


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 512, b"{}", STORED])
def test_a_record_with_something_after_it_is_refused(tail: bytes) -> None:
    """A file system may leave zeros behind a short write."""
    with pytest.raises(DamagedRecordError):
        decode(STORED + tail)


def test_a_missing_file_is_damage_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecordError) as caught:
        records.load("note", tmp_path / "nothing.json", Note)
    assert caught.value.where == {"path": tmp_path / "nothing.json"}


def test_a_file_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(STORED)
    assert records.load("note", path, Note) == NOTE
    path.write_bytes(STORED[:-1])
    with pytest.raises(DamagedRecordError) as caught:
        records.load("note", path, Note)
    assert caught.value.where == {"path": path}
