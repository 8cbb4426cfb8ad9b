"""Spark's own small records name folders and files: none of these names leads out of the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.errors import DamagedRecordError
from cutline.model.ids import BatchId
from cutline.spark_dir.offsets import CommitLog, parse_offsets

HEAD = b'v2\n{"conf":{}}\n'


def test_sources_are_folders_of_the_directory() -> None:
    assert parse_offsets(HEAD + b'0:{"logOffset":3}\norders:-', "x", BatchId(1)).positions == {
        "0": b'{"logOffset":3}',
        "orders": None,
    }
    for name in (b"..", b"../x", b"a/b", b"/x", b"", b"a\0b", b"\xff"):
        with pytest.raises(DamagedRecordError, match="cannot be read"):
            parse_offsets(HEAD + name + b":-", "x", BatchId(1))


@pytest.mark.parametrize(
    "ids", ['{"0":[["../../x"]]}', '{"../0":[["a"]]}', '{"0":[["/x"]]}', '{"0":[["a\\u0000"]]}', "[" * 5_000]
)
def test_ids_of_state_files_are_names(tmp_path: Path, ids: str) -> None:
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "1").write_text('v1\n{"stateUniqueIds":{"0":[["a-1","b-2"]]}}')
    (tmp_path / "commits" / "2").write_text(f'v1\n{{"stateUniqueIds":{ids}}}')
    commits = CommitLog(str(tmp_path))
    assert commits.load(BatchId(1)).state_unique_ids == {"0": [["a-1", "b-2"]]}
    with pytest.raises(DamagedRecordError, match="cannot be read"):
        commits.load(BatchId(2))
