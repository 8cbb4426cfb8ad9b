"""What was stored once must be readable for as long as its format version is.

One sample of every record kind lies in ``samples/``. A change that breaks one needs a new format version and a way to
read the old one; then the new form gets a sample of its own, and the old one stays.
Made once with ``python -m tests.support.make_samples``; never made again for a version that is out.
"""

from __future__ import annotations

import msgspec
import pytest

from cutline.base import records
from cutline.channels import entry_files as codec
from tests.support.stored_records import EXAMPLES, KINDS, SAMPLES


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_is_read_as_what_was_written(name: str) -> None:
    kind, type_ = KINDS[name]
    path = SAMPLES / f"{name}.json"
    loaded = codec.load(path) if kind == "entry" else records.load(kind, path, type_)
    assert loaded == EXAMPLES[name]


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
