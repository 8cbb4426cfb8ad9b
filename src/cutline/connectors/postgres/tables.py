"""The tables of the sink: the user's own, created or checked, and those of the sink's ledger.

The ledger is in one schema of the same database, so that rows and ledger change in one transaction:

    ledger      one row for each sink of a flow and its table: which epoch is published
    pieces      what tasks have staged, and which epoch has published it
    prepared    what an epoch that is not published yet will publish, for each sink
    epochs      the newest published epochs
    staged_<n>  rows that are not published yet
    before_<n>  rows as they were before an epoch replaced them (upsert)

The rows of ``staged_<n>`` are in a few tables that inherit from it, see ``postgres.cleanup``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.connectors.postgres.staging import PIECE_COLUMN, ROW_COLUMN, staged_tables
from cutline.connectors.postgres.types import takes
from cutline.errors import SinkError, UnknownFormatError

if TYPE_CHECKING:
    from psycopg import sql

    from cutline.connectors.postgres.connection import Connection

FORMAT = 1
EPOCH_COLUMN, EXISTED_COLUMN = "cutline_epoch", "cutline_existed"
STAGED_COLUMNS = {PIECE_COLUMN: "bigint NOT NULL", ROW_COLUMN: "bigint NOT NULL"}
BEFORE_COLUMNS = {EPOCH_COLUMN: "bigint NOT NULL", EXISTED_COLUMN: "boolean NOT NULL"}

_LEDGER_TABLES = (
    "CREATE TABLE IF NOT EXISTS {own}.about (format integer NOT NULL)",
    "CREATE TABLE IF NOT EXISTS {own}.ledger ("
    " ledger bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
    " flow text NOT NULL, sink text NOT NULL, target text NOT NULL, is_exclusive boolean NOT NULL,"
    " epoch bigint NOT NULL DEFAULT 0, generation bigint NOT NULL DEFAULT 0,"
    " highest bigint NOT NULL DEFAULT 0, rewound bigint NOT NULL DEFAULT 0,"
    " forgotten bigint NOT NULL DEFAULT 0, reach bigint NOT NULL DEFAULT 0,"
    " version bigint NOT NULL DEFAULT 0, life text NOT NULL DEFAULT '', claim text NOT NULL DEFAULT '',"
    " reach_record text NOT NULL DEFAULT '',"
    " UNIQUE (flow, sink, target))",
    "CREATE SEQUENCE IF NOT EXISTS {own}.piece_numbers",
    "CREATE TABLE IF NOT EXISTS {own}.pieces ("
    " piece bigint PRIMARY KEY, ledger bigint NOT NULL, generation bigint NOT NULL, batch bigint NOT NULL,"
    " partition integer NOT NULL, attempt text NOT NULL, rows bigint NOT NULL,"
    " epoch bigint, staged_at timestamptz NOT NULL DEFAULT now())",
    "CREATE INDEX IF NOT EXISTS pieces_by_epoch ON {own}.pieces (ledger, epoch)",
    "CREATE TABLE IF NOT EXISTS {own}.prepared ("
    " ledger bigint NOT NULL, epoch bigint NOT NULL, life text NOT NULL, flow text NOT NULL,"
    " plan jsonb NOT NULL, pieces bigint[] NOT NULL, PRIMARY KEY (ledger, epoch, life))",
    "CREATE TABLE IF NOT EXISTS {own}.epochs ("
    " ledger bigint NOT NULL, epoch bigint NOT NULL, generation bigint NOT NULL, rows bigint NOT NULL,"
    " published_at timestamptz NOT NULL DEFAULT now(), merged_from bigint NOT NULL DEFAULT 0,"
    " PRIMARY KEY (ledger, epoch))",
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that publishing one sink's rows needs; the sink that publishes an epoch reads it from ``prepared``."""

    ledger: int
    sink: str
    #: Schema and name.
    target: tuple[str, str]
    columns: tuple[str, ...]
    #: Empty: rows are appended.
    key: tuple[str, ...]
    is_rewindable: bool
    #: Negative: no user has named the number, see ``shared_epochs.Keep``.
    keep_epochs: int


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A column of an existing table."""

    type: str
    is_required: bool
    has_default: bool
    is_generated: bool

    def optional(self) -> Column:
        return msgspec.structs.replace(self, is_required=False)


def composed(text: str, **parts: str | tuple[str, ...] | sql.Composable) -> sql.Composed:
    """A statement with names filled in; ``own`` is the ledger's schema. Several names become ``a, b``."""
    from psycopg import sql

    def name(part: str | tuple[str, ...] | sql.Composable) -> sql.Composable:
        if isinstance(part, tuple):
            return sql.SQL(", ").join(map(sql.Identifier, part))
        return sql.Identifier(part) if isinstance(part, str) else part

    return sql.SQL(text).format(**{key: name(part) for key, part in parts.items()})


