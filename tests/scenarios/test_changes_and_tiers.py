"""Changed operators together with tiers, stores and sources."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cutline.errors import LostInputError
from tests.support.changes import AFTER, BEFORE, CHANGES, NEW_TABLES, TABLES
from tests.support.changing import ChangingFlow, changing, counted

TWO_SOURCES = {"numbers": (), "totals": ("numbers",), "others": (), "copy": ("others",)}
ONE_SOURCE = {"numbers": (), "totals": ("numbers",)}


def test_rows_of_a_checkpoint_with_dropped_operators_move_with_the_others(tmp_path: Path) -> None:
    both, tables = {"table": "totals", "copies": "copy"}, {"table": "totals"}
    with changing(tmp_path, TWO_SOURCES, both, channel_store=(tmp_path / "a").as_uri()) as flow:
        flow.emit(3)
        epoch = flow.checkpoint()  # everything is in flight
    with changing(
        tmp_path, ONE_SOURCE, tables, channel_store=(tmp_path / "a").as_uri(), restore_to=epoch, allow_dropped=True
    ):
        pass
    with changing(tmp_path, ONE_SOURCE, tables, channel_store=(tmp_path / "b").as_uri()) as flow:
        assert epoch in flow.checkpoints.epochs(), "it is kept, and may be restored"
    with changing(tmp_path, TWO_SOURCES, both, channel_store=(tmp_path / "b").as_uri(), restore_to=epoch) as flow:
        assert flow.recovered.restored_epoch == epoch


def lose_input(flow: ChangingFlow, source: str) -> None:
    """It has read a file since the checkpoint, which is gone now."""
    folder = flow.spark(source).root / "sources" / "0"
    folder.mkdir(parents=True)
    (folder / "0").write_text('v1\n{"path":"file:///gone.json","timestamp":1,"batchId":0}')


@pytest.mark.parametrize("is_renamed", [False, True])
def test_lost_input_of_a_renamed_source_is_named(tmp_path: Path, is_renamed: bool) -> None:
    with changing(tmp_path, {"numbers": (), "totals": ("numbers",)}, {"table": "totals"}) as flow:
        flow.emit(3)
        epoch = flow.settle()
    name = "digits" if is_renamed else "numbers"
    rename = {"numbers": "digits"} if is_renamed else {}
    edges: dict[str, tuple[str, ...]] = {name: (), "totals": (name,)}
    with changing(tmp_path, edges, {"table": "totals"}, restore_to=epoch, rename=rename) as flow:
        flow.emit(1)
        flow.settle()
        lose_input(flow, name)
    with pytest.raises(LostInputError):
        ChangingFlow(tmp_path, edges, {"table": "totals"}, restore_to=epoch, rename=rename).stop()


def test_the_host_is_lost_after_a_change_from_a_checkpoint_that_was_only_here(tmp_path: Path) -> None:
    """The newest copy in the remote tier is older than the checkpoint that was carried over, and had no output."""
    remote: dict[str, Any] = {"remote": str(tmp_path / "bucket"), "replicate_interval": "1h"}
    with changing(tmp_path, BEFORE, TABLES, **remote) as flow:
        flow.emit(3)
        assert flow.run.wait_remote(flow.settle())
        epoch = flow.checkpoint()  # nothing was left to publish
        flow.wait(flow.coordinator.is_settled)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES, **remote):
        pass
    shutil.rmtree(tmp_path / "storage")
    with changing(tmp_path, AFTER, NEW_TABLES, **remote) as flow:
        assert flow.recovered.path == "remote"
        flow.emit(2)
        flow.settle()
        assert flow.table("table") == counted(0, 5)
