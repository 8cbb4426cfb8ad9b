"""Cutline as users install it, from its wheel, outside of the repository, on the supported versions.

``make test`` runs the README's flow from the wheel on each older PySpark that pip has, with the Python of the tests.
``make soak`` installs each PySpark with a Python of its own, as users do, kills the flow there, and runs all tests on
Spark with the oldest and the newest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from cutline.testing.servers.lifetime import start_child
from tests.support.version_venvs import (
    PAIRS,
    ROOT,
    Pair,
    VersionVenv,
    build_wheel,
    folder_with_pyspark,
    skip_unless_installable,
    unpacked_wheel,
)

pytestmark = [pytest.mark.spark, pytest.mark.kill]

#: To the next published epoch, a start included.
SECONDS = 120.0
ROWS = 50
SUITE_SECONDS = 3 * 3600


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    return unpacked_wheel(wheel)


class User:
    """Has the README: writes input, runs the flow, reads the table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: Counter[str] = Counter()
        self._files = 0
        (code,) = [
            block
            for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
            if "flow.sink" in block
        ]
        (folder / "flow.py").write_text(code)
        # PySpark must take pandas for missing if this is on its path.
        (folder / "without-pandas").mkdir()
        (folder / "without-pandas" / "pandas.py").write_text('raise ImportError("No module named pandas")\n')

    def write_input(self) -> None:
        self._files += 1
        for source in ("cards", "upi"):
            rows = [{"merchant": f"shop-{row % 7}", "amount": row + self._files} for row in range(ROWS)]
            for row in rows:
                self._written[str(row["merchant"])] += int(str(row["amount"]))
            folder = self.folder / "in" / source
            folder.mkdir(parents=True, exist_ok=True)
            half = self.folder / "half.json"
            half.write_text("\n".join(map(json.dumps, rows)))
            half.rename(folder / f"{self._files}.json")

    @contextlib.contextmanager
    def running(self, venv: VersionVenv, *, without_pandas: bool = False) -> Iterator[subprocess.Popen[Any]]:
        """``cutline run flow.py``; in the end nothing of it is left, whatever happened."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK"))}
        environment |= {"PYTHONPATH": str(self.folder / "without-pandas")} if without_pandas else {}
        command = [str(venv.python.with_name("cutline")), "run", "flow.py", "--checkpoint-interval", "1s"]
        with (self.folder / "log").open("ab") as log:
            process = start_child(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait_published(self, process: subprocess.Popen[Any]) -> None:
        """Until readers see the totals of everything written."""
        deadline = time.monotonic() + SECONDS
        while (found := self.published()) != self._written:
            log = (self.folder / "log").read_text()[-4000:]
            assert process.poll() is None, f"cutline run ended:\n{log}"
            assert time.monotonic() < deadline, f"published: {found}, written: {self._written}\n{log}"
            time.sleep(0.2)

    def code(self, venv: VersionVenv) -> dict[str, str]:
        """Which versions the flow says it runs on."""
        command = [str(venv.python.with_name("cutline")), "status", "--json"]
        told = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout
        return dict(json.loads(told)["code"])

    @property
    def written(self) -> dict[str, int]:
        return dict(self._written)

    def published(self) -> dict[str, int]:
        try:
            rows = DeltaTable(self.folder / "out" / "totals").to_pyarrow_table().to_pylist()
        except TableNotFoundError:
            return {}
        totals = {row["merchant"]: row["amount"] for row in rows}
        assert len(totals) == len(rows), "a merchant is there twice"
        return totals


def check_readme_flow(folder: Path, venv: VersionVenv) -> None:
    """Run, kill -9 while rows are on their way, go on, stop."""
    user = User(folder)
    user.write_input()
    with user.running(venv) as process:
        user.wait_published(process)
        user.write_input()
        time.sleep(0.5)  # somewhere in a batch or a checkpoint
    user.write_input()
    with user.running(venv, without_pandas=True) as process:
        user.wait_published(process)
        user.write_input()
        user.wait_published(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "log").read_text()[-4000:]
    assert user.code(venv)["pyspark"].startswith(venv.pair.pyspark)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", [pair.pyspark for pair in PAIRS[:-1]])
def test_the_flow_of_the_readme_runs_from_the_wheel_on_each_older_version(
    version: str, installed: Path, tmp_path: Path
) -> None:
    folders = [installed, folder_with_pyspark(version)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    user = User(tmp_path)
    user.write_input()

    def cutline(*words: str) -> str:
        command = [sys.executable, "-m", "cutline", *words]
        told = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=2 * SECONDS
        )
        assert told.returncode == 0, told.stderr[-4000:]
        return told.stdout

    cutline("run", "flow.py", "--until-done")
    assert user.published() == user.written
    code = json.loads(cutline("status", "--json"))["code"]
    assert code["pyspark"].startswith(f"{version}.") and code["python"].startswith("3.")
    where = subprocess.run(
        [sys.executable, "-c", "import cutline; print(cutline.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed), "not the repository"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_version_is_installed_and_runs(pair: Pair, wheel: Path, tmp_path: Path) -> None:
    skip_unless_installable(pair)
    venv = VersionVenv(pair)
    venv.install(wheel)
    check_readme_flow(tmp_path, venv)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_flow_goes_on_with_each_newer_version(wheel: Path, tmp_path: Path) -> None:
    user = User(tmp_path)
    venvs = [VersionVenv(pair) for pair in PAIRS]
    for venv in venvs:
        skip_unless_installable(venv.pair)
        venv.install(wheel)
        user.write_input()
        with user.running(venv) as process:
            user.wait_published(process)
            user.write_input()
            time.sleep(0.5)  # killed with rows on their way, which the next version publishes
    # Of the last input, too.
    with user.running(venvs[-1]) as process:
        user.wait_published(process)


@pytest.mark.soak
@pytest.mark.timeout(SUITE_SECONDS + 1800)
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[-1]], ids=str)
def test_all_tests_on_spark_pass(pair: Pair, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip_unless_installable(pair)
    venv = VersionVenv(pair)
    venv.install(wheel, "dev")
    command = [str(venv.python), "-m", "pytest", "tests/integration", "--ignore", __file__, "-q", "-rs"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with (tmp_path / "log").open("w+") as log:
        code = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=SUITE_SECONDS,
            check=False,
        ).returncode
    told = (tmp_path / "log").read_text()
    assert code == 0, told[-8000:]
    with capsys.disabled():
        lines = [line for line in told.splitlines() if line.startswith("SKIPPED")]
        sys.stdout.write("\n".join(["", f"{pair}: {told.splitlines()[-1]}", *lines, ""]))
