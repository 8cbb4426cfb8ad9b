"""For the tests in ``tests/unit/coordinator``."""

from tests.scenarios.conftest import every_file_is_a_blob

__all__ = ["every_file_is_a_blob"]
