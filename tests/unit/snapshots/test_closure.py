"""The closure of a batch, on directories made by hand in Spark's layout."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from cutline.errors import DamagedRecordError
from cutline.ids import NO_BATCH, BatchId
from cutline.ports import FileSet
from cutline.snapshots.closure import closure, last_batches


class SparkDir:
    """Writes a spark_checkpoint_dir file by file, with the litter that real ones have."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("metadata", '{"id":"6b0e"}')

    def write(self, name: str, data: bytes | str) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        path.with_name(f".{path.name}.crc").write_bytes(b"crc\x00")
        path.with_name(f".{path.name}.0b1c.tmp").write_bytes(b"")
        return name

    def batch(
        self,
        number: int,
        *positions: str,
        ids: dict[str, list[list[str]]] | None = None,
        watermark: int = 0,
        partitions: int = 1,
    ) -> None:
        """Offsets and commit of a batch; with ``ids`` in state format 2."""
        head = json.dumps({"batchWatermarkMs": 0, "conf": {"spark.sql.shuffle.partitions": str(partitions)}})
        self.write(f"offsets/{number}", "\n".join(["v1", head, *positions]))
        commit: dict[str, object] = {"nextBatchWatermarkMs": watermark}
        if ids is not None:
            commit["stateUniqueIds"] = ids
        self.write(f"commits/{number}", f"v{1 if ids is None else 2}\n{json.dumps(commit)}")

    def batches(self, count: int, *, partitions: int = 1) -> None:
        """Batches 0 to count - 1 in state format 1, without sources."""
        for number in range(count):
            self.batch(number, partitions=partitions)

    def state(self, *names: str, folder: str = "state/0/0", data: bytes | str = b"changes") -> list[str]:
        for name in names:
            self.write(f"{folder}/{name}.crc", "{}")
        return [self.write(f"{folder}/{name}", data) for name in names]

    def snapshot(self, name: str, *ssts: str, logs: tuple[str, ...] = (), folder: str = "state/0/0") -> list[str]:
        """A RocksDB zip and the files that it names."""
        parts = [f"SSTs/{sst}" for sst in ssts] + [f"logs/{log}" for log in logs]
        return [
            *self.state(name, folder=folder, data=snapshot_zip(ssts, logs)),
            *(self.write(f"{folder}/{part}", b"table") for part in parts),
        ]


def snapshot_zip(ssts: tuple[str, ...], logs: tuple[str, ...] = ()) -> bytes:
    head: dict[str, object] = {
        "sstFiles": [{"localFileName": "1.sst", "dfsSstFileName": name, "sizeBytes": 5} for name in ssts],
        "numKeys": 4,
    }
    if logs:
        head["logFiles"] = [{"localFileName": "1.log", "dfsLogFileName": name, "sizeBytes": 5} for name in logs]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("CURRENT", "MANIFEST-000005\n")
        archive.writestr("metadata", "v1\n" + json.dumps(head))
    return file.getvalue()


def utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def changelog(*ancestors: tuple[int, str], codec: str = "lz4", version: str = "v3") -> bytes:
    """A format-2 changelog as Spark writes it: the lineage, then the changes."""
    lineage = [{"version": number, "checkpointUniqueId": unique_id} for number, unique_id in ancestors]
    content = utf(version) + utf(json.dumps(lineage, separators=(",", ":"))) + b"\x00\x00\x00\x11 changes" * 50
    if codec == "zstd":
        return pa.compress(content, codec="zstd", asbytes=True)
    blocks = [content[start : start + 200] for start in range(0, len(content), 200)]
    if codec == "snappy":
        packed = [pa.compress(block, codec="snappy", asbytes=True) for block in blocks]
        return b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + b"".join(struct.pack(">i", len(p)) + p for p in packed)
    stored = codec == "lz4 stored"
    framed = b""
    for block in blocks:
        body = block if stored else pa.compress(block, codec="lz4_raw", asbytes=True)
        framed += struct.pack("<8sBiii", b"LZ4Block", 0x15 if stored else 0x25, len(body), len(block), 0) + body
    return framed + struct.pack("<8sBiii", b"LZ4Block", 0x15, 0, 0, 0)


@pytest.fixture
def spark_dir(tmp_path: Path) -> SparkDir:
    return SparkDir(tmp_path / "spark")


def at(spark_dir: SparkDir, batch: int) -> FileSet:
    return closure(spark_dir.root, BatchId(batch))


def state_of(spark_dir: SparkDir, batch: int, subtask: int = 0) -> list[str]:
    return sorted({int(number): files for number, files in at(spark_dir, batch).subtasks.items()}[subtask])


# ------------------------------------------------------------------------------------------------- the query's own logs


def test_before_the_first_batch_nothing_is_needed(spark_dir: SparkDir) -> None:
    assert closure(spark_dir.root, NO_BATCH) == FileSet(batch=NO_BATCH, subtasks={}, shared=[])


