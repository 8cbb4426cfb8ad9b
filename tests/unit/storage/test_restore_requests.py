"""The request that waits is removed by the one that it belongs to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cutline.base import durable
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest, epoch_in
from cutline.storage.restore_requests import (
    remove_request,
    requested_epochs,
    requested_savepoints,
    store_request,
    stored_request,
    waiting_request,
    withdraw_request,
)

ONE, TWO = RestoreRequest(to="1"), RestoreRequest(to="before-upgrade")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout(tmp_path, "counting")
    durable.make_dir(found.root)
    return found


def test_only_the_request_that_is_meant_is_withdrawn(layout: Layout) -> None:
    assert not withdraw_request(layout, ONE)
    store_request(layout, TWO)
    assert not withdraw_request(layout, ONE)
    assert stored_request(layout) == TWO
    assert withdraw_request(layout, TWO)
    assert [path.name for path in layout.root.iterdir()] == []


def test_one_that_is_replaced_at_this_moment_stays(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    store_request(layout, ONE)
    real = os.rename

    def replaced(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", real)
        store_request(layout, TWO)
        real(source, target)

    monkeypatch.setattr(os, "rename", replaced)
    assert not withdraw_request(layout, ONE)
    assert stored_request(layout) == TWO
    assert [path.name for path in layout.root.iterdir()] == ["restore.json"]


@pytest.mark.parametrize("remove", [remove_request, lambda layout: withdraw_request(layout, ONE)])
def test_a_power_cut_does_not_bring_it_back(layout: Layout, monkeypatch: pytest.MonkeyPatch, remove: object) -> None:
    store_request(layout, ONE)
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_dir", synced.append)
    remove(layout)  # type: ignore[operator]
    assert synced == [layout.root]
    assert stored_request(layout) is None


def test_what_a_request_needs_is_known(layout: Layout) -> None:
    assert (requested_epochs(layout), requested_savepoints(layout)) == (frozenset(), frozenset())
    store_request(layout, ONE)
    assert (requested_epochs(layout), requested_savepoints(layout)) == (frozenset({Epoch(1)}), frozenset())
    store_request(layout, TWO)
    assert (requested_epochs(layout), requested_savepoints(layout)) == (frozenset(), frozenset({"before-upgrade"}))
    layout.restore_request.write_bytes(b"{")
    assert waiting_request(layout) is None
    assert (epoch_in("12"), epoch_in("9" * 19), epoch_in("²"), epoch_in("auto-1")) == (12, None, None, None)
