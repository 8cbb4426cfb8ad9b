"""The Spark session: the user's own when there is one, otherwise a new one on the master that the user names."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.find_spark_home import _find_spark_home
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from cutline.config.arguments import check_argument
from cutline.config.spark_settings import MASTER, SparkStart, effective, is_local, outside_settings
from cutline.errors import ConfigError
from cutline.ports.progress import NoProgress, Progress, Step
from cutline.spark.jvm.early import EarlyJvm
from cutline.spark.jvm.gateway import launch_jvm
from cutline.spark.versions import check_jvm, check_pyspark

#: Which class writes Spark's checkpoint files.
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
#: It forks fewer processes per file of a local file system than Spark's own choice. Elsewhere that choice is the right
#: one: this class would keep a file that it is told to replace, because rename replaces none there.
_LOCAL_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
#: It closes a file as if it were written although the object store has failed: the batch counts, its state is lost.
_CARELESS_FILE_MANAGER = "AbortableStreamBasedCheckpointFileManager"
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
#: The interpreter of Spark's Python workers.
_PYTHON = "spark.pyspark.python"
_NAME = "spark.app.name"
_CONNECT_VARIABLES = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")

#: For a session that Cutline creates. Every setting was measured to help; a user's own setting wins.
_SESSION_DEFAULTS = {
    "spark.driver.memory": "2g",
    "spark.ui.showConsoleProgress": "false",
    # Hadoop's local file system forks a process for every file it touches; vfork makes that cheap.
    "spark.driver.extraJavaOptions": "-Djdk.lang.Process.launchMechanism=VFORK",
    "spark.executor.extraJavaOptions": "-Djdk.lang.Process.launchMechanism=VFORK",
}

#: If driver and executors are one process.
_LOCAL_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

#: For each operator's query, unless the user's session sets the key.
_QUERY_DEFAULTS = {
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


def open_session(
    app: str, given: SparkSession | None, start: SparkStart | None = None, progress: Progress | None = None
) -> SparkSession:
    """The session to run on: the one given, the active one, or a new one; its settings come from ``start`` first."""
    check_pyspark(app)
    _refuse_connect(app, given)
    check_argument("flow.start", "spark", given, SparkSession | None, flow=app)
    progress = progress or NoProgress()
    session = given or SparkSession.getActiveSession() or _present_session()
    if session is None:
        session = _new_session(app, start or SparkStart(), progress)
    else:
        if start is not None and start.early is not None:
            start.early.give_up()  # the flow's file has a session of its own
        progress.begin(Step.SPARK, f"{session.sparkContext.master}, which runs already")
    check_jvm(app, session)
    return session


def _present_session() -> SparkSession | None:
    """The session of this process: on another thread than the one that created it, it is not the active one."""
    session = SparkSession._instantiatedSession
    return session if session is not None and session._sc._jsc is not None else None


def _refuse_connect(flow: str, given: object) -> None:
    """A Connect session has no JVM in reach: batches, positions and state files are on the server's side.

    Recognised by its module, which is importable only with packages that Cutline does not need.
    """
    modules = [kind.__module__ for kind in type(given).__mro__]
    if any(module.startswith("pyspark.sql.connect.") for module in modules):
        what, next_step = "spark= is a Spark Connect session", "pass a classic session"
    elif given is None and (variables := [name for name in _CONNECT_VARIABLES if os.environ.get(name)]):
        what, next_step = f"{variables[0]} asks for Spark Connect", f"unset {variables[0]}"
    elif given is None and os.environ.get("SPARK_API_MODE", "").lower() == "connect":
        what, next_step = "SPARK_API_MODE asks for Spark Connect", "unset SPARK_API_MODE"
    else:
        return
    raise ConfigError(
        f"{what}, and a flow runs in the Spark driver itself",
        next_step=f"{next_step} (SparkSession.builder.master(…), spark-submit --master …, cutline run --master …) and "
        "run the flow where the driver runs; see deploying.md",
        flow=flow,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What a new session will be."""

    settings: dict[str, str]
    master: str
    #: The interpreter of the workers that the user names; None: none.
    python: str | None
    is_submitted: bool

    @property
    def of_jvm(self) -> dict[str, str]:
        """What the JVM is started with: the name of the application is the session's."""
        return {key: value for key, value in self.settings.items() if key != _NAME}


def _planned(app: str, start: SparkStart) -> _Planned:
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit has started the JVM, and this process
    outside = _submitted_settings() if is_submitted else outside_settings(os.environ, Path(_find_spark_home()))
    master = start.settings.get(MASTER) or outside.get(MASTER) or "local[*]"
    own = {_NAME: app, **_SESSION_DEFAULTS, _OWN_SESSION: "false" if is_submitted else "true"}
    if is_local(master):
        own |= _LOCAL_DEFAULTS
    if is_submitted:
        # The JVM runs, and its user interface and logging are what the user knows from spark-submit.
        own = {key: value for key, value in own.items() if not key.startswith(("spark.driver.", "spark.ui."))}
    settings = effective(own, outside, start.settings, default_master=master)
    python = settings.get(_PYTHON) or outside.get(_PYTHON)
    return _Planned(settings=settings, master=master, python=python, is_submitted=is_submitted)


