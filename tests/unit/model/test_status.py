"""The status keeps its keys: programs read ``status.json`` and ``cutline status --json``."""

from __future__ import annotations

import json

import msgspec
import pytest

from cutline.model.status import FlowStatus
from tests.support.statuses import AS_NOW, WRITTEN


@pytest.mark.parametrize("encode", [msgspec.json.encode, lambda status: json.dumps(msgspec.to_builtins(status))])
def test_no_key_of_the_json_is_lost_or_renamed(encode: object) -> None:
    status = msgspec.json.decode(json.dumps(WRITTEN), type=FlowStatus)
    assert callable(encode)
    assert json.loads(encode(status)) == AS_NOW


def test_a_status_from_before_sources_were_shown_can_be_read() -> None:
    operators = {name: {**one, "sources": None} for name, one in WRITTEN["operators"].items()}
    for one in operators.values():
        del one["sources"]
    status = msgspec.json.decode(json.dumps({**WRITTEN, "operators": operators, "remote": None}), type=FlowStatus)
    assert status.operators["numbers"].sources == []
    assert status.remote is None
