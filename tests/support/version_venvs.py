"""Other versions of Python and PySpark, and Cutline from its wheel: as users install it.

Another PySpark alone is a folder in front of the packages of the interpreter that runs the tests; another Python needs
a virtual environment. Both are kept in the user's cache folder, as pip takes one to two minutes to make one, and each
takes 500 to 700 MB: ``$XDG_CACHE_HOME/cutline-tests``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutline-tests"
INSTALL_SECONDS = 900
#: Of the pinned packages, those that belong to the version of PySpark.
_PYSPARKS_OWN = re.compile(r"(pyspark|py4j)==")


@dataclass(frozen=True, slots=True)
class Pair:
    """Versions that are tested together."""

    pyspark: str
    python: str

    def __str__(self) -> str:
        return f"pyspark-{self.pyspark}-python-{self.python}"


#: The oldest of all first, the newest of all last.
PAIRS = (Pair("4.1", "3.11"), Pair("4.2", "3.12"), Pair("4.3", "3.13"))


def find_python(version: str) -> str | None:
    """An interpreter of this version: on the path, or one that pyenv has and does not put there."""
    name = f"python{version}"
    if (found := _executable(name, {})) is not None:
        return found
    with contextlib.suppress(OSError):
        known = subprocess.run(["pyenv", "whence", name], capture_output=True, text=True, check=False).stdout.split()
        return next(filter(None, (_executable(name, {"PYENV_VERSION": one}) for one in known)), None)
    return None


def _executable(name: str, environment: dict[str, str]) -> str | None:
    try:
        asked = [name, "-c", "import ensurepip, sys, venv; print(sys.executable)"]
        done = subprocess.run(asked, env=os.environ | environment, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def build_wheel(folder: Path) -> Path:
    """Cutline's wheel as it would be published."""
    # A copy: the build must not see caches, nor leave anything here.
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    # What builds it is kept: pip would fetch it anew each time, which takes longer than all the rest.
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    builder = _folder_with(f"build-{zlib.crc32(repr(needed).encode()):08x}", needed)
    arguments = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy)]
    _pip(sys.executable, arguments, PYTHONPATH=str(builder))
    (wheel,) = folder.glob("cutline-*.whl")
    return wheel


class VersionVenv:
    """The environment of one pair, with the dependencies of all extras."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.folder = CACHE / str(pair)
        self.python = self.folder / "bin" / "python"

    def is_there(self) -> bool:
        return (self.folder / "complete").exists()

    def install(self, wheel: Path, extra: str = "all") -> None:
        """``pip install cutline[all]`` from the wheel; pip leaves alone what is there already."""
        CACHE.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not self.is_there():
                self._create()
            pinned = self.folder / "constraints.txt"
            pinned.write_text(_constraints() + f"pyspark=={self.pair.pyspark}.*\n")
            _pip(self.python, ["install", "--no-compile", "-c", str(pinned), f"{wheel}[{extra}]"])
            # A wheel of the same version as the one that is there.
            _pip(self.python, ["install", "--no-compile", "--no-deps", "--force-reinstall", str(wheel)])
            (self.folder / "complete").touch()

    def _create(self) -> None:
        python = find_python(self.pair.python)
        assert python is not None, "ask skip_unless_installable first"
        subprocess.run([python, "-m", "venv", "--clear", self.folder], check=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (CACHE / f"{self.pair}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def folder_with_pyspark(version: str) -> Path:
    """A folder for PYTHONPATH that holds this PySpark and nothing else. Skips the test if pip does not find it."""
    if not (CACHE / f"pyspark-{version}").exists():
        skip_unless_found(sys.executable, version)
    return _folder_with(f"pyspark-{version}", ["--no-deps", f"pyspark=={version}.*"])


def _folder_with(name: str, packages: Sequence[str]) -> Path:
    """A folder for PYTHONPATH in the cache."""
    folder, half = CACHE / name, CACHE / f"{name}-half"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(half, ignore_errors=True)
            _pip(sys.executable, ["install", "--no-compile", "--target", str(half), *packages])
            half.rename(folder)
    return folder


def unpacked_wheel(wheel: Path) -> Path:
    """A folder for PYTHONPATH that holds what the wheel installs."""
    folder = wheel.with_suffix(".installed")
    _pip(sys.executable, ["install", "--no-deps", "--no-compile", "--target", str(folder), str(wheel)])
    return folder


def skip_unless_installable(pair: Pair) -> None:
    """Skip the test if this machine lacks the interpreter, or pip the version."""
    python = find_python(pair.python)
    if python is None:
        pytest.skip(f"there is no python{pair.python} on the path")
    skip_unless_found(python, pair.pyspark)


def skip_unless_found(python: str, version: str) -> None:
    known = subprocess.run(
        [python, "-m", "pip", "index", "versions", "pyspark"], capture_output=True, text=True, check=False, timeout=120
    ).stdout
    if f" {version}." not in known:
        pytest.skip(f"pip finds no PySpark {version}")


def _constraints() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not _PYSPARKS_OWN.match(line))


def _pip(python: str | Path, arguments: Sequence[str], **environment: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_SECONDS,
    )
    assert done.returncode == 0, f"pip {' '.join(arguments)}:\n{done.stderr[-3000:]}"
