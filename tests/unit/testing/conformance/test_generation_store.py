"""Generation stores pass the suite of their port."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.model.layout import Layout
from cutline.ports.generation_store import GenerationStore
from cutline.storage.generations import LocalGenerationStore
from cutline.testing.conformance.generation_store import GenerationStoreConformance
from cutline.testing.twins.generation_store import MemoryGenerationStore


class TestGenerationStores(GenerationStoreConformance):
    @pytest.fixture(params=["local", "memory"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> GenerationStore:
        return LocalGenerationStore(Layout(tmp_path, "flow")) if request.param == "local" else MemoryGenerationStore()