def test_a_stateless_query_needs_its_last_two_batches_and_has_one_subtask(spark_dir: SparkDir) -> None:
    spark_dir.batches(9)
    files = at(spark_dir, 5)
    assert files.shared == ["metadata", "offsets/4", "offsets/5", "commits/4", "commits/5"]
    assert files.subtasks == {0: []}


def test_the_first_batch_has_none_before_it(spark_dir: SparkDir) -> None:
    spark_dir.batches(3)
    assert at(spark_dir, 0).shared == ["metadata", "offsets/0", "commits/0"]


def test_the_watermark_is_the_one_the_next_batch_starts_with(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, watermark=1_704_067_919_000)
    assert at(spark_dir, 0).watermark_ms == 1_704_067_919_000


@pytest.mark.parametrize("missing", ["commits/4", "offsets/4", "commits/3", "offsets/3", "metadata"])
def test_a_missing_record_is_named(spark_dir: SparkDir, missing: str) -> None:
    spark_dir.batches(5)
    (spark_dir.root / missing).unlink()
    with pytest.raises(DamagedRecordError) as caught:
        at(spark_dir, 4)
    assert caught.value.where == {"path": f"{spark_dir.root}/{missing}", "batch": 4}


@pytest.mark.parametrize("name", ["commits/1", "offsets/1"])
@pytest.mark.parametrize("content", [b"", b"v1", b"v1\n{cut", b"\x00" * 40])
def test_a_torn_record_is_damage(spark_dir: SparkDir, name: str, content: bytes) -> None:
    spark_dir.batches(2)
    spark_dir.write(name, content)
    with pytest.raises(DamagedRecordError, match="cannot be read"):
        at(spark_dir, 1)


def test_last_batches_are_the_highest_of_offsets_and_of_commits(spark_dir: SparkDir) -> None:
    assert last_batches(spark_dir.root) == (NO_BATCH, NO_BATCH)
    spark_dir.batches(11)
    spark_dir.write("offsets/11", "v1\n{}")
    assert last_batches(spark_dir.root) == (11, 10)


# ------------------------------------------------------------------------------------------------- state format 1


def test_rocksdb_goes_back_to_the_newest_snapshot(spark_dir: SparkDir) -> None:
    spark_dir.batches(8)
    spark_dir.snapshot("3.zip", "a.sst")
    wanted = spark_dir.snapshot("5.zip", "a.sst", "b.sst", logs=("c.log",))
    spark_dir.state("1.changelog", "2.changelog", "3.changelog", "4.changelog", "5.changelog")
    wanted += spark_dir.state("6.changelog", "7.changelog")
    spark_dir.state("8.changelog")
    spark_dir.snapshot("8.zip", "d.sst")
    assert state_of(spark_dir, 6) == sorted(wanted)


def test_rocksdb_takes_only_the_snapshot_where_a_version_has_both(spark_dir: SparkDir) -> None:
    spark_dir.batches(3)
    spark_dir.state("1.changelog", "2.changelog")
    assert state_of(spark_dir, 1) == ["state/0/0/1.changelog", "state/0/0/2.changelog"]
    wanted = spark_dir.snapshot("2.zip", "a.sst")
    assert state_of(spark_dir, 1) == sorted(wanted)


def test_a_snapshot_without_tables_stands_alone(spark_dir: SparkDir) -> None:
    spark_dir.batch(0)
    assert state_of(spark_dir, 0) == spark_dir.snapshot("1.zip") or pytest.fail("unexpected files")


def test_hdfs_backed_goes_back_to_the_newest_snapshot(spark_dir: SparkDir) -> None:
    spark_dir.batches(8)
    spark_dir.state(*(f"{version}.delta" for version in range(1, 9)))
    spark_dir.state("3.snapshot", "7.snapshot")
    assert state_of(spark_dir, 1) == ["state/0/0/1.delta", "state/0/0/2.delta"]
    assert state_of(spark_dir, 5) == ["state/0/0/3.snapshot", *(f"state/0/0/{v}.delta" for v in (4, 5, 6))] or True
    assert state_of(spark_dir, 5) == sorted(["state/0/0/3.snapshot", *(f"state/0/0/{v}.delta" for v in (4, 5, 6))])
    assert state_of(spark_dir, 6) == ["state/0/0/7.snapshot"]


@pytest.mark.parametrize("gap", ["7.changelog", "6.changelog"])
def test_a_gap_in_the_chain_is_damage(spark_dir: SparkDir, gap: str) -> None:
    spark_dir.batches(8)
    spark_dir.snapshot("5.zip")
    spark_dir.state("6.changelog", "7.changelog", "8.changelog")
    (spark_dir.root / "state/0/0" / gap).unlink()
    with pytest.raises(DamagedRecordError, match=gap.split(".", maxsplit=1)[0]):
        at(spark_dir, 7)


def test_a_snapshot_that_is_no_zip_is_damage(spark_dir: SparkDir) -> None:
    spark_dir.batch(0)
    spark_dir.state("1.zip", data=snapshot_zip(("a.sst",))[:-30])
    with pytest.raises(DamagedRecordError, match=r"state/0/0/1\.zip"):
        at(spark_dir, 0)


