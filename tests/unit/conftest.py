"""For the tests in ``tests/unit``."""

from tests.support.fast import every_file_is_a_blob, no_waiting_for_the_disk

__all__ = ["every_file_is_a_blob", "no_waiting_for_the_disk"]
