"""Iceberg tables whose rows are replaced."""

from __future__ import annotations

from cutline.testing.conformance.sinks import SinkBehaviour
from tests.support.sink_targets import IcebergPartitionsTarget, IcebergUpsertTarget


class TestUpsert(IcebergUpsertTarget, SinkBehaviour):
    pass


class TestOverwritePartitions(IcebergPartitionsTarget, SinkBehaviour):
    pass
