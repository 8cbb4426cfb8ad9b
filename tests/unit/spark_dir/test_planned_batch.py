"""How Spark had planned a batch, remembered and put back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cutline.errors import DamagedRecordError
from cutline.model.ids import BatchId
from cutline.spark_dir.planned_batch import begin_anew, commit_plan, plan_of, put_plan
from tests.support.spark_dirs import SparkDir, content_of


class FileSourceDir:
    """A directory of a query with one file source, as Spark writes it: every third list of files is compacted."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _write(self, name: str, lines: list[str]) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
        path.with_name(f".{path.name}.crc").write_text("a checksum")

    def run(self, batch: int, *, lists: int = 1) -> None:
        """Plan and commit a batch that reads so many lists of one file each."""
        last = self._last() + lists
        for number in range(last - lists + 1, last + 1):
            entries = [self._entry(number)]
            if (number + 1) % 3 == 0:
                entries = [self._entry(one) for one in range(number + 1)]
            self._write(f"sources/0/{number}{'.compact' if len(entries) > 1 else ''}", ["v1", *entries])
        head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 7 + batch, "conf": {}})
        self._write(f"offsets/{batch}", ["v1", head, json.dumps({"logOffset": last})])
        self._write(f"commits/{batch}", ["v1", '{"nextBatchWatermarkMs":0}'])

    def _last(self) -> int:
        folder = self.root / "sources/0"
        names = [path.name.removesuffix(".compact") for path in folder.glob("*")] if folder.exists() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _entry(self, number: int) -> str:
        return json.dumps({"path": f"file:///landing/{number}", "timestamp": number, "batchId": number})


def visible(root: Path) -> dict[str, bytes]:
    return {name: content for name, content in content_of(root).items() if not name.endswith(".crc")}


def test_plans_put_back_one_after_the_other_make_the_same_directory(tmp_path: Path) -> None:
    there = FileSourceDir(tmp_path / "there")
    plans = []
    for batch, lists in enumerate([1, 1, 2, 1, 3, 1, 1]):
        there.run(batch, lists=lists)
        plans.append(plan_of(there.root, BatchId(batch)))
    again = tmp_path / "again"
    begin_anew(again)
    for batch, plan in enumerate(plans):
        put_plan(again, BatchId(batch), plan)
        assert plan_of(again, BatchId(batch)) == plan
        commit_plan(again, BatchId(batch))
    made = visible(again)
    assert json.loads(made.pop("metadata"))["id"]
    assert made == visible(there.root)


def test_what_spark_has_planned_by_itself_since_is_forgotten(tmp_path: Path) -> None:
    there, other = FileSourceDir(tmp_path / "there"), FileSourceDir(tmp_path / "other")
    for spark in (there, other):
        spark.run(0)
        spark.run(1)
    there.run(2)
    plan = plan_of(there.root, BatchId(2))
    other.run(2, lists=4)  # it found more files than then
    (other.root / "commits/2").unlink()
    assert plan_of(other.root, BatchId(2)) != plan
    put_plan(other.root, BatchId(2), plan)
    assert plan_of(other.root, BatchId(2)) == plan
    assert not list(other.root.glob("sources/0/[345]*"))
    assert not (other.root / "offsets/.2.crc").exists(), "it would contradict its file"


def test_a_source_that_notes_where_it_begins_begins_there_again(tmp_path: Path) -> None:
    spark = SparkDir(tmp_path / "there")
    noted = spark.root / "sources/0/0"
    noted.parent.mkdir(parents=True)
    noted.write_text('v1\n{"topic":{"0":17}}')
    spark.plan(0, {"numbers": 3})
    plan = plan_of(spark.root, BatchId(0))
    begin_anew(tmp_path / "again")
    put_plan(tmp_path / "again", BatchId(0), plan)
    assert (tmp_path / "again/sources/0/0").read_bytes() == noted.read_bytes()


def test_a_batch_that_was_not_planned_has_no_plan(tmp_path: Path) -> None:
    spark = SparkDir(tmp_path)
    spark.run(0)
    with pytest.raises(DamagedRecordError, match="no offsets of this batch"):
        plan_of(tmp_path, BatchId(1))


def test_a_list_of_files_that_is_gone_is_noticed(tmp_path: Path) -> None:
    there = FileSourceDir(tmp_path)
    there.run(0)
    there.run(1)
    (tmp_path / "sources/0/1").unlink()
    with pytest.raises(DamagedRecordError, match="log entry is missing"):
        plan_of(tmp_path, BatchId(1))


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/tmp/x",
        "sources/../../x",
        "sources/0/../../../x",
        "state/0/0/1.zip",
        "metadata",
        "offsets/4",
        "sources/a\\b",
    ],
)
def test_a_plan_that_names_another_file_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    there = FileSourceDir(tmp_path / "there")
    there.run(0)
    plan = plan_of(there.root, BatchId(0))
    again = tmp_path / "again"
    begin_anew(again)
    before = content_of(tmp_path)
    with pytest.raises(DamagedRecordError):
        put_plan(again, BatchId(0), {**plan, name: b"owned"})
    assert content_of(tmp_path) == before


def test_a_plan_is_not_written_through_a_link(tmp_path: Path) -> None:
    there = FileSourceDir(tmp_path / "there")
    there.run(0)
    again, outside = tmp_path / "again", tmp_path / "outside"
    begin_anew(again)
    outside.mkdir()
    (again / "sources").symlink_to(outside)
    with pytest.raises(DamagedRecordError, match="symbolic link"):
        put_plan(again, BatchId(0), plan_of(there.root, BatchId(0)))
    assert not list(outside.iterdir())


def test_a_plan_without_offsets_is_refused(tmp_path: Path) -> None:
    begin_anew(tmp_path / "again")
    with pytest.raises(DamagedRecordError, match="has no offsets"):
        put_plan(tmp_path / "again", BatchId(0), {})


def test_offsets_that_name_a_source_outside_remove_nothing_there(tmp_path: Path) -> None:
    """Spark's second form of offsets names the folder of each source."""
    again, outside = tmp_path / "again", tmp_path / "outside"
    begin_anew(again)
    outside.mkdir()
    (outside / "7").write_text("precious")
    plan = {"offsets/0": b'v2\n{"conf":{}}\n../../outside:{"logOffset":3}'}
    with pytest.raises(DamagedRecordError, match="cannot be read"):
        put_plan(again, BatchId(0), plan)
    assert (outside / "7").read_text() == "precious"
