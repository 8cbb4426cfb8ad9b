"""Metadata stores pass the suite of their port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.ports.metadata import MetadataStore
from cutline.storage.metadata.sqlite import SqliteMetadata
from cutline.testing.conformance.metadata import MetadataConformance, Reopen
from cutline.testing.twins.metadata import MemoryMetadata, MemoryRecords


class TestMetadataStores(MetadataConformance):
    @pytest.fixture(params=["sqlite", "memory"])
    def reopen(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
        opened: list[SqliteMetadata] = []
        shared = MemoryRecords()

        def reopen() -> MetadataStore:
            if request.param == "memory":
                return MemoryMetadata(shared)
            opened.append(SqliteMetadata(tmp_path / "coordinator.sqlite"))
            return opened[-1]

        yield reopen
        for store in opened:
            store.close()
