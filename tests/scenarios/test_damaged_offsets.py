"""Content that is not here is not input that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.remote import copied, remote
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS


def test_damaged_offsets_of_a_source_are_made_good_from_the_remote_tier(tmp_path: Path) -> None:
    """Offsets of many Kafka partitions are larger than what a record holds itself: they are a blob (see conftest)."""
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(4)
        epoch = flow.checkpoint()
        copied(flow, epoch)
        record = flow.checkpoints.load_record(flow.checkpoints.load_manifest(epoch), NUMBERS)
        digest = next(file.sha256 for file in record.files() if file.path == f"offsets/{record.batch}")
        flow.layout.blob(digest).write_bytes(b"rotten")
    shutil.rmtree(tmp_path / "storage" / "counting" / "spark")
    with running(tmp_path, **remote(tmp_path)) as flow:
        assert flow.recovered.path == "remote"
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
