"""What all tests without Spark share.

The property tests run the same examples every time, and many more with ``CUTLINE_EXPLORE=5000``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

_slow_is_fine = [HealthCheck.too_slow, HealthCheck.filter_too_much]

settings.register_profile(
    "same", max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=_slow_is_fine
)
settings.register_profile(
    "explore",
    max_examples=int(os.environ.get("CUTLINE_EXPLORE", "1000")),
    deadline=None,
    database=None,
    suppress_health_check=_slow_is_fine,
)
settings.load_profile("explore" if "CUTLINE_EXPLORE" in os.environ else "same")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests kill processes, never the machine: what is written is there without a sync, and much sooner."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def every_file_is_a_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots made by hand hold only small files; tests that damage or count blobs want them all as blobs."""
    monkeypatch.setattr("cutline.storage.checkpoints.INLINE_BYTES", -1)
