"""Object stores pass the suite of their port."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.objects import open_store
from cutline.ports.objects import ObjectStore
from cutline.testing.conformance.objects import ObjectStoreConformance


class TestObjectStores(ObjectStoreConformance):
    """Those without a server; S3 runs in tests/torture."""

    @pytest.fixture(params=["folder", "memory"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
        is_folder = request.param == "folder"
        return open_store((tmp_path / "store").as_uri() if is_folder else f"memory://{tmp_path.name}")
