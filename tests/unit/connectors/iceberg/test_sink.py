"""The Iceberg sink: the suite, and what is special about snapshots and catalogs."""

from __future__ import annotations

from cutline.testing.conformance.sinks import SinkBehaviour
from tests.support.sink_targets import IcebergTarget


class TestIceberg(IcebergTarget, SinkBehaviour):
    pass
