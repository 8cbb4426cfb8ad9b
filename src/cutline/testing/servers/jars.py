"""Java archives for tests, benchmarks and the demo: fetched once with Maven into a cache folder, never part of Cutline.

Users bring their own jars. ``make jars`` (``scripts/fetch_jars.py``) fetches every set; ``make test`` does that first.
Without Maven or its repository, ``why_not`` says in one line what is missing, and what needs the set is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cutline.errors import ConfigError

#: Another place for the cache.
CACHE_VARIABLE = "CUTLINE_JARS"
#: A first download of the largest set takes minutes.
_FETCH_SECONDS = 900.0


class JarSet(NamedTuple):
    """Artifacts with all that they need at run time."""

    name: str
    #: ``group:artifact:version``.
    artifacts: tuple[str, ...]
    #: ``group:artifact`` that Spark brings itself, or that would only be in the way; ``*:*``: all that is not named.
    excluded: tuple[str, ...] = ()


KAFKA = JarSet("kafka", ("org.apache.kafka:kafka_2.13:4.3.1", "org.slf4j:slf4j-simple:1.7.36"))
#: A NameNode and a DataNode, of the Hadoop that the newest PySpark ships.
HDFS = JarSet(
    "hdfs",
    (
        "org.apache.hadoop:hadoop-hdfs:3.5.0",
        "org.apache.hadoop:hadoop-hdfs-client:3.5.0",
        "org.apache.hadoop:hadoop-common:3.5.0",
        "org.slf4j:slf4j-simple:1.7.36",
    ),
    excluded=("org.slf4j:slf4j-reload4j",),
)
#: For a Spark session: Hadoop's S3A. Instead of the SDK's bundle of all services (690 MB) only the modules that S3A
#: loads, without what Spark has on its class path.
S3A = JarSet(
    "s3a",
    (
        "org.apache.hadoop:hadoop-aws:3.5.0",
        "software.amazon.awssdk:s3-transfer-manager:2.35.4",
        "software.amazon.awssdk:sts:2.35.4",
        "software.amazon.awssdk:apache-client:2.35.4",
    ),
    excluded=(
        "software.amazon.awssdk:bundle",
        "org.wildfly.openssl:wildfly-openssl",
        "org.apache.httpcomponents:*",
        "commons-codec:*",
        "commons-logging:*",
        "io.netty:*",
        "org.slf4j:*",
    ),
)
#: Spark's file manager for object stores, the newest that was published. Cutline refuses it; a test shows why.
SPARK_CLOUD = JarSet("spark-cloud", ("org.apache.spark:spark-hadoop-cloud_2.13:4.1.2",), excluded=("*:*",))
#: Spark's own Kafka connector, for its class path, without what Spark brings itself. All of it is named: its own
#: descriptor would look for the rest in a mirror that not every machine reaches. There is none for Spark 4.3 yet.
SPARK_KAFKA = JarSet(
    "spark-kafka",
    (
        "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1",
        "org.apache.kafka:kafka-clients:3.9.2",
        "org.apache.commons:commons-pool2:2.13.1",
    ),
    ("*:*",),
)
SETS = {one.name: one for one in (KAFKA, SPARK_KAFKA, HDFS, S3A, SPARK_CLOUD)}


def cache_folder() -> Path:
    """Where fetched sets are kept."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "cutline" / "jars"


def folder_of(wanted: JarSet) -> Path:
    """A set whose versions change gets another folder."""
    versions = "-".join(artifact.rpartition(":")[2] for artifact in wanted.artifacts)
    return cache_folder() / f"{wanted.name}-{versions}"


def why_not(wanted: JarSet) -> str:
    """What is missing; empty: the set is there."""
    if folder_of(wanted).is_dir():
        return ""
    return f"the jars of {wanted.name} are not in {cache_folder()}: run `make jars` (needs Maven and its repository)"


def jars(wanted: JarSet) -> list[Path]:
    """The files of a set that was fetched."""
    problem = why_not(wanted)
    if problem:
        raise ConfigError(problem)
    return sorted(folder_of(wanted).glob("*.jar"))


def classpath(wanted: JarSet) -> str:
    """All of a set, for ``java -cp``."""
    return f"{folder_of(wanted)}{os.sep}*"


def fetch(wanted: JarSet) -> None:
    """Fetch a set if it is not there. Raises ConfigError if that cannot be done; then nothing is left behind."""
    target = folder_of(wanted)
    if target.is_dir():
        return
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigError("Maven is not installed", next_step="install it, on Debian: apt-get install maven")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=target.parent) as folder:
        (Path(folder) / "pom.xml").write_text(_pom(wanted))
        _run([maven, "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"], wanted, Path(folder))
        found = Path(folder) / "target" / "dependency"
        try:
            found.rename(target)  # at once: a set is there as a whole or not at all
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise


def _run(command: Sequence[str], wanted: JarSet, folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"Maven does not finish fetching {wanted.name}", next_step="run it again") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        raise ConfigError(
            f"Maven cannot fetch {wanted.name}: {lines[0] if lines else done.returncode}",
            next_step="check that its repository can be reached, then run it again",
        )


def _pom(wanted: JarSet) -> str:
    exclusions = "".join(
        f"<exclusion><groupId>{group}</groupId><artifactId>{artifact}</artifactId></exclusion>"
        for group, _, artifact in (one.partition(":") for one in wanted.excluded)
    )
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        f"<exclusions>{exclusions}</exclusions></dependency>"
        for group, artifact, version in (one.split(":") for one in wanted.artifacts)
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>cutline</groupId><artifactId>jars</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
