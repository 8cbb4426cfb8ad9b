"""How far a PostgreSQL table has been read by an increasing key, and whether it can be read again from there.

Rows become visible in the order of commits, not of keys: a transaction may have taken a lower key and commit later. So
a key counts as reached only after all transactions have ended that were writing to the table when it was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cutline.base.redaction import address_without_secrets
from cutline.connectors.postgres.connection import Address, connection_parameters, unreachable
from cutline.connectors.source_options import SourcePosition, convert, parse
from cutline.errors import ConfigError, LostInputError, SinkError
from cutline.ports.inspection import FileProblem, SourceProgress, SourceReport

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

KIND = "cutline_postgres"
#: The owner of a lock if it is a transaction that was prepared before the server last started.
_NAMELESS = "-1/"
#: A table and its partition ancestors: an insert through an ancestor may hold its key before it locks the table.
_WITH_PARENTS = (
    "(SELECT to_regclass(%(table)s)::oid UNION SELECT relid FROM pg_partition_ancestors(to_regclass(%(table)s)))"
)
_WRITING = ("RowExclusiveLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")


class PostgresPosition(SourcePosition, frozen=True, kw_only=True):
    """A position in a table. Holds all that the replay guard needs to check it, and no secrets."""

    source: str = KIND
    url: str
    table: str
    key_column: str
    #: Distinguishes tables with the same name.
    table_id: int
    #: The key after which reading began. Spark does not record where the first batch of a query begins.
    begin: int
    #: The last key that was read.
    key: int
    #: How many rows were read: if a second reading finds fewer, some were deleted.
    rows: int = 0


class Writers(NamedTuple):
    """The highest visible key, and the transactions that were writing when it was seen."""

    highest: int | None
    writers: frozenset[str]

    def are_gone(self, now: Writers) -> bool:
        """Whether none of these transactions is writing now, perhaps under another name."""
        return not any(one in self.writers or one.startswith(_NAMELESS) for one in now.writers)


def parse_position(position: bytes | None) -> PostgresPosition | None:
    """None: the offset of another source, or of none."""
    return parse(position, PostgresPosition, KIND)


def position_of(offset: Mapping[str, Any]) -> PostgresPosition:
    return convert(offset, PostgresPosition)


def where_batch_begins(start: PostgresPosition, end: PostgresPosition) -> PostgresPosition:
    """Spark asks for the beginning of a query's first batch again at each attempt; the end records it."""
    if (start.begin, start.table_id) == (end.begin, end.table_id):
        return start
    return _begun(end)


def _begun(position: PostgresPosition) -> PostgresPosition:
    return msgspec.structs.replace(position, key=position.begin, rows=0)


def import_psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        step = "pip install 'cutline[postgres]', on the executors too"
        raise ConfigError("PostgreSQL needs the package psycopg", next_step=step) from error
    return psycopg


def connect(url: str) -> Connection:
    """libpq takes what the address leaves out from the environment: PGPASSWORD, PGPASSFILE, PGSERVICE … ."""
    postgres = import_psycopg()
    try:
        parameters = connection_parameters(url)
    except SinkError as error:
        raise ConfigError(error.what, next_step=error.next_step) from None
    if parameters.get("password") or parameters.get("sslpassword"):
        raise ConfigError(
            "the address must not hold a password: it is stored in plans and checkpoints",
            next_step="set PGPASSWORD or PGPASSFILE in the environment, or use service=…",
        )
    try:
        made: Connection = postgres.connect(url, autocommit=True, connect_timeout=10)
    except postgres.OperationalError as error:
        raise unreachable(
            error,
            Address(url),
            next_step="check that it runs and is reachable from here, then retry",
            url=address_without_secrets(url),
        ) from None
    return made


def table_id(connection: Connection, table: str) -> int | None:
    """None: there is no such table. Raises ConfigError if it cannot be read by key."""
    found = connection.execute(
        "SELECT oid::bigint, relkind::text, pg_is_in_recovery(), "
        "EXISTS (SELECT FROM pg_inherits WHERE inhparent = oid) FROM pg_class WHERE oid = to_regclass(%s)",
        [_quoted(connection, table)],
    ).fetchone()
    if found is None:
        return None
    number, kind, is_standby, has_children = found
    if kind != "r":
        raise ConfigError(
            f"{table} is not an ordinary table: PostgreSQL does not show which transactions write to it",
            next_step="read the individual partitions, or the table behind the view",
        )
    if has_children:
        raise ConfigError(
            f"other tables inherit from {table}: PostgreSQL does not show which transactions write to them",
            next_step="read the individual tables",
        )
    if is_standby:
        raise ConfigError(
            "a standby does not show which transactions are writing", next_step="read from the primary server"
        )
    return int(number)