def create_ledger_tables(connection: Connection, ledger_schema: str) -> None:
    """Create the ledger's tables if there are none. A lock serializes flows that do so at the same time."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtext('cutline'), hashtext(%s))", (ledger_schema,))
    # A user that may use the schema need not have the privilege to create one.
    if connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (ledger_schema,)).fetchone() is None:
        connection.execute(composed("CREATE SCHEMA {own}", own=ledger_schema))
    if connection.execute("SELECT to_regclass(%s)", (f'"{ledger_schema}".epochs',)).fetchone() == (None,):
        for statement in _LEDGER_TABLES:
            connection.execute(composed(statement, own=ledger_schema))
        connection.execute(composed("INSERT INTO {own}.about VALUES (%s)", own=ledger_schema), (FORMAT,))
    elif "merged_from" not in columns_of(connection, (ledger_schema, "epochs")):  # of a former version
        connection.execute(
            composed("ALTER TABLE {own}.epochs ADD COLUMN merged_from bigint NOT NULL DEFAULT 0", own=ledger_schema)
        )
    if not has_reach(connection, ledger_schema):  # of a former version
        connection.execute(
            composed("ALTER TABLE {own}.ledger ADD COLUMN reach_record text NOT NULL DEFAULT ''", own=ledger_schema)
        )
    row = connection.execute(composed("SELECT max(format) FROM {own}.about", own=ledger_schema)).fetchone()
    if row != (FORMAT,):
        raise UnknownFormatError(
            f"the schema {ledger_schema} was made by another version of Cutline",
            next_step="use the Cutline that made it, or name another schema with books=",
        )


def has_reach(connection: Connection, ledger_schema: str) -> bool:
    return "reach_record" in columns_of(connection, (ledger_schema, "ledger"))


def enter_ledger(
    connection: Connection, ledger_schema: str, *, flow: str, sink: str, target: tuple[str, str], is_exclusive: bool
) -> int:
    """The sink's number in the ledger; refuses a table that another sink owns exclusively."""
    name = ".".join(target)
    others = composed(
        "SELECT flow, sink FROM {own}.ledger"
        " WHERE target = %s AND (flow, sink) <> (%s, %s) AND (is_exclusive OR %s) LIMIT 1",
        own=ledger_schema,
    )
    if (other := connection.execute(others, (name, flow, sink, is_exclusive)).fetchone()) is not None:
        raise SinkError(
            f"the table belongs to sink {other[1]} of flow {other[0]}",
            next_step="give this sink a table of its own, or rewindable=False to all that share one",
            flow=flow,
            sink=sink,
            table=name,
        )
    entered = composed(
        "INSERT INTO {own}.ledger (flow, sink, target, is_exclusive) VALUES (%s, %s, %s, %s)"
        " ON CONFLICT (flow, sink, target) DO UPDATE SET is_exclusive = EXCLUDED.is_exclusive,"
        # Epochs published while the sink was not rewindable cannot be rewound later either.
        " reach = CASE WHEN ledger.is_exclusive THEN ledger.reach ELSE ledger.epoch END RETURNING ledger.ledger",
        own=ledger_schema,
    )
    return int(one(connection.execute(entered, (flow, sink, name, is_exclusive)).fetchone())[0])


def find_table(connection: Connection, name: str) -> tuple[str, str] | None:
    """Schema and name of the table that this name means now; None if there is none."""
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in name.split("."))
    row = connection.execute(
        "SELECT n.nspname, c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = to_regclass(%s)",
        (quoted,),
    ).fetchone()
    if row is None:
        return None
    if row[2] not in ("r", "p"):
        raise SinkError("it is not a table", next_step="give the sink a table, not a view", table=name)
    return str(row[0]), str(row[1])


def create_table(
    connection: Connection, name: str, columns: dict[str, str], key: tuple[str, ...], *, has_epoch: bool
) -> None:
    from psycopg import sql

    identifier = sql.Identifier(*name.split("."))
    definitions = [sql.SQL("{} {}").format(sql.Identifier(column), typed(kind)) for column, kind in columns.items()]
    if has_epoch:
        definitions.append(sql.SQL("{} bigint NOT NULL").format(sql.Identifier(EPOCH_COLUMN)))
    if key:
        definitions.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(identifier, sql.SQL(", ").join(definitions)))
    if has_epoch:
        # Epochs only grow, so this index stays tiny; it makes a rewind cheap.
        connection.execute(
            sql.SQL("CREATE INDEX ON {} USING brin ({})").format(identifier, sql.Identifier(EPOCH_COLUMN))
        )


def columns_of(connection: Connection, table: tuple[str, str]) -> dict[str, Column]:
    rows = connection.execute(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.atthasdef,"
        " a.attgenerated <> '' OR a.attidentity = 'a'"
        " FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
        table,
    )
    return {
        str(name): Column(type=str(kind), is_required=required, has_default=default, is_generated=generated)
        for name, kind, required, default, generated in rows
    }