def test_every_operator_and_partition_counts(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, partitions=2)
    for operator in (0, 1):
        for partition in (0, 1):
            spark_dir.state("1.delta", folder=f"state/{operator}/{partition}")
    assert at(spark_dir, 0).subtasks == {
        0: ["state/0/0/1.delta", "state/1/0/1.delta"],
        1: ["state/0/1/1.delta", "state/1/1/1.delta"],
    }


def test_partitions_left_behind_by_a_shrunk_query_are_not_in_use(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, partitions=4)
    for partition in range(4):
        spark_dir.state("1.changelog", folder=f"state/0/{partition}")
    spark_dir.batch(1, partitions=2)
    wanted = {n: spark_dir.snapshot("2.zip", "a.sst", folder=f"state/0/{n}") for n in range(2)}
    assert at(spark_dir, 1).subtasks == wanted
    assert list(at(spark_dir, 0).subtasks) == [0, 1, 2, 3]


def test_a_lost_partition_is_damage(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, partitions=3)
    for partition in (0, 2):
        spark_dir.state("1.delta", folder=f"state/0/{partition}")
    with pytest.raises(DamagedRecordError, match="state/0/1"):
        at(spark_dir, 0)


def test_an_operator_over_all_rows_has_one_partition_whatever_the_setting(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, partitions=3)
    for partition in range(3):
        spark_dir.state("1.delta", folder=f"state/0/{partition}")
    spark_dir.state("1.delta", folder="state/1/0")
    assert at(spark_dir, 0).subtasks[at_subtask(0)] == ["state/0/0/1.delta", "state/1/0/1.delta"]


def at_subtask(number: int) -> object:
    return number


# ------------------------------------------------------------------------------------------------- state format 2


def test_the_commit_says_which_try_counts(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, ids={"0": [["aa"]]})
    spark_dir.batch(1, ids={"0": [["bb"]]})
    wanted = spark_dir.state("1_aa.changelog", "2_bb.changelog")
    spark_dir.state("1_xx.changelog", "2_yy.changelog")
    spark_dir.snapshot("1_xx.zip", "x.sst")
    spark_dir.snapshot("2_yy.zip", "y.sst")
    assert state_of(spark_dir, 1) == wanted


def test_the_chain_ends_at_the_right_tries_snapshot(spark_dir: SparkDir) -> None:
    for number, unique_id in enumerate(["aa", "bb", "cc", "dd"]):
        spark_dir.batch(number, ids={"0": [[unique_id]]})
    spark_dir.state("1_aa.changelog", "2_bb.changelog", "3_cc.changelog")
    wanted = spark_dir.snapshot("2_bb.zip", "b.sst")
    spark_dir.snapshot("3_zz.zip", "z.sst")
    wanted += spark_dir.state("3_cc.changelog", "4_dd.changelog")
    assert state_of(spark_dir, 3) == sorted(wanted)


def test_a_join_has_several_stores_per_partition(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, ids={"0": [["l0", "r0"], ["l1", "r1"]]})
    spark_dir.batch(1, ids={"0": [["L0", "R0"], ["L1", "R1"]]})
    wanted: dict[int, list[str]] = {}
    for partition in (0, 1):
        for side, letter in (("left-keyToNumValues", "l"), ("right-keyToNumValues", "r")):
            folder = f"state/0/{partition}/{side}"
            files = spark_dir.snapshot(f"1_{letter}{partition}.zip", f"{letter}.sst", folder=folder)
            files += spark_dir.state(f"2_{letter.upper()}{partition}.changelog", folder=folder)
            wanted[partition] = sorted(wanted.get(partition, []) + files)
    schema = spark_dir.write("state/0/0/left-keyToNumValues/_metadata/schema", "s")
    files = at(spark_dir, 1)
    assert {number: sorted(names) for number, names in files.subtasks.items()} == wanted
    assert schema in files.shared


def test_a_partition_that_the_commit_lists_must_be_there(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, ids={"0": [["aa"], ["bb"]]})
    spark_dir.state("1_aa.changelog")
    with pytest.raises(DamagedRecordError, match="state/0/1"):
        at(spark_dir, 0)


def test_a_version_whose_listed_file_is_gone_is_damage(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, ids={"0": [["aa"]]})
    spark_dir.batch(1, ids={"0": [["bb"]]})
    spark_dir.state("1_xx.changelog", "2_bb.changelog")
    with pytest.raises(DamagedRecordError, match=r"state/0/0/1_\*"):
        at(spark_dir, 1)


def test_a_shrunk_query_has_the_partitions_of_its_commit(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, ids={"0": [["aa"], ["bb"]]})
    spark_dir.state("1_aa.changelog")
    spark_dir.state("1_bb.changelog", folder="state/0/1")
    spark_dir.batch(1, ids={"0": [["cc"]]})
    assert at_all(spark_dir, 1) == {0: spark_dir.snapshot("2_cc.zip", "c.sst")} or pytest.fail("unexpected files")


def at_all(spark_dir: SparkDir, batch: int) -> dict[int, list[str]]:
    return {int(number): files for number, files in at(spark_dir, batch).subtasks.items()}
