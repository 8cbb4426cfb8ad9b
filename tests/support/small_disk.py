"""A disk of a few megabytes that a test fills and frees: a file system of its own, in memory."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """No byte fits any more, and no file. A flow that runs may delete files meanwhile."""
        for _ in range(100):
            with self._filler.open("ab", buffering=0) as filler:
                for size in (1 << 20, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while True:
                            filler.write(b"x" * size)
            if self._is_full():
                return
        raise AssertionError("it is never full")

    def _is_full(self) -> bool:
        probe = self.folder / "probe"
        try:
            probe.write_bytes(b"x")
        except OSError as error:
            return error.errno == errno.ENOSPC
        finally:
            probe.unlink(missing_ok=True)
        return False

    def free(self) -> None:
        os.truncate(self._filler, 0)


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[SmallDisk]:
    """Skips the test where this user may not mount."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a full disk needs the right to mount a file system")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
