"""Every object store passes the suite: in a folder, in memory, and on a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.objects import open_store
from cutline.ports.objects import ObjectStore
from cutline.testing.conformance.objects import ObjectStoreConformance


class TestObjectStore(ObjectStoreConformance):
    @pytest.fixture(params=["folder", "memory", "s3"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
        if request.param == "folder":
            return open_store((tmp_path / "store" / "below").as_uri())
        if request.param == "memory":
            return open_store(f"memory://{tmp_path.name}")
        server = request.getfixturevalue("s3_server")
        # This server lets the losers of a race wait for a second, one after the other.
        return open_store(server.fresh_url(), server.options | {"request_timeout_s": "20"})
