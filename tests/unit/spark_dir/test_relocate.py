"""A restored directory reads its own state schemas."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cutline.errors import DamagedRecordError
from cutline.spark_dir.relocate import relocate

OLD = "file:/old/place/state/0/_stateSchema/default"


def metadata(*schemas: str) -> str:
    """As Spark writes it for transformWithState, shortened."""
    store = {"storeName": "default", "numPartitions": 2, "stateSchemaFilePaths": list(schemas)}
    return "v2\n" + json.dumps({"operatorInfo": {"operatorId": 0}, "stateStoreInfo": [store]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "state/0/_metadata/v2"
    folder.mkdir(parents=True)
    return folder


def test_schema_paths_point_into_this_directory(tmp_path: Path, folder: Path) -> None:
    (folder / "0").write_text(metadata(f"{OLD}/0_aa", f"{OLD}/1_bb"))
    (folder / "6").write_text(metadata(f"{OLD}/0_aa"))
    (folder / ".0.crc").write_bytes(b"crc\x00 of the old content")
    assert relocate(tmp_path) == ["state/0/_metadata/v2/0", "state/0/_metadata/v2/6"]
    new = f"file:{tmp_path}/state/0/_stateSchema/default"
    assert (folder / "0").read_text().splitlines()[0] == "v2"
    assert json.loads((folder / "0").read_text()[3:]) == json.loads(metadata(f"{new}/0_aa", f"{new}/1_bb")[3:])
    assert not (folder / ".0.crc").exists()
    assert relocate(tmp_path) == []


def test_a_pinned_file_is_left_as_it_is(tmp_path: Path, folder: Path) -> None:
    (folder / "0").write_text(metadata(f"{OLD}/0_aa"))
    os.link(folder / "0", tmp_path / "pin")
    relocate(tmp_path)
    assert (tmp_path / "pin").read_text() == metadata(f"{OLD}/0_aa")


def test_stores_without_schema_files_stay(tmp_path: Path, folder: Path) -> None:
    text = 'v2\n{"stateStoreInfo":[{"storeName":"default"}]}'
    (folder / "0").write_text(text)
    assert relocate(tmp_path) == [] and (folder / "0").read_text() == text


def test_torn_metadata_is_damage(tmp_path: Path, folder: Path) -> None:
    (folder / "0").write_text("v2\n{")
    with pytest.raises(DamagedRecordError, match="_metadata/v2/0"):
        relocate(tmp_path)
