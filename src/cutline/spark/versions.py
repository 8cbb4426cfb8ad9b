"""What differs between the versions of Spark that a flow can run on. All other code is the same for each of them.

- Spark 4.1 does not tell a source in Python where the next batch begins, and our sources must know it: a channel is
  read up to its gate and up to a size, a server's log up to a number of messages. See ``PythonSources``.
- No version uses pandas for ``mapInArrow``, and each demands it. See ``map_in_arrow``.

Spark starts processes that import this module for every source of every query, so it imports little.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyspark
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from cutline.config.spark_versions import REQUIREMENT, parse_version, why_unsupported
from cutline.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from cutline.model.ids import OperatorId
    from cutline.ports.engine import LiveDirs

#: From this version on, Spark passes ``latestOffset`` the position where the batch begins.
_TELLS_START = (4, 2)
#: From this version on, PySpark's Arrow schemas have the time zone they are asked for; before, they are in UTC.
_NAMES_TIME_ZONE = (4, 2)


def check_pyspark(flow: str) -> None:
    """Refuse a version that flows do not run on, before a JVM is started."""
    why = why_unsupported(pyspark.__version__)
    if why is not None:
        raise ConfigError(
            f"PySpark {pyspark.__version__} is not supported: {why}",
            next_step=f"python -m pip install '{REQUIREMENT}'",
            flow=flow,
        )


def check_jvm(flow: str, session: SparkSession) -> None:
    """Refuse a JVM of another Spark than PySpark's, as SPARK_HOME or ``spark-submit`` may name it."""
    if parse_version(session.version) != parse_version(pyspark.__version__):
        raise ConfigError(
            f"the JVM runs Spark {session.version}, and Python has PySpark {pyspark.__version__}",
            next_step=f"python -m pip install 'pyspark=={session.version}', or use the Spark that PySpark brings: "
            "unset SPARK_HOME, use the spark-submit of this Python",
            flow=flow,
        )


def map_in_arrow(
    frame: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """``frame.mapInArrow(function, schema)``, which would raise an error without pandas and then not use it."""
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import _create_udf
    from pyspark.util import PythonEvalType

    mapping: Any = _create_udf(function, schema, PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column = mapping(*(frame[name] for name in frame.columns))
    return DataFrame(frame._jdf.mapInArrow(column._jc, False, None), frame.sparkSession)


def arrow_schema(schema: StructType) -> pa.Schema:
    """UTC in any session time zone: Spark expects it from a Python source, and the instants are the same."""
    from pyspark.sql.pandas.types import to_arrow_schema

    named: dict[str, Any] = {"timezone": "UTC"} if parse_version(pyspark.__version__) >= _NAMES_TIME_ZONE else {}
    return to_arrow_schema(schema, **named)


# ------------------------------------------------------------------------------------------ sources in Python


class SourceReader(Protocol):
    """A reader of ours. It may be asked where to read to only with the position where reading begins."""

    def initialOffset(self) -> dict[str, Any]: ...

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]: ...

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]: ...

    def read(self, partition: InputPartition) -> Iterator[Any]: ...

    def stop(self) -> None: ...

    def furthest(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Of a query's positions, that of this reader's source; None: the query has none yet.

        If the query reads the source twice, the furthest: Spark reads each time from where it stands to where a
        reader says, and that must not lie before it.
        """
        ...


class PythonSources:
    """Registers the sources in Python as the session's version of Spark needs them.

    On Spark 4.1 each operator has its own classes, which name a file: the positions of the operator's query, stored
    before the query starts. Readers take their start from there, and follow it from then on by themselves.
    """

    def __init__(
        self, session: SparkSession, classes: Sequence[type[DataSource]], start_path: Callable[[OperatorId], Path]
    ) -> None:
        self._classes = classes
        self._start_path = start_path
        self._are_told = parse_version(session.version) >= _TELLS_START
        if self._are_told:
            # Once, on the session from which every operator's session is copied.
            for source in classes:
                _register(session, source)

    def register(self, session: SparkSession, operator: OperatorId) -> None:
        """In the session of an operator, before its function is called."""
        if not self._are_told:
            for source in self._classes:
                session.dataSource.register(starting_from(source, self._start_path(operator)))

    def store_start(self, operator: OperatorId, spark_checkpoint_dir: Path, live_dirs: LiveDirs | None) -> None:
        """Before the operator's query starts on this directory."""
        if not self._are_told:
            if live_dirs is not None:
                live_dirs.fetch(spark_checkpoint_dir)
            store_positions(spark_checkpoint_dir, self._start_path(operator))


def _register(session: SparkSession, source: type[DataSource]) -> None:
    try:
        session.dataSource.register(source)
    except AnalysisException as error:
        # ``newSession`` of a session that knows it has inherited it, and refuses to be told again.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def store_positions(spark_checkpoint_dir: Path, path: Path) -> None:
    """Store how far the query on this directory has planned to read: that is where its next batch begins."""
    # Not at the top: readers import this module and need none of it.
    from cutline.base import durable
    from cutline.model.ids import NO_BATCH
    from cutline.spark_dir.file_set import last_batches
    from cutline.spark_dir.offsets import load_offsets

    planned, _ = last_batches(spark_checkpoint_dir)
    found = {} if planned == NO_BATCH else load_offsets(str(spark_checkpoint_dir), planned).positions
    positions = [position for position in map(_as_json, found.values()) if isinstance(position, dict)]
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, json.dumps(positions).encode(), sync=False)


def _as_json(position: bytes | None) -> Any:
    """None: the source has read nothing yet, or it is one of Spark's own, which may write anything."""
    try:
        return None if position is None else json.loads(position)
    except ValueError:
        return None


def starting_from(source: type[DataSource], path: Path) -> type[DataSource]:
    """The source for one operator, on a Spark that does not tell where a batch begins."""
    # Created here, so it is pickled by value: with its one attribute, and its bases by name.
    return type(source.__name__, (_Untold, source), {"start_path": str(path)})


class _Untold(DataSource):
    start_path: str

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        reader: Any = super().streamReader(schema)
        return UntoldReader(reader, self.start_path)


class UntoldReader(DataSourceStreamReader):
    """A reader of ours on a Spark that does not tell it where a batch begins.

    A position that ``latestOffset`` returned is where the next batch begins: Spark plans a batch up to it at once,
    unless it is the old one. If Spark ever dropped one, the next batch would be larger than the limit, and right.
    """

    def __init__(self, reader: SourceReader, start_path: str) -> None:
        self._reader = reader
        self._start_path = start_path
        self._initial: dict[str, Any] | None = None
        self._at: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Asked for after the first ``latestOffset``, which was planned from the same position."""
        if self._initial is None:
            self._initial = self._reader.initialOffset()
        return self._initial

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override] # Spark 4.1
        at = self._at or self._stored() or self.initialOffset()
        self._at = self._reader.latestOffset(at, None)
        return self._at

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._at = end  # a batch that Spark runs again was planned by a former reader
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._reader.read(partition)

    def stop(self) -> None:
        self._reader.stop()

    def _stored(self) -> dict[str, Any] | None:
        with open(self._start_path, "rb") as file:
            return self._reader.furthest(json.loads(file.read()))
