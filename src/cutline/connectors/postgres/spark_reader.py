"""Reads a PostgreSQL table that only grows by an increasing key: the same range of keys gives the same rows.

``spark.readStream.format("cutline_postgres")`` with the options ``url`` (without password), ``table``, ``key`` (whole
numbers, with an index), ``start`` (``earliest``, ``latest`` or the key to read after) and ``max_per_batch``. See
docs/sources.md. ``.schema(…)`` chooses columns; without it they are those of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from cutline.connectors.source_options import furthest_of, most_per_batch, needed, refuse_lost, start_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cutline.connectors.postgres.positions import Connection, PostgresPosition, Writers

FORMAT = "cutline_postgres"
#: Below every key.
_LOWEST = -(1 << 62)
_PAGE = 5_000
_SPARK_TYPES = {
    "bool": "boolean",
    "int2": "short",
    "int4": "int",
    "int8": "long",
    "float4": "float",
    "float8": "double",
    "bytea": "binary",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
}


class KeyRange(InputPartition):
    """What one task reads: keys in (after, through]."""

    def __init__(self, after: int, through: int, rows: int) -> None:
        self.after = after
        self.through = through
        self.rows = rows


class PostgresSource(DataSource):
    """Rows of one table."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        from cutline.connectors.postgres.positions import connect, identifier

        url, table = needed(self.options, "url", source=FORMAT), needed(self.options, "table", source=FORMAT)
        with connect(url) as connection:
            columns = connection.execute(
                "SELECT a.attname, t.typname, a.atttypmod FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid "
                "WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
                [identifier(table).as_string(connection)],
            ).fetchall()
        if not columns:
            raise ValueError(f"there is no table {table}")
        return ", ".join(f"`{name}` {_spark_type(kind, modifier)}" for name, kind, modifier in columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return PostgresReader(self.options, schema)


class PostgresReader(DataSourceStreamReader):
    """Reads keys in (start, end]."""

    def __init__(self, options: Any, schema: StructType) -> None:
        self._url = needed(options, "url", source=FORMAT)
        self._table = needed(options, "table", source=FORMAT)
        self._key = needed(options, "key", source=FORMAT)
        self._start = start_of(options, place="a key", is_place=lambda text: text.lstrip("-").isdigit())
        self._most = most_per_batch(options)
        self._schema = schema
        #: Seen while other transactions were writing.
        self._waiting: Writers | None = None
        self._reached = _LOWEST
        self._has_checked_keys = False

    # ------------------------------------------------------------------ driver

    def initialOffset(self) -> dict[str, Any]:
        from cutline.connectors.postgres.positions import PostgresPosition, check_keys, look

        with self._connected() as connection:
            identity = self._table_id(connection)
            check_keys(connection, self._table, self._key)
            key = {"earliest": _LOWEST}.get(self._start)
            if self._start == "latest":
                highest = look(connection, self._table, self._key).highest
                key = _LOWEST if highest is None else highest
        at = int(self._start) if key is None else key
        return PostgresPosition(
            url=self._url, table=self._table, key_column=self._key, table_id=identity, begin=at, key=at
        ).as_json()

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        from cutline.connectors.postgres.positions import count_rows, lost_between

        at = self._position(start)
        with self._connected() as connection:
            refuse_lost(filter(None, [lost_between(connection, at, at)]))
            through = self._settled(connection)
            if through <= at.key:
                return start
            key, rows = count_rows(connection, self._table, self._key, after=at.key, through=through, most=self._most)
        if not rows:
            return start
        offset: dict[str, Any] = at.as_json()
        return offset | {"url": self._url, "key": key, "rows": at.rows + rows}

    def furthest(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return furthest_of(
            positions,
            FORMAT,
            is_own=lambda position: (position["table"], position["key_column"]) == (self._table, self._key),
            distance=lambda position: int(position["key"]),
        )

    def _settled(self, connection: Connection) -> int:
        """The highest key below which no row can appear any more."""
        from cutline.connectors.postgres.positions import check_keys, look

        if not self._has_checked_keys:
            check_keys(connection, self._table, self._key)
            self._has_checked_keys = True
        now = look(connection, self._table, self._key)
        waiting = self._waiting
        if waiting is not None and waiting.highest is not None and waiting.are_gone(now):
            self._reached, self._waiting = max(self._reached, waiting.highest), None
        if not now.writers:
            self._reached = max(self._reached, _LOWEST if now.highest is None else now.highest)
        elif self._waiting is None and now.highest is not None and now.highest > self._reached:
            self._waiting = now
        return self._reached

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        from cutline.connectors.postgres.positions import lost_between, where_batch_begins

        last = self._position(end)
        first = where_batch_begins(self._position(start), last)
        with self._connected() as connection:
            refuse_lost(filter(None, [lost_between(connection, first, last)]))
        return [KeyRange(first.key, last.key, last.rows - first.rows)] if last.key > first.key else []

    def _connected(self) -> Connection:
        from cutline.connectors.postgres.positions import connect

        return connect(self._url)

    def _table_id(self, connection: Connection) -> int:
        from cutline.connectors.postgres.positions import table_id

        found = table_id(connection, self._table)
        if found is None:
            raise ValueError(f"there is no table {self._table}: create it, then start again")
        return found

    def _position(self, offset: dict[str, Any]) -> PostgresPosition:
        from cutline.connectors.postgres.positions import position_of

        at = position_of(offset)
        if (at.table, at.key_column) != (self._table, self._key):
            raise ValueError(
                f"a position in {at.table} by {at.key_column} was given to the reader of {self._table} by {self._key}: "
                "give the operator another name to read another table"
            )
        return at

    # ------------------------------------------------------------------ executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from psycopg import sql

        from cutline.connectors.postgres.positions import identifier

        if not isinstance(partition, KeyRange):
            return
        arrow = _arrow_schema(self._schema)
        query = sql.SQL("SELECT {columns} FROM {table} WHERE {key} > %s AND {key} <= %s ORDER BY {key}").format(
            columns=sql.SQL(", ").join(_selected(field) for field in arrow),
            table=identifier(self._table),
            key=sql.Identifier(self._key),
        )
        count = 0
        with self._connected() as connection, connection.transaction(), connection.cursor("cutline") as cursor:
            cursor.execute(query, [partition.after, partition.through])
            while rows := cursor.fetchmany(_PAGE):
                count += len(rows)
                columns = zip(*rows, strict=True)
                arrays = [pa.array(values, field.type) for values, field in zip(columns, arrow, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, names=arrow.names)
        if count != partition.rows:
            raise ValueError(
                f"table {self._table}, {self._key} {partition.after + 1} to {partition.through}: "
                f"{count} rows were found, {partition.rows} expected: the table does not only grow"
            )


def _arrow_schema(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")  # which Spark expects of a source in Python
    except TypeError:  # PySpark 4.1 has no such argument, and means UTC
        return to_arrow_schema(schema)


def _selected(field: pa.Field) -> Any:
    """Types that are text in Spark (uuid, json, …) are selected as text."""
    import pyarrow as pa
    from psycopg import sql

    name = sql.Identifier(field.name)
    return sql.SQL("{}::text").format(name) if pa.types.is_string(field.type) else name


def _spark_type(kind: str, modifier: int) -> str:
    if kind == "numeric":
        precision, scale = ((modifier - 4) >> 16) & 0xFFFF, (modifier - 4) & 0x7FF
        return f"decimal({precision},{scale})" if modifier >= 4 and precision <= 38 else "string"
    return _SPARK_TYPES.get(kind, "string")
