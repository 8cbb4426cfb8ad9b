"""Files that a catalog will name are durable before it does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from cutline.connectors.iceberg import commits, ledger
from cutline.connectors.iceberg.file_io import SyncedFileIO, folder_of
from cutline.errors import SinkError
from cutline.model.ids import Epoch
from cutline.testing.conformance.sinks import Case, rows
from tests.support.sink_targets import IcebergTarget, iceberg


def test_locations() -> None:
    for location in ("/a/b", "file:///a/b", "file:/a/b"):
        assert folder_of(location) == Path("/a/b")
    for location in ("s3://bucket/x", "hdfs://host/x", "relative/x", "file://host/x"):
        with pytest.raises(SinkError, match="mounted file system"):
            folder_of(location)


def test_a_file_is_created_once_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    files, location = SyncedFileIO(), f"file://{tmp_path}/new/folder/x.avro"
    with files.new_output(location).create() as stream:
        stream.write(b"first")
    with pytest.raises(FileExistsError):
        files.new_output(location).create()
    with files.new_output(location).create(overwrite=True) as stream:
        stream.write(b"2nd")
    assert files.new_input(location).open().read() == b"2nd"
    assert len(files.new_input(location)) == 3


@pytest.mark.parametrize("step", ["create", "claim", "publish", "upsert", "rewind"])
def test_everything_is_synced_before_the_catalog_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    synced: set[str] = set()
    written: list[Path] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        synced.add(os.path.realpath(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def before_the_catalog(original: Any) -> Any:
        def told(*given: Any, **more: Any) -> Any:
            new = [path for path in (tmp_path / "warehouse").rglob("*") if path not in written]
            written.extend(new)
            for path in new:
                assert str(path) in synced, f"{path} is not synced"
                assert str(path.parent) in synced, f"the name of {path} is not synced"
            synced.clear()
            return original(*given, **more)

        return told

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(commits, "stored_ledger", before_the_catalog(ledger.stored_ledger))
    written_metadata = SqlCatalog._write_metadata

    def checked(metadata: Any, io: Any, metadata_path: str, **more: Any) -> None:
        written_metadata(metadata, io, metadata_path, **more)
        written.append(folder_of(metadata_path))
        assert str(folder_of(metadata_path)) in synced
        assert str(folder_of(metadata_path).parent) in synced

    monkeypatch.setattr(SqlCatalog, "_write_metadata", staticmethod(checked))
    options: dict[str, Any] = {"mode": "upsert", "key": ["id"]} if step == "upsert" else {}
    sink = iceberg(tmp_path, **options)
    context = IcebergTarget().context()
    sink.open(context)
    case = Case(sink=sink, context=context)
    if step == "claim":
        sink.claim("", expected="")
    if step in ("publish", "upsert", "rewind"):
        for epoch in (1, 2):
            case.publish(epoch, epoch, rows(1, 2))
    if step == "rewind":
        sink.rewind(Epoch(1))
    assert written
