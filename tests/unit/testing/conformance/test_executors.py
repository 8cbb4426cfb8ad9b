"""Executors pass the suite of their port."""

from __future__ import annotations

import pytest

from cutline.ports.executors import Executors
from cutline.testing.conformance.executors import ExecutorsConformance
from cutline.testing.twins.executors import MemoryExecutors


class TestMemoryExecutors(ExecutorsConformance):
    @pytest.fixture
    def executors(self) -> Executors:
        return MemoryExecutors()
