"""What others do to an Iceberg table while a flow publishes to it: append, compact, expire, roll back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles

from cutline.testing.conformance.sinks import SIMPLE, rows
from tests.support.sink_targets import iceberg_table


def append(folder: Path, *numbers: int) -> None:
    iceberg_table(folder).append(pa.Table.from_pylist(rows(*numbers), schema=SIMPLE))


class _Compaction(_OverwriteFiles):
    """pyiceberg itself compacts nothing yet; Spark's rewrite_data_files makes such a snapshot."""

    def _summary(self, snapshot_properties: dict[str, str] = {}) -> Summary:  # noqa: B006 (as its base has it)
        summary = super()._summary(snapshot_properties)
        return Summary(operation=Operation.REPLACE, **summary.additional_properties)


def compact(folder: Path) -> int:
    """All rows in one file: how many files it replaced."""
    table = iceberg_table(folder)
    found = table.scan().to_arrow()
    old = [task.file for task in table.scan().plan_files()]
    with table.transaction() as change:
        compaction = _Compaction(operation=Operation.OVERWRITE, transaction=change, io=table.io)
        for file in old:
            compaction.delete_data_file(file)
        for file in _dataframe_to_data_files(table_metadata=table.metadata, df=found, io=table.io):
            compaction.append_data_file(file)
        compaction.commit()
    newest = iceberg_table(folder).current_snapshot()
    assert newest is not None
    assert newest.summary is not None
    assert newest.summary.operation == Operation.REPLACE
    return len(old)


def expire_all(folder: Path) -> None:
    """Expire every snapshot that no branch and no tag names."""
    iceberg_table(folder).maintenance.expire_snapshots().older_than(datetime.now(UTC) + timedelta(days=1)).commit()


def roll_back(folder: Path, snapshot_id: int) -> None:
    """As Spark's rollback_to_snapshot."""
    iceberg_table(folder).manage_snapshots().set_current_snapshot(snapshot_id=snapshot_id).commit()


def head(folder: Path) -> int:
    snapshot = iceberg_table(folder).current_snapshot()
    assert snapshot is not None
    return snapshot.snapshot_id


def marks(folder: Path) -> list[Any]:
    """Operation and mark of every snapshot."""
    return [snapshot.summary for snapshot in iceberg_table(folder).snapshots()]
