"""For the tests in ``tests/torture``."""

from tests.support.fast import no_waiting_for_the_disk

__all__ = ["no_waiting_for_the_disk"]
