"""For the tests in ``tests/torture``."""

from tests.support.fast import _no_waiting_for_the_disk

__all__ = ["_no_waiting_for_the_disk"]
