"""For the tests of the service."""

from __future__ import annotations

import pytest

from tests.support.fast import _no_waiting_for_the_disk

__all__ = ["_no_waiting_for_the_disk"]


@pytest.fixture(autouse=True)
def every_file_is_a_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots made by hand hold only small files; tests that damage or count blobs want them all as blobs."""
    monkeypatch.setattr("cutline.storage.checkpoints.INLINE_BYTES", -1)
