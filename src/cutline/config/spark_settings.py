"""The Spark settings that a user has made outside of the code, and the order in which they win.

``cutline run --master/--conf`` wins over ``spark-submit`` and PYSPARK_SUBMIT_ARGS, these over SPARK_MASTER, that over
``spark-defaults.conf``, and all of them over what Cutline itself would set.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cutline.errors import ConfigError

MASTER = "spark.master"
DEFAULTS_FILE = "spark-defaults.conf"

#: Options of ``spark-submit`` that have settings of their own. The JVM gets all others from ``spark-submit`` itself.
_FLAGS = {
    "--master": MASTER,
    "--name": "spark.app.name",
    "--driver-memory": "spark.driver.memory",
    "--driver-java-options": "spark.driver.extraJavaOptions",
    "--driver-class-path": "spark.driver.extraClassPath",
    "--executor-memory": "spark.executor.memory",
    "--executor-cores": "spark.executor.cores",
    "--num-executors": "spark.executor.instances",
    "--total-executor-cores": "spark.cores.max",
    "--packages": "spark.jars.packages",
}
_CONF = ("--conf", "-c", "-conf")
#: Settings that are lists of options for the JVM: Cutline adds its own to the user's.
JAVA_OPTIONS = ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions")
#: How a key ends in Java's format of properties.
_KEY = re.compile(r"(?P<key>(?:\\.|[^\\=:\s])+)\s*[=:\s]?\s*(?P<value>.*)", re.DOTALL)


class StartedJvm(Protocol):
    """A JVM that was started before it was known whether it is needed."""

    def take(self, settings: Mapping[str, str]) -> Any:
        """The gateway to it; None if it was not started with these settings, or has failed: then it is ended."""
        ...

    def give_up(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkStart:
    """How a command wants the session that Cutline creates."""

    #: Settings that win over all others.
    settings: Mapping[str, str] = field(default_factory=dict)
    #: Gets each line that the JVM writes to standard error; None: the lines go where this process's go.
    on_line: Callable[[str], None] | None = None
    #: From which level on Spark logs, unless the environment says something else.
    log_level: str = "ERROR"
    #: A JVM that was started already, and may fit; None: there is none.
    early: StartedJvm | None = None


def flag_settings(master: str | None, items: Sequence[str]) -> dict[str, str]:
    """The settings of ``--master URL --conf key=value …``."""
    found: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key.strip():
            lacks = "value" if key.strip() else "key"
            raise ConfigError(f"--conf {item}: there is no {lacks}", next_step="write --conf key=value")
        if not key.strip().startswith("spark."):
            raise ConfigError(
                f"--conf {item}: {key.strip()} is not a setting of Spark",
                next_step="its settings begin with spark.; options of Cutline are given with --set",
            )
        found[key.strip()] = value
    return found | ({MASTER: master} if master is not None else {})


def outside_settings(environment: Mapping[str, str], spark_home: Path) -> dict[str, str]:
    """What the environment and spark-defaults.conf say, if this process itself starts the JVM."""
    submitted, properties_file = submit_settings(environment.get("PYSPARK_SUBMIT_ARGS", ""))
    folder = environment.get("SPARK_CONF_DIR") or str(spark_home / "conf")
    found = {MASTER: environment["MASTER"]} if environment.get("MASTER") else {}
    if environment.get("SPARK_DRIVER_MEMORY"):
        found["spark.driver.memory"] = environment["SPARK_DRIVER_MEMORY"]
    found |= file_settings(Path(properties_file or Path(folder, DEFAULTS_FILE)))
    if environment.get("SPARK_MASTER"):
        found[MASTER] = environment["SPARK_MASTER"]
    return found | submitted


def submit_settings(arguments: str) -> tuple[dict[str, str], str | None]:
    """The settings in PYSPARK_SUBMIT_ARGS, and the properties file that it names."""
    found: dict[str, str] = {}
    properties_file = None
    words = iter(shlex.split(arguments))
    for word in words:
        flag, separator, inline = word.partition("=")
        if flag not in (*_FLAGS, *_CONF, "--properties-file"):
            continue
        value = inline if separator else next(words, "")
        if flag in _FLAGS:
            found[_FLAGS[flag]] = value
        elif flag == "--properties-file":
            properties_file = value
        else:
            key, _, given = value.partition("=")
            found[key] = given
    return found, properties_file


def file_settings(path: Path) -> dict[str, str]:
    """The settings in a file of Java's properties; none if there is no such file."""
    if not path.is_file():
        return {}
    found = {}
    for line in _logical_lines(path.read_text(errors="replace")):
        matched = _KEY.match(line)
        if matched is not None:
            found[_unescaped(matched["key"])] = _unescaped(matched["value"].strip())
    return found


def _logical_lines(text: str) -> Iterator[str]:
    """A line that ends with a backslash goes on in the next one."""
    held = ""
    for line in text.splitlines():
        part = line.strip()
        if not held and (not part or part[0] in "#!"):
            continue
        if (len(part) - len(part.rstrip("\\"))) % 2:
            held += part[:-1]
            continue
        yield held + part
        held = ""
    if held:
        yield held


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def effective(
    own: Mapping[str, str], outside: Mapping[str, str], given: Mapping[str, str], *, default_master: str
) -> dict[str, str]:
    """What to set on a new session: ``own`` defaults, unless the user has set the key; options of the JVM add up."""
    # All of ``given``; of ``outside`` only what the JVM would not know, or what a default would hide.
    users = {**outside, **given}
    known = {key: value for key, value in outside.items() if key in own or key == MASTER}
    found = {**own, MASTER: default_master, **known, **given}
    for key in JAVA_OPTIONS:
        if key in own and key in users:
            words = users[key].split()
            ours = [word for word in own[key].split() if word not in words]
            found[key] = " ".join([*ours, users[key]])  # of two equal options Java takes the last
    return found


def is_local(master: str) -> bool:
    """Whether driver and executors are one process."""
    return re.fullmatch(r"local(\[.*\])?", master.strip()) is not None
