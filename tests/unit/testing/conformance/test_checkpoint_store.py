"""Checkpoint stores pass the suite of their port."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.testing.conformance.checkpoint_store import CheckpointStoreConformance
from cutline.testing.twins.checkpoint_store import MemoryCheckpointStore


class TestLocalCheckpoints(CheckpointStoreConformance):
    def make_store(self, tmp_path: Path) -> CheckpointStore:
        return LocalCheckpointStore(Layout(tmp_path / "storage", "flow"))


class TestLocalCheckpointsWithoutInlineFiles(CheckpointStoreConformance):
    @pytest.fixture(autouse=True)
    def every_file_is_a_blob(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cutline.storage.checkpoints.INLINE_BYTES", -1)

    def make_store(self, tmp_path: Path) -> CheckpointStore:
        return LocalCheckpointStore(Layout(tmp_path / "storage", "flow"))


class TestMemoryCheckpoints(CheckpointStoreConformance):
    def make_store(self, tmp_path: Path) -> CheckpointStore:
        return MemoryCheckpointStore()
