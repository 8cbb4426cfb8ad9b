"""The Spark session: the user's own when there is one, otherwise a tuned local one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from cutline.config.arguments import check_argument

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_HDFS_BACKED = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"

QUERY_LOGGER = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"
#: Each writes the whole trace of a failed query to the terminal. Cutline reports the cause, and stores the trace.
_TRACE_LOGGERS = (
    QUERY_LOGGER,
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
)
#: The same in Python, as one long line of JSON.
_PYTHON_TRACE_LOGGER = "SQLQueryContextLogger"
#: In the settings of a session that Cutline created.
_OWN_SESSION = "spark.cutline.session"
_LOG_LEVEL = "CUTLINE_SPARK_LOG_LEVEL"

#: For a session that Cutline creates. Every setting was measured to help; a user's own setting wins.
_SESSION_DEFAULTS = {
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Hadoop's local file system forks a process for every file it touches; vfork makes that cheap.
    "spark.driver.extraJavaOptions": "-Djdk.lang.Process.launchMechanism=VFORK",
    "spark.executor.extraJavaOptions": "-Djdk.lang.Process.launchMechanism=VFORK",
    "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
}

#: For each operator's query, unless the user's session sets the key.
_QUERY_DEFAULTS = {
    "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # Spark would wait for ever for a query that does not stop.
    "spark.sql.streaming.stopTimeout": "60s",
    # Says nothing that a failed query does not say itself.
    "spark.sql.adaptive.enabled": "false",
}

_BACKENDS = {
    # Format 2 names every state file uniquely, so a re-run batch never overwrites what a snapshot relies on.
    "rocksdb-changelog": {
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    },
    "rocksdb": {
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "false",
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    },
    # Spark's heap provider knows only format 1.
    "heap": {
        "spark.sql.streaming.stateStore.providerClass": _HDFS_BACKED,
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "1",
    },
}


def _user_defaults() -> set[str]:
    """Keys the user has set in spark-defaults.conf, which a builder would otherwise override."""
    home = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", ""), "conf")
    path = Path(home) / "spark-defaults.conf"
    if not path.is_file():
        return set()
    lines = (line.strip() for line in path.read_text().splitlines())
    return {line.replace("=", " ").split()[0] for line in lines if line and not line.startswith("#")}


def open_session(app: str, given: SparkSession | None, extra: Mapping[str, str] | None = None) -> SparkSession:
    """The session to run on: the one given, the active one, or a new local one (with ``extra`` settings)."""
    check_argument("flow.start", "spark", given, SparkSession | None, flow=app)
    session = given or SparkSession.getActiveSession()
    if session is not None:
        return session
    builder = SparkSession.builder.appName(app)
    users = _user_defaults()
    settings = {**_SESSION_DEFAULTS, _OWN_SESSION: "true", **(extra or {})}
    is_local = "SPARK_MASTER" not in os.environ and "spark.master" not in users
    # Workers must use the interpreter that has Cutline installed.
    os.environ["CUTLINE_WORKER_PYTHON"] = sys.executable
    wrapper = Path(__file__).with_name("worker_python.sh")
    usable = is_local and os.access(wrapper, os.X_OK)
    os.environ.setdefault("PYSPARK_PYTHON", str(wrapper) if usable else sys.executable)
    if is_local:
        settings["spark.master"] = "local[*]"
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    for key, value in settings.items():
        if key not in users:
            builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(os.environ.get(_LOG_LEVEL, "ERROR"))
    if is_own_session(session):
        for logger in _TRACE_LOGGERS:
            set_log_level(session, logger, "OFF")
        PySparkLogger.getLogger(_PYTHON_TRACE_LOGGER).disabled = True
    return session


def is_own_session(session: SparkSession) -> bool:
    """Whether Cutline created the session, and the user asked for no other logging of Spark."""
    return session.conf.get(_OWN_SESSION, None) == "true" and _LOG_LEVEL not in os.environ


def set_log_level(session: SparkSession, logger: str, level: str) -> None:
    jvm: Any = session._jvm
    levels = jvm.org.apache.logging.log4j.Level
    jvm.org.apache.logging.log4j.core.config.Configurator.setLevel(logger, levels.toLevel(level))


def query_session(session: SparkSession, *, state_backend: str, subtasks: int | None) -> SparkSession:
    """A session for one operator: a copy of the user's (views, functions, settings) with its own query settings."""
    copy = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
    set_by_user = set(session.conf.getAll)
    for key, value in {**_QUERY_DEFAULTS, **_BACKENDS[state_backend]}.items():
        if key not in set_by_user:
            copy.conf.set(key, value)
    if subtasks is not None:
        copy.conf.set("spark.sql.shuffle.partitions", str(subtasks))
    elif "spark.sql.shuffle.partitions" not in set_by_user:
        # Spark's default of 200 state partitions is for large clusters.
        copy.conf.set("spark.sql.shuffle.partitions", str(max(session.sparkContext.defaultParallelism, 1)))
    return copy


#: What Spark writes into a Python data source's environment when it starts a reader of it in the driver.
_READER_ENVIRONMENT = ("SPARK_LOCAL_DIRS", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE", "SPARK_PYTHON_RUNTIME")


def settle_python_sources(session: SparkSession) -> None:
    """Allow several queries to read one Python data source.

    The environment is a plain ``HashMap`` that belongs to the registered source and that all its queries share. Two
    readers that start concurrently may both insert a key, which leaves the map with a wrong size: from then on no task
    of any of these queries can be deserialised (OptionalDataException). An existing key is only overwritten.
    """
    manager = session._jsparkSession.sessionState().dataSourceManager()
    field = manager.getClass().getDeclaredField("runtimeDataSourceBuilders")
    field.setAccessible(True)
    for source in field.get(manager).values():
        environment = source.dataSourceCls().envVars()
        for key in _READER_ENVIRONMENT:
            environment.putIfAbsent(key, "")


def jvm_pid(session: SparkSession) -> int:
    """The process id of the driver's JVM."""
    return int(session._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
