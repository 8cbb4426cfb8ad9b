"""For the tests on Spark."""

from __future__ import annotations

import os

import pytest

from tests.support.jvm import VARIABLE, quick_start_options


@pytest.fixture(autouse=True, scope="session")
def _jvms_start_soon() -> None:
    """Those of this process and of all that it starts."""
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {quick_start_options()}".strip()
