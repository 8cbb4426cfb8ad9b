"""For the tests of whole flows without Spark."""

from __future__ import annotations

import pytest

from tests.support.fast import every_file_is_a_blob, no_waiting_for_the_disk

__all__ = ["every_file_is_a_blob", "no_waiting_for_the_disk"]


@pytest.fixture(autouse=True)
def _every_file_is_a_blob(every_file_is_a_blob: None) -> None:
    """In all of them."""
