"""Restore requests: given to a start, or stored for the next one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cutline.base import durable
from cutline.errors import ConfigError
from cutline.model.ids import FlowName
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest
from cutline.runtime.launch import current_request
from cutline.storage.restore_requests import store_request

FLOW = FlowName("counting")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout(tmp_path, FLOW)
    durable.make_dir(found.root)
    return found


def test_a_stored_request_is_for_the_next_start_that_is_given_none(layout: Layout) -> None:
    assert current_request(layout, None, None, allow_dropped=False, flow=FLOW) is None
    stored = RestoreRequest(to="before-upgrade", rename={"totals": "sums"}, allow_dropped=True)
    store_request(layout, stored)
    assert current_request(layout, None, None, allow_dropped=False, flow=FLOW) == stored
    same = current_request(layout, stored.to, stored.rename, allow_dropped=True, flow=FLOW)
    assert same == stored


def test_a_start_with_a_request_of_its_own_leaves_that_of_another_person_alone(layout: Layout) -> None:
    given = current_request(layout, 7, {"a": "b"}, allow_dropped=False, flow=FLOW)
    assert given == RestoreRequest(to="7", rename={"a": "b"})
    store_request(layout, RestoreRequest(to="before-upgrade"))
    with pytest.raises(ConfigError, match=r"two restores are requested: .* 7, and one of before-upgrade waits"):
        current_request(layout, 7, {"a": "b"}, allow_dropped=False, flow=FLOW)


def test_the_record_keeps_its_place_kind_and_fields(layout: Layout) -> None:
    store_request(layout, RestoreRequest(to="7"))
    record = json.loads((layout.root / "restore.json").read_text())
    assert record["kind"] == "restore"
    assert '"allow_dropped":false' in json.dumps(record, separators=(",", ":"))


@pytest.mark.parametrize(("rename", "allow_dropped"), [({"a": "b"}, False), (None, True)])
def test_operators_change_only_when_something_is_restored(
    layout: Layout, rename: dict[str, str] | None, allow_dropped: bool
) -> None:
    with pytest.raises(ConfigError, match="only when a checkpoint or savepoint is restored"):
        current_request(layout, None, rename, allow_dropped=allow_dropped, flow=FLOW)
