"""A RocksDB snapshot names the tables beside it, and no other files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cutline.spark_dir.state_files import UNREADABLE_SNAPSHOT, snapshot_parts


def snapshot(path: Path, head: Any, *, padding: int = 0) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("metadata", f"v1\n{json.dumps(head)}{' ' * padding}")
    return str(path)


def test_tables_and_logs(tmp_path: Path) -> None:
    head = {
        "sstFiles": [{"dfsSstFileName": "1-a.sst", "sizeBytes": 3}],
        "logFiles": [{"dfsLogFileName": "2-b.log", "sizeBytes": 4}],
    }
    assert snapshot_parts(snapshot(tmp_path / "1.zip", head)) == {"SSTs/1-a.sst": 3, "logs/2-b.log": 4}


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "a/b", "", "a\0b"])
def test_a_table_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """Else the next checkpoint would hold that file, and its export carry it away."""
    path = snapshot(tmp_path / "1.zip", {"sstFiles": [{"dfsSstFileName": name, "sizeBytes": 3}]})
    with pytest.raises(UNREADABLE_SNAPSHOT):
        snapshot_parts(path)


def test_a_snapshot_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UNREADABLE_SNAPSHOT):
        snapshot_parts(snapshot(tmp_path / "1.zip", {}, padding=65 << 20))
