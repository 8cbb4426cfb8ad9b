"""What was stored once must be readable for as long as its format version is.

One sample of every record kind lies in ``samples/``. A change that breaks one needs a new format version and a way to
read the old one; then the new form gets a sample of its own, and the old one stays.
Made once with ``python -m tests.support.make_samples``; never made again for a version that is out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.base import records
from cutline.model import entries as codec
from cutline.model.entries import BarrierEntry, DataEntry
from cutline.ports import GenerationRecord, Manifest, OperatorRecord, Tombstone
from cutline.tiers.early_upload import AheadRecord
from tests.support import stored_records

SAMPLES = Path(__file__).parent / "samples" / f"format-{records.FORMAT_VERSION}"
KINDS: dict[str, tuple[str, type[Any]]] = {
    "flow": ("flow", dict),
    "generation": ("generation", GenerationRecord),
    "manifest": ("manifest", Manifest),
    "operator": ("operator", OperatorRecord),
    "tombstone": ("aborted", Tombstone),
    "entry-data": ("entry", DataEntry),
    "entry-barrier": ("entry", BarrierEntry),
    "ahead": ("ahead", AheadRecord),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_is_read_as_what_was_written(name: str) -> None:
    kind, type_ = KINDS[name]
    path = SAMPLES / f"{name}.json"
    loaded = codec.load(path) if kind == "entry" else records.load(kind, path, type_)
    assert loaded == stored_records.EXAMPLES[name]


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_of_every_field_there_is_exists(name: str) -> None:
    """A field added since would be missing in the samples: add it with a default, so that old records can be read."""
    body = msgspec.json.decode((SAMPLES / f"{name}.json").read_bytes())["body"]
    _, type_ = KINDS[name]
    if type_ is not dict:
        required = {field.encode_name for field in msgspec.structs.fields(type_) if field.required}
        assert required <= set(body)


def test_no_sample_is_left_over() -> None:
    assert {path.stem for path in SAMPLES.glob("*.json")} == set(KINDS)
