"""Setting a flow's state aside: what is synced, and when."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cutline.base import records
from cutline.model.layout import Layout
from cutline.savepoints import set_aside


@pytest.mark.parametrize("is_kept", [True, False])
def test_nothing_is_removed_before_the_move_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """A power cut may undo what is not synced: the marker must not go before the moves, nor the moves half-way."""
    layout = Layout(tmp_path, "counting")
    for path in (layout.generations, layout.savepoints):
        path.mkdir(parents=True)
    (layout.generations / "000001.json").write_bytes(b"{}")
    layout.identity.write_bytes(b"{}")
    marker = set_aside.SetAside(folder="before", is_kept=is_kept)
    layout.set_aside.write_bytes(records.encode("set-aside", marker))
    done: list[str] = []

    def synced(handle: int) -> None:
        done.append(f"sync {os.path.relpath(os.readlink(f'/proc/self/fd/{handle}'), layout.root)}")

    unlink = Path.unlink

    def unlinked(path: Path) -> None:
        done.append(f"unlink {path.name}")
        unlink(path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    monkeypatch.setattr(shutil, "rmtree", lambda path: done.append(f"remove {path.name}"))
    set_aside.finish(layout)
    assert layout.aside("before").joinpath("generations/000001.json").exists()
    assert layout.identity.exists()
    after_moves = done[done.index("sync aside/before") :]
    removed = [] if is_kept else ["remove before"]
    assert after_moves == ["sync aside/before", "sync .", *removed, "unlink set-aside.json", "sync ."]
