"""What a power cut leaves of a Delta log: deltalake names its files before they are synced."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cutline.connectors.delta.log import DeltaLog
from cutline.errors import NotDone
from cutline.sinks import Delta
from cutline.testing.conformance.sinks import SIMPLE, Case, rows
from tests.support.sink_targets import DeltaTarget


def start(tmp_path: Path) -> Case:
    sink = Delta(tmp_path / "table")
    context = DeltaTarget().context(SIMPLE)
    sink.open(context)
    return Case(sink=sink, context=context)


def newest(tmp_path: Path) -> Path:
    return max((tmp_path / "table/_delta_log").glob("*.json"))


def cut_off(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])


@pytest.mark.parametrize("kept", [0, 30, "lines", "zeros"])
def test_a_torn_newest_version_is_removed_and_published_again(tmp_path: Path, kept: int | str) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    staged = case.stage(2, rows(2))
    case.commit(2, staged)
    path = newest(tmp_path)
    content = path.read_bytes()
    torn = {"lines": b"\n".join(content.splitlines()[:2]), "zeros": bytes(len(content))}
    path.write_bytes(torn[kept] if isinstance(kept, str) else content[:kept])
    again = start(tmp_path)
    assert again.sink.published() == 1
    again.commit(2, staged)
    assert DeltaTarget().ids(tmp_path) == [1, 2]
    again.sink.rewind(1)  # type: ignore[arg-type]
    assert DeltaTarget().ids(tmp_path) == [1]


def test_a_table_whose_creation_was_torn_is_created_again(tmp_path: Path) -> None:
    start(tmp_path)
    cut_off(newest(tmp_path), 0)
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    assert DeltaTarget().ids(tmp_path) == [1]


@pytest.mark.parametrize("pattern", ["*.checkpoint.parquet", "_last_checkpoint"])
@pytest.mark.parametrize("kept", [0, 100])
def test_a_torn_checkpoint_of_the_log_is_removed(tmp_path: Path, pattern: str, kept: int) -> None:
    DeltaTable.create(tmp_path / "table", pa.schema(SIMPLE), configuration={"delta.checkpointInterval": "3"})
    case = start(tmp_path)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(epoch))
    cut_off(max((tmp_path / "table/_delta_log").glob(pattern)), kept)
    assert start(tmp_path).sink.published() == 3
    assert DeltaTarget().ids(tmp_path) == [1, 2, 3]


def test_a_damaged_version_that_others_follow_stays(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    before = newest(tmp_path)
    case.publish(2, 2, rows(2))
    cut_off(before, 30)
    DeltaLog(tmp_path / "table/_delta_log").remove_torn_end()
    assert before.exists()
    with pytest.raises(NotDone):
        start(tmp_path)