def check_keys(connection: Connection, table: str, key: str) -> None:
    """Refuse a table if a session may insert keys lower than those that others have committed."""
    found = connection.execute(
        "SELECT s.seqrelid::regclass::text FROM pg_sequence s JOIN pg_depend d ON s.seqrelid IN (d.objid, d.refobjid) "
        f"JOIN pg_attribute a ON a.attname = %(key)s AND a.attrelid IN {_WITH_PARENTS} "
        "LEFT JOIN pg_attrdef f ON f.adrelid = a.attrelid AND f.adnum = a.attnum "
        "WHERE (s.seqcache > 1 OR s.seqincrement < 0 OR s.seqcycle) AND ("
        # The column owns the sequence, or its default calls it.
        "(d.classid, d.objid, d.refclassid, d.refobjid, d.refobjsubid) "
        "= ('pg_class'::regclass, s.seqrelid, 'pg_class'::regclass, a.attrelid, a.attnum) OR "
        "(d.classid, d.objid, d.refclassid, d.refobjid) "
        "= ('pg_attrdef'::regclass, f.oid, 'pg_class'::regclass, s.seqrelid))",
        {"table": _quoted(connection, table), "key": key},
    ).fetchone()
    if found is not None:
        raise ConfigError(
            f"the keys are not in order: sequence {found[0]} assigns them in blocks, downwards or in a cycle",
            next_step=f"ALTER SEQUENCE {found[0]} CACHE 1 INCREMENT BY 1 NO CYCLE; then restart the writers",
            table=table,
            key=key,
        )


def look(connection: Connection, table: str, key: str) -> Writers:
    """First the key, then the writers: these include every transaction with a lower key that is not visible yet."""
    from psycopg import sql

    highest = connection.execute(
        sql.SQL("SELECT max({key})::bigint FROM {table}").format(key=sql.Identifier(key), table=identifier(table))
    ).fetchone()
    writers = connection.execute(
        "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND granted AND mode = ANY(%(writing)s) "
        f"AND relation IN {_WITH_PARENTS} AND pid IS DISTINCT FROM pg_backend_pid() "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        {"writing": list(_WRITING), "table": _quoted(connection, table)},
    ).fetchall()
    return Writers(highest[0] if highest else None, frozenset(one for (one,) in writers))


def count_rows(connection: Connection, table: str, key: str, *, after: int, through: int, most: int) -> tuple[int, int]:
    """(last key, count) of the next rows in (after, through], at most ``most``."""
    from psycopg import sql

    query = sql.SQL(
        "SELECT coalesce(max(k), %s)::bigint, count(*) FROM "
        "(SELECT {key} AS k FROM {table} WHERE {key} > %s AND {key} <= %s ORDER BY {key} LIMIT %s) AS next"
    ).format(key=sql.Identifier(key), table=identifier(table))
    found = connection.execute(query, [after, after, through, most]).fetchone()
    return (int(found[0]), int(found[1])) if found else (after, 0)


def identifier(table: str) -> Any:
    from psycopg import sql

    return sql.Identifier(*table.split("."))


def _quoted(connection: Connection, table: str) -> str:
    """The name for to_regclass, so that it means the same table as in a query."""
    quoted: str = identifier(table).as_string(connection)
    return quoted


def lost_between(connection: Connection, start: PostgresPosition, end: PostgresPosition | None) -> FileProblem | None:
    """What of (start, end] is gone; ``end`` None: how far it was read is unknown, so no row can be missed."""
    last = None if end is None or end.table_id != start.table_id else end
    if table_id(connection, start.table) != start.table_id:
        read = last.rows - start.rows if last is not None else 0
        return FileProblem(f"table {start.table}: rows after {start.key}", "another table has this name now", read)
    if last is None:
        return None
    expected = last.rows - start.rows
    _, there = count_rows(
        connection, start.table, start.key_column, after=start.key, through=last.key, most=expected + 1
    )
    if there >= expected:
        return None
    text = f"table {start.table}: {expected - there} of the rows with {start.key_column} {start.key + 1} to {last.key}"
    return FileProblem(text, "these rows were deleted", expected - there)


# ------------------------------------------------------------------------------------------------- the replay guard


def is_mine(position: bytes | None) -> bool:
    return parse_position(position) is not None


def check(position: bytes | None, latest: bytes | None) -> SourceReport:
    """Whether all after ``position`` can be read again. Raises NotDone if the server cannot be asked."""
    start, end = parse_position(position), parse_position(latest)
    if start is None:
        return SourceReport()
    with connect((end or start).url) as connection:
        problem = lost_between(connection, start, end)
    notes = [] if end is not None else ["is not guarded against deleted rows: how far it had read is unknown"]
    return SourceReport([problem] if problem else [], notes)


def progress(position: bytes, stored: Sequence[bytes]) -> SourceProgress | None:
    """Not known: a table drops nothing by itself, and counting the rows after a key would read them."""
    return None


def beginning(position: bytes) -> bytes:
    """Where reading began."""
    found = parse_position(position)
    return position if found is None else msgspec.json.encode(_begun(found))


def moved(positions: Sequence[bytes], latest: bytes | None) -> list[bytes]:
    """Deleted rows are simply not found; only a table that was created again is read from its beginning."""
    start, *planned = [one for one in map(parse_position, positions) if one is not None]
    with connect((parse_position(latest) or start).url) as connection:
        identity = table_id(connection, start.table)
        if identity is None:
            raise LostInputError(
                f"table {start.table} does not exist any more",
                next_step="create the table again, then restart",
            )
        if identity != start.table_id:
            start = msgspec.structs.replace(start, table_id=identity, begin=-(1 << 62), key=-(1 << 62))
        result = [start]
        for one in planned:
            through = one.key if one.table_id == identity else start.key
            _, rows = count_rows(
                connection, start.table, start.key_column, after=start.key, through=through, most=1 << 62
            )
            result.append(msgspec.structs.replace(start, key=max(through, start.key), rows=start.rows + rows))
    return [msgspec.json.encode(one) for one in result]