def begin_early(start: SparkStart) -> SparkStart:
    """Start the JVM of a later session now, on a thread, if that session will need one."""
    asks_for_connect = any(os.environ.get(name) for name in (*_CONNECT_VARIABLES, "SPARK_API_MODE"))
    if "PYSPARK_GATEWAY_PORT" in os.environ or asks_for_connect or SparkContext._gateway is not None:
        return start
    planned = _planned("", start)
    _choose_python(planned.python, is_own=is_local(planned.master))
    return replace(start, early=EarlyJvm(planned.of_jvm, start.on_line))


def _new_session(app: str, start: SparkStart, progress: Progress) -> SparkSession:
    planned = _planned(app, start)
    is_submitted = planned.is_submitted
    _choose_python(planned.python, is_own=is_local(planned.master) and not is_submitted)
    builder = SparkSession.builder.config(map=dict(planned.settings))
    interrupt = signal.getsignal(signal.SIGINT)
    if not is_submitted and SparkContext._gateway is None:
        gateway = start.early.take(planned.of_jvm) if start.early is not None else None
        SparkContext._ensure_initialized(gateway=gateway or launch_jvm(planned.of_jvm, start.on_line))
    progress.tell(_java_version())
    progress.begin(Step.SPARK, planned.master)
    session = builder.getOrCreate()
    if interrupt is not signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)  # PySpark has replaced it
    _settle_logging(session, start.log_level, is_submitted=is_submitted)
    return session


def _submitted_settings() -> dict[str, str]:
    SparkContext._ensure_initialized()
    return dict(SparkConf(_jvm=SparkContext._jvm).getAll())


def _choose_python(wanted: str | None, *, is_own: bool) -> None:
    """Workers must use the interpreter that has Cutline installed, unless the user names another one.

    ``is_own``: the JVM that starts them is to be started by this process, and so has its environment.
    """
    os.environ["CUTLINE_WORKER_PYTHON"] = sys.executable
    wrapper = Path(__file__).with_name("worker_python.sh")
    usable = is_own and os.access(wrapper, os.X_OK)
    os.environ.setdefault("PYSPARK_PYTHON", wanted or (str(wrapper) if usable else sys.executable))


def _java_version() -> str:
    jvm: Any = SparkContext._jvm
    return str(jvm.java.lang.System.getProperty("java.version"))


def _settle_logging(session: SparkSession, level: str, *, is_submitted: bool) -> None:
    wanted = os.environ.get(_LOG_LEVEL)
    if wanted is None and is_submitted:
        return
    session.sparkContext.setLogLevel(wanted or level)
    if is_own_session(session):
        for logger in _TRACE_LOGGERS:
            set_log_level(session, logger, "OFF")
        PySparkLogger.getLogger(_PYTHON_TRACE_LOGGER).disabled = True


def is_own_session(session: SparkSession) -> bool:
    """Whether Cutline created the session, and the user asked for no other logging of Spark."""
    return session.conf.get(_OWN_SESSION, None) == "true" and _LOG_LEVEL not in os.environ


def set_log_level(session: SparkSession, logger: str, level: str) -> None:
    jvm: Any = session._jvm
    levels = jvm.org.apache.logging.log4j.Level
    jvm.org.apache.logging.log4j.core.config.Configurator.setLevel(logger, levels.toLevel(level))


def check_file_manager(session: SparkSession, flow: str) -> None:
    """Refuse a class of the user's choice that loses what it could not write."""
    chosen = session.conf.get(_FILE_MANAGER, None) or ""
    if chosen.rpartition(".")[2] == _CARELESS_FILE_MANAGER:
        raise ConfigError(
            f"{_FILE_MANAGER}: {_CARELESS_FILE_MANAGER} ignores failed writes, so state would be lost silently",
            next_step=f"leave {_FILE_MANAGER} out: Spark's own choice reports them; see storage.md",
            flow=flow,
        )


def query_session(
    session: SparkSession, *, state_backend: str, subtasks: int | None, is_local_dir: bool
) -> SparkSession:
    """A session for one operator: a copy of the user's (views, functions, settings) with its own query settings.

    ``is_local_dir``: its directory is on this machine's file system.
    """
    copy = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
    _share_listeners(session, copy)
    set_by_user = set(session.conf.getAll)
    manager = {_FILE_MANAGER: _LOCAL_FILE_MANAGER} if is_local_dir else {}
    for key, value in {**_QUERY_DEFAULTS, **manager, **_BACKENDS[state_backend]}.items():
        if key not in set_by_user:
            copy.conf.set(key, value)
    if subtasks is not None:
        copy.conf.set("spark.sql.shuffle.partitions", str(subtasks))
    elif "spark.sql.shuffle.partitions" not in set_by_user:
        # Spark's default of 200 state partitions is for large clusters.
        copy.conf.set("spark.sql.shuffle.partitions", str(max(session.sparkContext.defaultParallelism, 1)))
    return copy


def _share_listeners(session: SparkSession, copy: SparkSession) -> None:
    """Let the user's streaming listeners hear the operator's query: Spark tells each session's own queries only."""
    hearing = copy._jsparkSession.streams()
    present = {listener.hashCode() for listener in hearing.listListeners()}
    # Spark itself gives every session those that its settings name.
    static = (session.sparkContext.getConf().get("spark.sql.streaming.streamingQueryListeners") or "").split(",")
    for listener in session._jsparkSession.streams().listListeners():
        if listener.hashCode() not in present and listener.getClass().getName() not in static:
            hearing.addListener(listener)


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
