"""Flows on the Spark that the user names: ``spark-submit``, ``cutline run --master``, the environment, a zip."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyspark
import pytest

from cutline.spark import session
from cutline.testing.servers.lifetime import start_child
from tests.support.cluster import Cluster
from tests.support.submitted_flow import DEFINITION, MAIN

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SUBMIT = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
QUICK_PYTHON = Path(session.__file__).with_name("worker_python.sh")
SECONDS = 150.0
SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environment = {"CUTLINE_WORKER_PYTHON": sys.executable, "PYTHONPATH": ""}
    with Cluster(tmp_path_factory.mktemp("cluster"), environment=environment) as one:
        yield one


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text("\n".join(json.dumps({"id": number}) for number in range(10)))
    path = tmp_path / "orders.py"
    path.write_text(DEFINITION.format(name="orders", folder=tmp_path) + MAIN)
    return path


def run(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    settings = {
        "PYTHONPATH": str(SOURCES),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Executors are on this machine: their Python starts sooner this way, as for a local session.
        "PYSPARK_PYTHON": str(QUICK_PYTHON),
        "CUTLINE_WORKER_PYTHON": sys.executable,
        **(environment or {}),
    }
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        # A group of its own: spark-submit leaves Python behind when it is killed.
        options: dict[str, Any] = {"stdout": out, "stderr": err, "start_new_session": True}
        process = start_child(command, cwd=folder, env={**os.environ, **settings}, **options)
        try:
            code = process.wait(SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    told = (folder / "stdout").read_text()
    assert code == 0, told[-3000:] + (folder / "stderr").read_text()[-6000:]
    return told


def settings_of(out: str) -> dict[str, Any]:
    (line,) = [line for line in out.splitlines() if line.startswith("TOLD ")]
    return dict(json.loads(line.removeprefix("TOLD ")))


def places(folder: Path, name: str = "orders") -> set[str]:
    found = pq.ParquetDataset(folder / "out" / name).read().to_pydict()
    assert sorted(found["id"]) == list(range(10))
    return set(found["place"])


def test_spark_submit_runs_the_flow_on_its_master(cluster: Cluster, script: Path, tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    options = "-Dtheirs=1"
    (conf / "spark-defaults.conf").write_text(
        f"spark.master local[1]\nspark.cutline.test from the file\nspark.executor.extraJavaOptions {options}\n"
    )
    command = [SUBMIT, "--master", cluster.url, "--conf", "spark.ui.port=0", str(script)]
    told = settings_of(run(command, tmp_path, {"SPARK_CONF_DIR": str(conf), "SPARK_MASTER": "local[2]"}))
    assert places(tmp_path) == {"executor 0 on 127.0.0.1 with src"}
    assert (told["spark.master"], told["spark.ui.port"]) == (cluster.url, "0")
    assert told["spark.cutline.test"] == "from the file"
    assert "spark.ui.enabled" not in told  # Spark's own default
    assert {options, "-Djdk.lang.Process.launchMechanism=VFORK"} <= set(told["spark.executor.extraJavaOptions"].split())


@pytest.mark.soak
def test_spark_submit_runs_the_command_with_the_package_as_a_zip(
    cluster: Cluster, script: Path, tmp_path: Path
) -> None:
    package = shutil.make_archive(str(tmp_path / "cutline"), "zip", SOURCES, "cutline")
    # An interpreter that has all packages except Cutline: it reads no .pth file, by which it is installed here.
    python, bare = tmp_path / "python.sh", tmp_path / "bare.sh"
    packages = sysconfig.get_path("purelib")
    bare.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n')
    python.write_text(f'#!/bin/sh\nCUTLINE_WORKER_PYTHON={bare} exec {QUICK_PYTHON} "$@"\n')
    for path in (python, bare):
        path.chmod(0o755)
    command = [SUBMIT, "--master", cluster.url, "--conf", "spark.ui.enabled=false", "--py-files", package]
    command += [str(SOURCES / "cutline" / "__main__.py"), "run", str(script), "--until-done", "--json"]
    command += ["--storage", str(tmp_path / "storage"), "--set", "checkpoint_interval=0s"]
    # PYTHONPATH is the driver's, which has the package installed; executors have the zip only.
    out = run(command, tmp_path, {"PYSPARK_PYTHON": str(python)})
    assert places(tmp_path) == {"executor 0 on 127.0.0.1 with cutline.zip"}
    assert json.loads(out.splitlines()[-1])["state"] == "stopped"


@pytest.mark.soak
def test_two_flows_of_one_command_share_the_session_that_the_environment_names(
    cluster: Cluster, script: Path, tmp_path: Path
) -> None:
    other = tmp_path / "returns.py"
    other.write_text(DEFINITION.format(name="returns", folder=tmp_path))
    command = [sys.executable, "-m", "cutline", "run", str(script), str(other), "--until-done", "--json"]
    command += ["--storage", str(tmp_path / "storage"), "--set", "checkpoint_interval=0s", "--http", ":0"]
    command += ["--log-file", str(tmp_path / "logs" / "{flow}.log"), "--conf", "spark.ui.enabled=false"]
    out = run(command, tmp_path, {"SPARK_MASTER": cluster.url})
    found = places(tmp_path, "orders"), places(tmp_path, "returns")
    assert found[0] == found[1] and found[0] != {"driver"} and len(found[0]) == 1
    assert [json.loads(line)["flow"] for line in out.splitlines()] == ["orders", "returns"]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    for name in ("orders", "returns"):
        lines = [json.loads(line) for line in logs[f"{name}.log"].splitlines()]
        assert {line["flow"] for line in lines} == {name}
        assert lines[-1]["event"] == "flow_stopped"
    assert {json.loads(line)["event"] for line in logs["spark.log"].splitlines()} >= {"spark", "http_served"}
