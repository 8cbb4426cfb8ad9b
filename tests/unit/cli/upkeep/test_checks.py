"""What ``cutline doctor`` finds on a machine: each check with a machine that passes it, and one that does not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cutline.cli.upkeep import checks


def java(folder: Path, version: str, code: int = 0) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\nexit {code}\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("version", "verdict"), [("17.0.9", "ok"), ("21", "ok"), ("11.0.2", "fail"), ("1.8.0_392", "fail"), ("?", "fail")]
)
def test_java_must_be_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, verdict: checks.Verdict
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "jdk", version)))
    assert checks.check_java().verdict == verdict


def test_java_must_be_there_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = checks.check_java()
    assert (missing.verdict, "JAVA_HOME" in missing.next_step) == ("fail", True)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nosuch"))
    assert "No such file" in checks.check_java().text
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "broken", "17", code=1)))
    assert checks.check_java().verdict == "fail"
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", f"{java(tmp_path / 'jdk', '17') / 'bin'}:/bin")
    assert checks.check_java().verdict == "ok"


def test_python_and_pyspark_of_this_process() -> None:
    assert checks.check_python().verdict == "ok"
    assert checks.check_pyspark().text.startswith("4.")


def test_a_pyspark_that_flows_do_not_run_on_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.0.5")
    found = checks.check_pyspark()
    assert found.verdict == "fail" and found.text.startswith("4.0.5 is not supported: ")
    assert found.next_step == "run: python -m pip install 'pyspark>=4.1,<4.4'"


def test_little_memory_is_a_warning_of_the_container_too(tmp_path: Path) -> None:
    machine, limit = tmp_path / "meminfo", tmp_path / "limit"
    machine.write_text("MemTotal: 32000000 kB\nMemAvailable: 16000000 kB\n")
    assert checks.check_memory(machine, limit).verdict == "ok"
    limit.write_text("max\n")
    assert checks.check_memory(machine, limit).verdict == "ok"
    limit.write_text("1000000000\n")
    assert (found := checks.check_memory(machine, limit)).verdict == "warn"
    assert found.text == "1.0 GB available"
    assert checks.check_memory(tmp_path / "nosuch", limit).verdict == "ok"


def test_room_on_the_disk_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(free_bytes: int, inodes: int, free_inodes: int) -> list[tuple[str, str]]:
        about = os.statvfs_result((1, 1, 1, free_bytes, free_bytes, inodes, free_inodes, free_inodes, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: about)
        return [(one.check, one.verdict) for one in checks.check_disk(tmp_path / "new" / "storage")]

    plenty = 10**12
    assert disk(plenty, 10**6, 10**6) == [("disk", "ok"), ("inodes", "ok")]
    assert disk(10**8, 10**6, 500) == [("disk", "warn"), ("inodes", "warn")]
    assert disk(10**6, 10**6, 5) == [("disk", "fail"), ("inodes", "fail")]
    assert disk(plenty, 0, 0) == [("disk", "ok"), ("inodes", "ok")], "some file systems have no fixed number"


def test_a_folder_in_which_a_flow_can_work(tmp_path: Path) -> None:
    assert [one.verdict for one in checks.check_folder(tmp_path)] == ["ok", "ok"]
    assert "does not exist yet" in next(checks.check_folder(tmp_path / "new" / "storage")).text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_a_folder_in_which_a_flow_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (found,) = checks.check_folder(tmp_path / "file" / "below")
    assert (found.verdict, found.text) == ("fail", f"{tmp_path / 'file'} is a file")

    def refused(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", refused)
    (found,) = checks.check_folder(tmp_path)
    assert found.verdict == "fail" and "cannot make a hard link" in found.text
    assert "file system with hard links" in found.next_step
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("difference_ms", "verdict", "text"),
    [
        (500, "ok", "agrees with the store"),
        (5_000, "warn", "5 seconds behind the store"),
        (-60_000, "warn", "60 seconds ahead of the store"),
        (1_000_000, "fail", "1,000 seconds behind the store"),
    ],
)
def test_clocks_are_compared(difference_ms: float, verdict: checks.Verdict, text: str) -> None:
    found = checks.compared_clocks("clock", difference_ms, "the store")
    assert (found.verdict, found.text) == (verdict, text)
