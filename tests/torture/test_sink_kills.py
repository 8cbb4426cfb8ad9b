"""Sinks that need no server, killed in the middle of a commit or a rewind."""

from __future__ import annotations

import pytest

from cutline.testing.conformance.sinks import SinkKills
from tests.support import sink_targets as targets

pytestmark = [pytest.mark.kill]


class TestDelta(targets.DeltaTarget, SinkKills):
    pass


class TestDeltaUpsert(targets.DeltaUpsertTarget, SinkKills):
    pass


class TestDeltaPartitions(targets.DeltaPartitionsTarget, SinkKills):
    pass


class TestIceberg(targets.IcebergTarget, SinkKills):
    pass


class TestIcebergUpsert(targets.IcebergUpsertTarget, SinkKills):
    pass


class TestIcebergPartitions(targets.IcebergPartitionsTarget, SinkKills):
    pass


class TestParquet(targets.ParquetTarget, SinkKills):
    pass


class TestForeach(targets.ForeachTarget, SinkKills):
    pass


class TestSQLite(targets.SQLiteTarget, SinkKills):
    pass


class TestSQLiteUpsert(targets.SQLiteUpsertTarget, SinkKills):
    pass


class TestSQLiteWithoutRewind(targets.SQLiteWithoutRewindTarget, SinkKills):
    pass


class TestSQLiteUpsertWithoutRewind(targets.SQLiteUpsertWithoutRewindTarget, SinkKills):
    pass
