"""Reading a table of a PostgreSQL sink: rows and epoch in one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cutline.connectors.postgres.connection import Address, Session
from cutline.connectors.postgres.ledger import load_ledger, standing_of
from cutline.connectors.postgres.tables import EPOCH_COLUMN, columns_of, composed, find_table
from cutline.connectors.postgres.types import arrow_type
from cutline.connectors.reading import check_still_published, nothing_published, refuse_after, refuse_as_of
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports.reading import ReadRequest, ReadResult
from cutline.protocol.publish.flow_epochs import Standing

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.connectors.postgres.connection import Connection

_ROWS_AT_ONCE = 50_000


def read_table(dsn: str, table: str, ledger_schema: str, request: ReadRequest) -> ReadResult:
    """Fetches all rows in one transaction: the result is one snapshot and blocks no other session."""
    session = Session(Address(dsn))
    try:
        return session.run("be read", lambda connection: _read(connection, table, ledger_schema, request))
    finally:
        session.close()


def table_standing(dsn: str, table: str, ledger_schema: str, request: ReadRequest) -> Standing:
    """What the database says about the epochs of a table's sink."""

    def look(connection: Connection) -> Standing:
        target = _target(connection, table, ledger_schema)
        number, flow, sink = _owner(connection, ledger_schema, target, request)
        row = load_ledger(connection, ledger_schema, [number])[number]
        has_epochs = EPOCH_COLUMN in columns_of(connection, target)
        return standing_of(connection, ledger_schema, row, (flow, sink), has_epochs=has_epochs)

    session = Session(Address(dsn))
    try:
        return session.run("be read", look)
    finally:
        session.close()


def _target(connection: Connection, table: str, ledger_schema: str) -> tuple[str, str]:
    """The table, in a transaction that only reads."""
    connection.execute("SET TRANSACTION READ ONLY")
    target = find_table(connection, table)
    if target is None or connection.execute("SELECT to_regclass(%s)", (f'"{ledger_schema}".epochs',)).fetchone() == (
        None,
    ):
        raise nothing_published(table)
    return target


def _read(connection: Connection, table: str, ledger_schema: str, request: ReadRequest) -> ReadResult:
    target = _target(connection, table, ledger_schema)
    number, flow, sink = _owner(connection, ledger_schema, target, request)
    columns = columns_of(connection, target)
    has_epochs = EPOCH_COLUMN in columns
    rows = connection.execute(
        composed("SELECT epoch FROM {own}.epochs WHERE ledger = %s", own=ledger_schema), (number,)
    )
    listed = [Epoch(epoch) for (epoch,) in rows]
    newest = max(listed, default=NO_EPOCH)
    if (request.after or not request.reaches(newest)) and not has_epochs:
        refuse = refuse_after if request.after else refuse_as_of
        raise refuse("the table does not record the epoch of a row (it is upserted, or not rewindable)")
    check_still_published(
        request, listed, rewound=Epoch(load_ledger(connection, ledger_schema, [number])[number].rewound)
    )
    last = newest if request.as_of is None else min(newest, request.as_of)
    names = tuple(name for name in columns if name != EPOCH_COLUMN)
    schema = _schema({name: columns[name].type for name in names})
    batches = list(_batches(connection, target, names, (request.after, last) if has_epochs else None, schema))
    return ReadResult(
        flow=flow,
        sink=sink,
        epoch=max((epoch for epoch in listed if epoch <= last), default=last),
        schema=schema,
        batches=lambda: iter(batches),
    )


def _owner(
    connection: Connection, ledger_schema: str, target: tuple[str, str], request: ReadRequest
) -> tuple[int, str, str]:
    """The sink whose epochs are read: the named one, or the only one that writes to the table."""
    statement = composed("SELECT ledger, flow, sink FROM {own}.ledger WHERE target = %s", own=ledger_schema)
    owners = connection.execute(statement, (".".join(target),)).fetchall()
    fitting = [row for row in owners if request.flow in (None, row[1]) and request.sink in (None, row[2])]
    if len(fitting) == 1:
        number, flow, sink = fitting[0]
        return int(number), str(flow), str(sink)
    if not owners:
        raise nothing_published(".".join(target))
    known = ", ".join(sorted(f"{flow}/{sink}" for _, flow, sink in owners))
    raise SinkError(
        f"several sinks write to the table ({known})" if fitting else f"no such sink writes to it, but {known}",
        next_step="name the flow= and the sink's name=",
        table=".".join(target),
    )


def _schema(types: dict[str, str]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, arrow_type(kind)) for name, kind in types.items()])


def _batches(
    connection: Connection,
    target: tuple[str, str],
    names: tuple[str, ...],
    between: tuple[Epoch, Epoch] | None,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from psycopg import sql

    # Types that Arrow lacks are read as PostgreSQL's text.
    selected = [
        sql.SQL("{}::text" if pa.types.is_string(field.type) else "{}").format(sql.Identifier(field.name))
        for field in schema
    ]
    text = "SELECT {columns} FROM {schema}.{table}"
    statement = composed(
        text if between is None else text + " WHERE {epoch} > %s AND {epoch} <= %s",
        columns=sql.SQL(", ").join(selected),
        schema=target[0],
        table=target[1],
        epoch=EPOCH_COLUMN,
    )
    with connection.cursor("cutline_read") as cursor:  # a server-side cursor: rows arrive in portions
        cursor.execute(statement, between)
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            yield _batch(rows, schema)


def _batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = zip(*rows, strict=True)
    arrays = [pa.array(values, field.type) for field, values in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
