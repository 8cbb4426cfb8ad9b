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
from cutline.model.ids import NO_BATCH, BatchId
from cutline.ports.query_dir import FileSet
from cutline.spark_dir.file_set import closure, last_batches


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
        return bytes(pa.compress(content, codec="zstd", asbytes=True))
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


def test_before_the_first_batch_it_keeps_where_the_sources_began(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text("{}")
    for folder, content in {"0": 'v1\n{"topic":{"0":42}}', "1": 'v1\n{"path":"file:///in/a.json"}'}.items():
        (tmp_path / "sources" / folder).mkdir(parents=True)
        (tmp_path / "sources" / folder / "0").write_text(content)
    assert closure(tmp_path, NO_BATCH).shared == ["metadata", "sources/0/0"]


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
    wanted = spark_dir.snapshot("1.zip")
    assert state_of(spark_dir, 0) == wanted


def test_hdfs_backed_goes_back_to_the_newest_snapshot(spark_dir: SparkDir) -> None:
    spark_dir.batches(8)
    spark_dir.state(*(f"{version}.delta" for version in range(1, 9)))
    spark_dir.state("3.snapshot", "7.snapshot")
    assert state_of(spark_dir, 1) == ["state/0/0/1.delta", "state/0/0/2.delta"]
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


def test_an_emptied_partition_is_damage(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, partitions=2)
    spark_dir.state("1.delta")
    (spark_dir.root / "state/0/1/SSTs").mkdir(parents=True)
    with pytest.raises(DamagedRecordError, match="state/0/1"):
        at(spark_dir, 0)


def test_an_operator_over_all_rows_has_one_partition_whatever_the_setting(spark_dir: SparkDir) -> None:
    spark_dir.batch(0, partitions=3)
    for partition in range(3):
        spark_dir.state("1.delta", folder=f"state/0/{partition}")
    spark_dir.state("1.delta", folder="state/1/0")
    assert state_of(spark_dir, 0) == ["state/0/0/1.delta", "state/1/0/1.delta"]
    assert state_of(spark_dir, 0, subtask=2) == ["state/0/2/1.delta"]


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
    found = at(spark_dir, 1)
    assert {number: sorted(names) for number, names in found.subtasks.items()} == wanted
    assert schema in found.shared


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
    wanted = spark_dir.snapshot("2_cc.zip", "c.sst")
    assert at(spark_dir, 1).subtasks == {0: wanted}


# ------------------------------------------------------------------------------------------------- purged commits


@pytest.mark.parametrize("codec", ["lz4", "lz4 stored", "zstd", "snappy"])
@pytest.mark.parametrize("version", ["v3", "v4"])
def test_without_older_commits_the_changelog_names_its_ancestors(spark_dir: SparkDir, codec: str, version: str) -> None:
    spark_dir.batch(3, ids={"0": [["dd"]]})
    spark_dir.batch(4, ids={"0": [["ee"]]})
    wanted = spark_dir.snapshot("2_bb.zip", "b.sst")
    wanted += spark_dir.state("3_cc.changelog", data=changelog((2, "bb"), codec=codec, version=version))
    data = changelog((1, "aa"), (2, "bb"), (3, "cc"), codec=codec, version=version)
    wanted += spark_dir.state("4_dd.changelog", data=data)
    wanted += spark_dir.state("5_ee.changelog", data=changelog((4, "dd"), codec=codec, version=version))
    # Two tries of each: only the lineage tells them apart.
    spark_dir.state("2_x.changelog", "3_x.changelog", "4_x.changelog")
    assert state_of(spark_dir, 4) == sorted(wanted)


def test_a_lineage_may_go_back_step_by_step(spark_dir: SparkDir) -> None:
    """As in a store that was never uploaded as a snapshot: each file names a few ancestors, the first one none."""
    spark_dir.batch(3, ids={"0": [["dd"]]})
    spark_dir.batch(4, ids={"0": [["ee"]]})
    names = ["1_aa", "2_bb", "3_cc", "4_dd", "5_ee"]
    ancestors = [(), ((1, "aa"),), ((2, "bb"),), ((3, "cc"),), ((4, "dd"),)]
    wanted = [
        file
        for name, older in zip(names, ancestors, strict=True)
        for file in spark_dir.state(f"{name}.changelog", data=changelog(*older))
    ]
    spark_dir.state("1_x.changelog", "2_x.changelog")
    assert state_of(spark_dir, 4) == wanted


def test_a_long_lineage_spans_many_blocks(spark_dir: SparkDir) -> None:
    ids = [f"{number:08x}-c1ee-48f7" for number in range(301)]
    spark_dir.batch(298, ids={"0": [[ids[299]]]})
    spark_dir.batch(299, ids={"0": [[ids[300]]]})
    for number in range(1, 299):
        spark_dir.state(f"{number}_{ids[number]}.changelog", f"{number}_x.changelog")
    older = [(number, ids[number]) for number in range(1, 299)]
    spark_dir.state(f"299_{ids[299]}.changelog", data=changelog(*older))
    spark_dir.state(f"300_{ids[300]}.changelog", data=changelog(*older))
    assert len(state_of(spark_dir, 299)) == 300


def test_without_commit_and_lineage_there_must_be_no_choice(spark_dir: SparkDir) -> None:
    spark_dir.batch(1, ids={"0": [["bb"]]})
    spark_dir.batch(2, ids={"0": [["cc"]]})
    wanted = spark_dir.state("1_aa.changelog", "2_bb.changelog", "3_cc.changelog", data=b"ZV\x01 no known codec")
    assert state_of(spark_dir, 2) == wanted
    spark_dir.snapshot("1_x.zip", "x.sst")
    with pytest.raises(DamagedRecordError, match="several attempts"):
        at(spark_dir, 2)


def test_a_chain_that_starts_nowhere_is_damage(spark_dir: SparkDir) -> None:
    spark_dir.batch(7, ids={"0": [["aa"]]})
    spark_dir.batch(8, ids={"0": [["bb"]]})
    spark_dir.state("8_aa.changelog", "9_bb.changelog", data=changelog((7, "gone")))
    with pytest.raises(DamagedRecordError, match=r"state/0/0/7_"):
        at(spark_dir, 8)


# ------------------------------------------------------------------------------------------------- schemas and sources


def test_schemas_and_operator_metadata_are_shared(spark_dir: SparkDir) -> None:
    spark_dir.batches(3)
    spark_dir.state("1.changelog", "2.changelog", "3.changelog")
    wanted = [
        spark_dir.write("state/0/0/_metadata/schema", "s"),
        spark_dir.write("state/0/_metadata/metadata", "m"),
        spark_dir.write("state/0/_metadata/v2/0", "m"),
        spark_dir.write("state/0/_metadata/v2/1", "m"),
        spark_dir.write("state/0/_stateSchema/default/0_aa", "s"),
    ]
    spark_dir.write("state/0/_metadata/v2/2", "of a run that began after our batch")
    assert sorted(set(at(spark_dir, 1).shared) - set(query_logs(1))) == wanted


def query_logs(batch: int) -> list[str]:
    return ["metadata", *(f"{log}/{number}" for log in ("offsets", "commits") for number in (batch - 1, batch))]


def file_log(spark_dir: SparkDir, folder: str, *names: str) -> None:
    for name in names:
        spark_dir.write(f"{folder}/{name}", 'v1\n{"path":"file:///in/1.json","timestamp":1,"batchId":0}')


def test_a_file_sources_log_is_cut_at_its_offset(spark_dir: SparkDir) -> None:
    file_log(spark_dir, "sources/0", *"012345678", "9.compact", "10", "11", "12", "19.compact", "20")
    for number, last in enumerate([4, 9, 12, 20]):
        spark_dir.batch(number, json.dumps({"logOffset": last}))
    shared = [[name.rpartition("/")[2] for name in at(spark_dir, n).shared if "sources" in name] for n in range(4)]
    assert shared == [["4", "3", "2", "1", "0"], ["9.compact"], ["12", "11", "10", "9.compact"], ["20", "19.compact"]]


def test_a_gap_in_a_file_sources_log_is_damage(spark_dir: SparkDir) -> None:
    file_log(spark_dir, "sources/0", "2", "3", "9.compact")
    spark_dir.batch(0, '{"logOffset":3}')
    with pytest.raises(DamagedRecordError, match="sources/0/1"):
        at(spark_dir, 0)


def test_each_source_has_its_own_folder(spark_dir: SparkDir) -> None:
    file_log(spark_dir, "sources/0", "0", "1")
    file_log(spark_dir, "sources/1", "0", "1", "2")
    spark_dir.batch(0, '{"logOffset":1}', '{"logOffset":0}')
    assert at(spark_dir, 0).shared[3:] == ["sources/0/1", "sources/0/0", "sources/1/0"]


def test_offsets_of_version_2_name_the_folder(spark_dir: SparkDir) -> None:
    file_log(spark_dir, "sources/events", "0", "1")
    spark_dir.batch(0)
    spark_dir.write("offsets/0", 'v2\n{"conf":{}}\nevents:{"logOffset":0}')
    assert at(spark_dir, 0).shared[3:] == ["sources/events/0"]


def test_any_other_sources_log_is_taken_whole(spark_dir: SparkDir) -> None:
    spark_dir.write("sources/0/0", 'v1\n{"topic":{"0":17}}')
    spark_dir.write("sources/0/kept/by-a-plugin", "x")
    spark_dir.batch(0, '{"topic":{"0":23}}')
    assert sorted(at(spark_dir, 0).shared[3:]) == ["sources/0/0", "sources/0/kept/by-a-plugin"]


def test_a_file_source_that_has_read_nothing_keeps_nothing(spark_dir: SparkDir) -> None:
    """Its log may already hold what a later batch is about to read."""
    file_log(spark_dir, "sources/0", "0")
    spark_dir.batch(0, "-")
    assert at(spark_dir, 0).shared[3:] == []


def test_another_source_that_has_read_nothing_keeps_where_it_starts(spark_dir: SparkDir) -> None:
    spark_dir.write("sources/0/0", 'v1\n{"topic":{"0":17}}')
    spark_dir.batch(0, "-")
    assert at(spark_dir, 0).shared[3:] == ["sources/0/0"]


# ------------------------------------------------------------------------------------------------- as a whole


def test_the_closure_of_a_restored_directory_is_itself(spark_dir: SparkDir, tmp_path: Path) -> None:
    for number, unique_id in enumerate(["aa", "bb", "cc", "dd", "ee"]):
        spark_dir.batch(number, '{"logOffset":0}', ids={"0": [[unique_id]]})
        older = [(version + 1, "aabbccdd"[2 * version : 2 * version + 2]) for version in range(number)]
        spark_dir.state(f"{number + 1}_{unique_id}.changelog", data=changelog(*older))
    file_log(spark_dir, "sources/0", "0", "1")
    first = at(spark_dir, 3)
    copy = tmp_path / "copy"
    for name in [*first.shared, *first.subtasks[min(first.subtasks)]]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((spark_dir.root / name).read_bytes())
    assert closure(copy, BatchId(3)) == first
    assert {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()} == {
        *first.shared,
        *first.subtasks[min(first.subtasks)],
    }