def fit_problems(
    connection: Connection,
    table: tuple[str, str],
    wanted: dict[str, str],
    key: tuple[str, ...],
    *,
    has_epoch: bool,
) -> list[str]:
    """Why the table cannot take such rows; empty if it can."""
    found = columns_of(connection, table)
    wanted = wanted | ({EPOCH_COLUMN: "bigint"} if has_epoch else {})
    problems = []
    for name, kind in wanted.items():
        column = found.get(name)
        if column is None and name == EPOCH_COLUMN:
            problems.append(f"it has no column {name} (bigint), without which the table cannot be rewound")
        elif column is None:
            problems.append(f"it has no column {name} ({kind})")
        elif not takes(column.type, kind):
            problems.append(f"{name} is {column.type}, the rows have {kind}")
        elif column.is_generated:
            problems.append(f"{name} is computed by the table itself")
    problems += [
        f"{name} must not be null and has no default, and the rows do not have it"
        for name, column in found.items()
        if name not in wanted and column.is_required and not (column.has_default or column.is_generated)
    ]
    if key:
        problems += [
            f"the key column {name} may be null" for name in key if name in found and not found[name].is_required
        ]
        if not problems and not _has_unique_index(connection, table, key):
            problems.append(f"it has no unique index on exactly ({', '.join(key)})")
    return problems


def _has_unique_index(connection: Connection, table: tuple[str, str], key: Sequence[str]) -> bool:
    rows = connection.execute(
        "SELECT array_agg(a.attname::text) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])"
        " WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indisvalid AND i.indimmediate"
        " AND i.indpred IS NULL AND i.indexprs IS NULL GROUP BY i.indexrelid",
        table,
    )
    return any(set(columns) == set(key) for (columns,) in rows)


def align_staging(connection: Connection, ledger_schema: str, ledger: int, like: dict[str, Column]) -> None:
    """Create or alter the staging table; the tables that inherit from it change with it.

    No index: each holds little more than the rows to publish next, which are read as a whole.
    """
    parent = f"staged_{ledger}"
    align_side_table(connection, (ledger_schema, parent), STAGED_COLUMNS, like, is_indexed=False)
    create = "CREATE TABLE IF NOT EXISTS {own}.{table} () INHERITS ({own}.{parent})"
    for table in staged_tables(ledger):
        connection.execute(composed(create, own=ledger_schema, table=table, parent=parent))


def align_side_table(
    connection: Connection,
    table: tuple[str, str],
    own: dict[str, str],
    like: dict[str, Column],
    *,
    is_indexed: bool = True,
) -> None:
    """Create a side table with columns of its own and those of the rows, or bring an existing one up to date.

    Its columns have the types of the sink's table: a value that does not fit fails when it is staged, not when it is
    published, when the rows can no longer change.
    """
    from psycopg import sql

    identifier = sql.Identifier(*table)
    found = columns_of(connection, table)
    if not found:
        columns = [sql.SQL("{} {}").format(sql.Identifier(name), typed(kind)) for name, kind in own.items()]
        connection.execute(sql.SQL("CREATE TABLE {} ({})").format(identifier, sql.SQL(", ").join(columns)))
        if is_indexed:
            index = sql.SQL("CREATE INDEX ON {} ({})").format(identifier, sql.Identifier(next(iter(own))))
            connection.execute(index)
    for name, column in like.items():
        parts = {"table": identifier, "column": sql.Identifier(name), "kind": typed(column.type)}
        if name not in found:
            connection.execute(sql.SQL("ALTER TABLE {table} ADD COLUMN {column} {kind}").format(**parts))
        elif found[name].type != column.type:
            change = "ALTER TABLE {table} ALTER COLUMN {column} TYPE {kind} USING {column}::{kind}"
            connection.execute(sql.SQL(change).format(**parts))
        if (name in found and found[name].is_required) != column.is_required:
            verb = "SET" if column.is_required else "DROP"
            connection.execute(
                sql.SQL("ALTER TABLE {table} ALTER COLUMN {column} {verb} NOT NULL").format(verb=sql.SQL(verb), **parts)
            )
    for name in found.keys() - like.keys() - own.keys():
        # New rows do not have it; those staged before keep it.
        drop = sql.SQL("ALTER TABLE {} ALTER COLUMN {} DROP NOT NULL").format(identifier, sql.Identifier(name))
        connection.execute(drop)


def typed(kind: str) -> sql.SQL:
    """A type's name, as this module or PostgreSQL itself wrote it."""
    from psycopg import sql

    return sql.SQL(kind)


def one(row: tuple[Any, ...] | None) -> tuple[Any, ...]:
    if row is None:
        raise SinkError("PostgreSQL returned no row where it always returns one")
    return row
