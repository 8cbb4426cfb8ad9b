"""Files of a closure against the checksums beside them."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from cutline.spark_dir.file_set import verify_files
from cutline.spark_dir.verify import SMALL_BYTES

#: A real one, from PySpark 4.3.
REAL_COMMIT = (
    b'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["f0c09504-72df-4d54-802e-6eaf8fc13d89"],'
    b'["c56dd01e-2677-48fc-85e1-810832632902"]]}}'
)
REAL_TWIN = bytes.fromhex("637263000000020006f8d82f")


def write(root: Path, name: str, data: bytes, *, twin: bytes | None = None) -> str:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.with_name(f".{path.name}.crc").write_bytes(twin_of(data) if twin is None else twin)
    return name


def twin_of(data: bytes, chunk: int = 512) -> bytes:
    sums = [zlib.crc32(data[start : start + chunk]) for start in range(0, len(data), chunk)]
    return b"crc\x00" + struct.pack(f">I{len(sums)}I", chunk, *sums)


def snapshot(root: Path, name: str, **sizes: int) -> str:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [{"dfsSstFileName": f"{sst}.sst", "sizeBytes": size} for sst, size in sizes.items()]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MANIFEST-000005", b"manifest" * 100)
        archive.writestr("metadata", "v1\n" + json.dumps({"sstFiles": files}))
    return name


def test_a_real_twin_fits_its_file(tmp_path: Path) -> None:
    assert twin_of(REAL_COMMIT) == REAL_TWIN
    write(tmp_path, "commits/3", REAL_COMMIT, twin=REAL_TWIN)
    assert verify_files(tmp_path, ["commits/3"], full=True) == []


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    name = write(tmp_path, "commits/3", REAL_COMMIT.replace(b":0,", b":7,"), twin=REAL_TWIN)
    assert verify_files(tmp_path, [name], full=False) == ["commits/3 does not match its checksum at byte 0"]


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1024, 1500])
def test_whole_files_of_any_size_pass(tmp_path: Path, size: int) -> None:
    name = write(tmp_path, "state/0/0/1.delta", b"x" * size)
    assert verify_files(tmp_path, [name], full=True) == []


def test_a_file_cut_short_does_not_fit_its_checksums(tmp_path: Path) -> None:
    name = write(tmp_path, "state/0/0/1.delta", b"x" * 600, twin=twin_of(b"x" * 1500))
    assert verify_files(tmp_path, [name], full=False) == [
        "state/0/0/1.delta has 600 bytes, which do not fit its 3 checksums of 512 bytes each"
    ]


def test_a_large_file_is_read_only_when_asked(tmp_path: Path) -> None:
    data = bytearray(SMALL_BYTES + 1000)
    twin = twin_of(bytes(data))
    data[-1] = 1
    name = write(tmp_path, "state/0/0/SSTs/1.sst", bytes(data), twin=twin)
    assert verify_files(tmp_path, [name], full=False) == []
    assert verify_files(tmp_path, [name], full=True) == [
        f"{name} does not match its checksum at byte {len(data) // 512 * 512}"
    ]


@pytest.mark.parametrize("twin", [b"", b"crc", b"crc\x00\x00\x00\x02\x00\x01", b"what" + REAL_TWIN[4:]])
def test_a_damaged_twin_is_reported(tmp_path: Path, twin: bytes) -> None:
    name = write(tmp_path, "commits/3", REAL_COMMIT, twin=twin)
    assert verify_files(tmp_path, [name], full=False) == ["commits/3 has a damaged checksum file"]


def test_a_file_without_twin_passes(tmp_path: Path) -> None:
    name = write(tmp_path, "commits/3", REAL_COMMIT)
    (tmp_path / "commits/.3.crc").unlink()
    assert verify_files(tmp_path, [name], full=True) == []


def test_missing_files_and_folders_in_place_of_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "offsets/7").mkdir(parents=True)
    assert verify_files(tmp_path, ["offsets/7", "offsets/8", "state/0/0/1.delta"], full=False) == [
        "offsets/7 is not a file",
        "offsets/8 is missing",
        "state/0/0/1.delta is missing",
    ]


@pytest.mark.parametrize(
    ("name", "is_problem"),
    [
        ("metadata", True),
        ("commits/3", True),
        ("state/0/0/3_aa.changelog", True),
        ("state/0/0/3_aa.zip", True),
        ("state/0/0/SSTs/1.sst", True),
        ("state/0/_metadata/metadata", True),
        ("sources/0/3", True),
        ("sources/0/9.compact", True),
        ("state/0/0/logs/1.log", False),
        ("sources/0/mark-of-a-plugin", False),
    ],
)
def test_an_empty_file_is_a_problem_where_spark_never_writes_one(tmp_path: Path, name: str, is_problem: bool) -> None:
    write(tmp_path, name, b"")
    assert verify_files(tmp_path, [name], full=False) == ([f"{name} is empty"] if is_problem else [])


def test_spark_remembers_the_size_of_its_state_files(tmp_path: Path) -> None:
    name = write(tmp_path, "state/0/0/3_aa.changelog", b"x" * 100)
    checksum = tmp_path / f"{name}.crc"
    checksum.write_text('{"algorithm":"CRC32C","value":-53991281,"mainFileSize":100,"timestampMs":1}')
    assert verify_files(tmp_path, [name], full=False) == []
    checksum.write_text('{"algorithm":"CRC32C","value":-53991281,"mainFileSize":140,"timestampMs":1}')
    assert verify_files(tmp_path, [name], full=False) == [f"{name} has 100 bytes, but Spark wrote 140"]


def test_a_snapshot_must_open(tmp_path: Path) -> None:
    name = snapshot(tmp_path, "state/0/0/3.zip")
    assert verify_files(tmp_path, [name], full=True) == []
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-40])
    assert verify_files(tmp_path, [name], full=False) == [f"{name} is not a RocksDB snapshot, or is damaged"]


def test_a_snapshots_entries_are_read_when_asked(tmp_path: Path) -> None:
    name = snapshot(tmp_path, "state/0/0/3.zip")
    path = tmp_path / name
    path.write_bytes(path.read_bytes().replace(b"manifestmanifest", b"manifestMANIFEST", 1))
    assert verify_files(tmp_path, [name], full=False) == []
    assert verify_files(tmp_path, [name], full=True) == [f"{name} has a damaged entry MANIFEST-000005"]


def test_a_table_must_have_the_size_that_its_snapshot_says(tmp_path: Path) -> None:
    zip_name = snapshot(tmp_path, "state/0/0/3.zip", good=5, cut=9, elsewhere=7)
    good = write(tmp_path, "state/0/0/SSTs/good.sst", b"table")
    cut = write(tmp_path, "state/0/0/SSTs/cut.sst", b"table")
    assert verify_files(tmp_path, [good, cut, zip_name], full=False) == [
        f"{cut} has 5 bytes, but 9 according to its snapshot"
    ]
