"""What records never say: each rule with a record that breaks it, and one that does not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from cutline.base import records
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.ids import Generation, Position
from cutline.model.validation import (
    MOST_IN_FLIGHT,
    of_base64,
    of_channels,
    of_files,
    of_json,
    of_names,
    of_numbers,
    of_paths,
    of_spans,
)
from tests.support.stored_records import EXAMPLES, SOURCE, TOTALS


def spans(*pairs: tuple[int, int]) -> list[tuple[Generation, Position]]:
    return [(Generation(generation), Position(start)) for generation, start in pairs]


def file(path: str, **more: Any) -> SnapshotFile:
    return replace(SnapshotFile(path=path, sha256="a" * 64, size_bytes=1), **more)


@pytest.mark.parametrize("paths", [[], ["a"], ["a", "b/c", "b/d"], ["offsets/1", "offsets/10"]])
def test_paths_of_one_directory(paths: list[str]) -> None:
    assert not list(of_paths("x", paths))


@pytest.mark.parametrize("paths", [["a", "a"], ["a", "a/b"], ["a/b/c", "a"], ["../a"], ["a", "/b"], ["a", ""]])
def test_paths_that_are_in_the_way(paths: list[str]) -> None:
    assert list(of_paths("x", paths))


def test_names() -> None:
    assert not list(of_names("x", ["a", "b.c"]))
    assert all(list(of_names("x", names)) for names in (["a/b"], ["a", "a"], [".."], [""]))


@pytest.mark.parametrize("sha256", ["", "a" * 63, "A" * 64, "g" * 64, "٣" * 64, "a" * 63 + "\n"])
def test_hashes(sha256: str) -> None:
    assert not list(of_files([file("a"), file("b", sha256="0123456789abcdef" * 4)]))
    assert [problem.field for problem in of_files([file("a"), file("b", sha256=sha256)])] == ["files.sha256"]


def test_content_has_the_recorded_size() -> None:
    assert not list(of_files([file("a", content=b"x")]))
    assert list(of_files([file("a", content=b"xy")]))


def test_spans() -> None:
    assert not list(of_spans("x", spans((1, 0), (2, 0), (5, 9))))
    assert all(list(of_spans("x", one)) for one in (spans(), spans((2, 0), (1, 5)), spans((1, 5), (2, 4))))


def test_channels() -> None:
    def problems(barrier: int, read: int, *, channel: int | None = None, begins: int = 0) -> list[str]:
        cuts = {SOURCE: (Position(barrier), {}), TOTALS: (Position(1), {SOURCE: Position(read)})}
        lineage = spans((1, begins))
        logs = {
            SOURCE: (Position(barrier if channel is None else channel), lineage),
            TOTALS: (Position(1), spans((1, 0))),
        }
        return [problem.what for problem in of_channels(cuts, logs)]

    assert problems(9, 4) == [] == problems(9, 4, begins=4) == problems(MOST_IN_FLIGHT, 0)
    assert "entries are in flight" in problems(MOST_IN_FLIGHT + 1, 0)[0]
    assert "past the barrier" in problems(9, 10)[0]
    assert "its barrier is at 8" in problems(9, 4, channel=8)[0]
    assert "begins after position 4" in problems(9, 4, begins=5)[0]
    assert "no operator" in next(of_channels({}, {SOURCE: (Position(1), spans((1, 0)))})).what


def test_texts() -> None:
    assert not list(of_base64("x", "YWJj")) and list(of_base64("x", "a")) and list(of_base64("x", "ü"))
    assert (
        not list(of_numbers("x", ["0", "12"])) and list(of_numbers("x", ["１"])) and list(of_numbers("x", ["9" * 30]))
    )
    deep: Any = 1
    for _ in range(40):
        deep = {"a": [deep]}
    assert not list(of_json("x", {"a": [{"b": [1, 2, {}]}]})) and list(of_json("x", deep))


def test_the_error_names_record_field_and_next_step() -> None:
    record: OperatorRecord = EXAMPLES["operator"]
    hostile = replace(record, shared=[file("../../x")])
    with pytest.raises(DamagedRecordError) as refused:
        records.decode("operator", records.encode("operator", hostile), OperatorRecord, path="p", flow="payments")
    where = refused.value.where
    assert (where["record"], where["field"], where["flow"], where["path"]) == ("operator", "files", "payments", "p")
    assert "'../../x' is not a relative path" in refused.value.what and refused.value.next_step


def test_the_error_names_the_field_that_a_type_refuses() -> None:
    manifest: Manifest = EXAMPLES["manifest"]
    data = records.encode("manifest", replace(manifest, operators={"../x": manifest.operators[TOTALS]}))
    with pytest.raises(DamagedRecordError, match="a name that Cutline gives to nothing") as refused:
        records.decode("manifest", data, Manifest)
    assert refused.value.where["field"] == "operators"
