"""JVMs that start soon: half of what a start of Spark costs is loading classes, so those are archived once.

``python -m tests.support.jvm FILE`` runs a small flow and leaves the archive of the classes that it has used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

ROOT = Path(__file__).parents[2]
#: Every JVM that is started with this in its environment takes these options.
VARIABLE = "JDK_JAVA_OPTIONS"
#: Queries of tests run for seconds only: the second compiler would cost more than it gives.
_QUICK = "-XX:TieredStopAtLevel=1 -Xlog:cds=off -Xlog:cds+dynamic=off"


def quick_start_options() -> str:
    """Options for all JVMs of the tests. An archive that does not fit the JVM is ignored by it."""
    archive = _archive()
    return _QUICK if archive is None else f"{_QUICK} -XX:SharedArchiveFile={archive}"


def _archive() -> Path | None:
    """Made when it is missing, by the first of all test processes; None if this JVM cannot make one."""
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else Path("java")
    version = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    if "Server VM" not in version:
        return None  # archives are HotSpot's
    key = hashlib.sha256(f"{version} {pyspark.__version__} {pyspark.__file__}".encode()).hexdigest()[:12]
    path = ROOT / "build" / f"spark-{key}.jsa"
    path.parent.mkdir(exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _make(path)
    return path


def _make(path: Path) -> None:
    half = path.with_suffix(".half")
    half.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.jvm", half],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if done.returncode != 0 or not half.exists():
        raise RuntimeError(f"no archive of Spark's classes was made:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    half.rename(path)


def main() -> None:
    # Only here: whoever asks for the options has no session yet.
    from cutline.config.spark_settings import SparkStart
    from cutline.spark.session import open_session
    from tests.support.payments import payments_flow

    options = f"{_QUICK} -XX:ArchiveClassesAtExit={sys.argv[1]}"
    session = open_session("archive", None, SparkStart(settings={"spark.driver.extraJavaOptions": options}))
    jvm = session.sparkContext._gateway.proc  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        run = payments_flow(Path(folder), card_rows=2_000, upi_rows=1_000).start(
            spark=session, storage=f"{folder}/storage", checkpoint_interval="500ms"
        )
        run.process_all_available()
        run.stop()
    session.stop()
    jvm.stdin.close()  # it ends, and writes the archive
    jvm.wait()


if __name__ == "__main__":
    main()
