"""What ``cutline doctor`` looks at on this machine: programs, memory, the storage folder, clocks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from cutline.cli.words import counted, size
from cutline.config.spark_versions import REQUIREMENT, why_unsupported

Verdict = Literal["ok", "warn", "fail"]

LEAST_JAVA = 17
_JAVA_SECONDS = 20.0
_LITTLE_MEMORY_BYTES = 2_000_000_000
_LITTLE_DISK_BYTES, _NO_DISK_BYTES = 1_000_000_000, 50_000_000
_FEW_INODES, _NO_INODES = 10_000, 100
#: A file system may store times in whole seconds.
_CLOCK_MS = 2_500
#: Requests to S3 that are this far off are refused.
_WRONG_CLOCK_MS = 900_000
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. Field names are the keys of ``--json``."""

    check: str
    verdict: Verdict
    text: str
    next_step: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, verdict="ok", text=text)


# ---------------------------------------------------------------------- programs


def check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info >= (3, 14):
        return Finding(
            check="Python",
            verdict="warn",
            text=f"{version} is newer than the versions Cutline is tested with",
            next_step="use Python 3.11, 3.12 or 3.13 if Spark fails to start",
        )
    return ok("Python", f"{version} at {sys.executable}")


def check_pyspark() -> Finding:
    install = f"run: python -m pip install '{REQUIREMENT}'"
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return Finding(check="PySpark", verdict="fail", text="not installed", next_step=install)
    why = why_unsupported(version)
    if why is not None:
        return Finding(check="PySpark", verdict="fail", text=f"{version} is not supported: {why}", next_step=install)
    return ok("PySpark", version)


def check_java() -> Finding:
    """The Java that Spark would start: of JAVA_HOME, or else on the path."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    install = f"install a JDK {LEAST_JAVA} or newer, and set JAVA_HOME to its folder"
    if program is None:
        return Finding(check="Java", verdict="fail", text="not found: JAVA_HOME is not set", next_step=install)
    try:
        told = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=_JAVA_SECONDS, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else "it does not answer"
        where = "JAVA_HOME names" if home else "the path has"
        return Finding(check="Java", verdict="fail", text=f"{where} {program}, but: {why}", next_step=install)
    found = _JAVA_VERSION.search(told.stderr + told.stdout)
    if told.returncode or found is None:
        return Finding(check="Java", verdict="fail", text=f"{program} does not tell its version", next_step=install)
    if int(found[1]) < LEAST_JAVA:
        text = f"{program} is Java {found[1]}, and Spark needs {LEAST_JAVA}"
        return Finding(check="Java", verdict="fail", text=text, next_step=install)
    return ok("Java", f"{found[1]} at {program}")


# ---------------------------------------------------------------------- memory and disk


def check_memory(meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")) -> Finding:
    """Of the machine, or of the container if that has less."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free_bytes = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return ok("memory", "this system does not tell")
    with contextlib.suppress(OSError, ValueError):
        free_bytes = min(free_bytes, int(limit.read_text()))
    if free_bytes < _LITTLE_MEMORY_BYTES:
        return Finding(
            check="memory",
            verdict="warn",
            text=f"{size(free_bytes)} available",
            next_step="Spark's driver takes about 1 GB: end other programs, or set spark.driver.memory lower",
        )
    return ok("memory", f"{size(free_bytes)} available")


def check_disk(folder: Path) -> Iterator[Finding]:
    """Room and inodes where ``folder`` is, or would be."""
    try:
        about = os.statvfs(nearest(folder))
    except OSError as error:
        yield Finding(check="disk", verdict="fail", text=f"{folder}: {error.strerror}", next_step="check --storage")
        return
    free_bytes = about.f_bavail * about.f_frsize
    yield Finding(
        check="disk",
        verdict=_verdict(free_bytes, _NO_DISK_BYTES, _LITTLE_DISK_BYTES),
        text=f"{size(free_bytes)} free at {folder}",
        next_step="make room, or set retain_checkpoints lower" if free_bytes < _LITTLE_DISK_BYTES else "",
    )
    if not about.f_files:
        yield ok("inodes", "not limited by this file system")
        return
    yield Finding(
        check="inodes",
        verdict=_verdict(about.f_favail, _NO_INODES, _FEW_INODES),
        text=f"{about.f_favail:,} free at {folder}",
        next_step="remove small files, or use a file system with more inodes" if about.f_favail < _FEW_INODES else "",
    )


def _verdict(free: int, none: int, few: int) -> Verdict:
    return "fail" if free < none else "warn" if free < few else "ok"


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def check_folder(folder: Path, check: str = "permissions") -> Iterator[Finding]:
    """Do what a flow does in its storage, in a folder that is removed again; and compare the clocks."""
    place = nearest(folder)
    if not place.is_dir():
        yield Finding(check=check, verdict="fail", text=f"{place} is a file", next_step="name a folder")
        return
    trial = place / f".cutline-doctor-{secrets.token_hex(4)}"
    step = "create a folder"
    try:
        trial.mkdir()
        step = "write and sync a file"
        before_ms = time.time() * 1000
        with (trial / "written").open("wb") as file:
            file.write(b"cutline doctor")
            file.flush()
            os.fsync(file.fileno())
        written_ms = (trial / "written").stat().st_mtime * 1000
        step = "rename a file"
        (trial / "written").rename(trial / "renamed")
        step = "make a hard link"
        (trial / "linked").hardlink_to(trial / "renamed")
    except OSError as error:
        yield Finding(
            check=check,
            verdict="fail",
            text=f"cannot {step} in {place}: {error.strerror}",
            next_step="use a file system with hard links, on a local disk"
            if step == "make a hard link"
            else "change the owner or the mode of the folder, or name another one",
        )
    else:
        will_be = "" if place == folder else f"; {folder} does not exist yet"
        yield ok(check, f"files can be written, synced, renamed and linked in {place}{will_be}")
        yield compared_clocks("clock", written_ms - before_ms, f"the file system of {place}")
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def compared_clocks(check: str, difference_ms: float, whose: str) -> Finding:
    if abs(difference_ms) <= _CLOCK_MS:
        return ok(check, f"agrees with {whose}")
    seconds = counted(round(abs(difference_ms) / 1000), "second")
    return Finding(
        check=check,
        verdict="fail" if abs(difference_ms) > _WRONG_CLOCK_MS else "warn",
        text=f"{seconds} {'behind' if difference_ms > 0 else 'ahead of'} {whose}",
        next_step="set the clock of this machine, or of the other one: run an NTP service on both",
    )
