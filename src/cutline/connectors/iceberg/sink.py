"""An Iceberg table: executors write its Parquet files, and one snapshot makes each epoch visible.

Files that no snapshot names are invisible to every reader. The commit that makes the snapshot also sets the sink's
ledger, a property of the table, so the table itself knows what was published.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from cutline.base.durable import settle_dir
from cutline.config.arguments import checked
from cutline.connectors.iceberg.catalog import (
    CatalogAddress,
    catalog_errors,
    check_installed,
    create_namespace,
    gone,
    table_identifier,
)
from cutline.connectors.iceberg.publish import ORPHANS_HINT, Layout, Mode, Publication
from cutline.connectors.iceberg.table import ATTEMPTS, SinkTable
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import check_partition_columns, key_problems, rows_schema, storable_schema
from cutline.connectors.shared_epochs import new_claim
from cutline.connectors.sink_base import OpenedSink, not_opened
from cutline.connectors.staged_files import check_still_there, pieces_of
from cutline.errors import ConfigError, NotDone, SinkError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table

    from cutline.model.ids import Epoch
    from cutline.model.staging import StagedBatch
    from cutline.ports.reading import ReadRequest, ReadResult
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit
    from cutline.protocol.publish.rewind_points import Gap

#: Properties of a table that the sink creates: each commit makes a metadata file, and only the newest ones stay.
_NEW_TABLE = {"format-version": "2", "write.metadata.delete-after-commit.enabled": "true"}
#: A staged file is older than the snapshot that names it, but the clocks of hosts differ.
_CLOCK_MARGIN_MS = 24 * 3_600_000


class Iceberg:
    """Exactly-once rows in an Iceberg table, which other writers and flows may share.

    ``append``: every row is a new row, also the updated ones of output mode ``update``. ``upsert``: a row replaces the
    one with the same ``key``. ``overwrite_partitions``: a batch replaces the partitions that its rows are in.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = True

    @checked("sinks.Iceberg")
    def __init__(
        self,
        catalog: str,
        table: str,
        partition_by: Sequence[str] = (),
        *,
        mode: Mode = "append",
        key: Sequence[str] = (),
        warehouse: str | os.PathLike[str] | None = None,
        catalog_name: str = "default",
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """``catalog``: sqlite:////path, postgresql://user@host/database, or the address of a REST catalog.

        ``table``: namespace.name. ``warehouse``: the folder for tables that the sink creates. ``catalog_name``: under
        which a database keeps the tables; other programs must name the catalog so. ``properties``: for pyiceberg, as
        credentials of a REST catalog.
        """
        check_installed()
        self.table, self.catalog_name = table, catalog_name
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.mode: Mode = mode
        _check_mode(mode, self.key, self.partition_by)
        # Not under the names of the arguments: an address and properties may hold secrets.
        self._address = CatalogAddress(catalog, catalog_name, warehouse, properties or {})
        self._opened = OpenedSink("the table", table=table)
        self._target = SinkTable(self._address, table_identifier(table), self._opened)
        #: The schemas of the incoming rows and of the files, and the table's folder; ``open`` sets them.
        self._rows: pa.Schema = None
        self._schema: pa.Schema = None
        self._layout: Layout | None = None

    def __repr__(self) -> str:
        return (
            f"Iceberg({str(self._address)!r}, {self.table!r}, partition_by={self.partition_by!r}, "
            f"mode={self.mode!r}, key={self.key!r})"
        )

    def open(self, context: SinkContext) -> None:
        """Create the table, or check that such rows may be added to the existing one."""
        from cutline.connectors.iceberg.file_io import folder_of
        from cutline.connectors.iceberg.schema import file_schema

        self._rows = rows_schema(context)
        self._schema = storable_schema(self._rows)
        check_partition_columns(self._schema, self.partition_by)
        if wrong := key_problems(self._schema, self.key):
            raise SinkError("; ".join(wrong), next_step="name other columns as key=[…]", table=self.table)
        self._opened.enter(context)
        found = self._target.find() or self._create()
        self._check_fit(found)
        root = folder_of(found.location())
        settle_dir(root)
        self._layout = Layout(mode=self.mode, key=self.key, partition_by=self.partition_by, root=root)
        self._files = file_schema(found.schema(), self._schema.names)
        self._target.note(self._target.view_of(found).published)

    def claimed(self) -> str:
        return self._target.view().ledger.claim

    def claim(self, history: str, *, expected: str) -> None:
        """A snapshot without a change of rows, which conflicts with concurrent commits of other instances."""
        from cutline.connectors.iceberg.commits import Change

        failure: Exception | None = None
        claim = new_claim(history)
        for _ in ATTEMPTS.attempts():
            view = self._target.view(failure)
            if view.ledger.claim != claim:  # it is, if an earlier attempt failed after it had taken effect
                self._opened.check_expected(view.ledger.claim, expected)
                head = view.table.metadata.current_snapshot_id
                mark = self._target.mark(view, "claim", after=view.published, on=head)
                draft = self._target.draft(view, view.snapshot(head), Change(), _append(), mark)
                ledger = msgspec.structs.replace(
                    view.ledger, claim=claim, published=view.published, rewound=view.rewound
                )
                failure = self._target.commit(view, draft, ledger)
                if failure is not None:
                    continue
            self._opened.claim = claim
            return
        raise NotDone(
            f"the table did not take the claim in {ATTEMPTS.limit} attempts: {self._target.describe(failure)}",
            next_step="check whether another writer blocks the table, then restart",
            table=self.table,
        ) from None

    def stager(self) -> Stager:
        from cutline.connectors.iceberg.replace import DATA_FOLDER

        return ParquetStager(
            root=str(self._known_layout().root),
            folder=DATA_FOLDER,
            sink=self._opened.context.sink,
            schema_ipc=self._files.serialize().to_pybytes(),
            partition_by=self.partition_by,
            key=self.key,
            in_calendar=self.key,
            keeps_partition_columns=True,
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Check that the staged files exist before the epoch relies on them; they are durable already."""
        check_still_there(self._known_layout().root, pieces_of(staged), hint=ORPHANS_HINT)
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Add the batches' files in one snapshot; an epoch without rows makes none."""
        self._opened.check_covered(permit, staged)
        self._publication(permit, staged).run()

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete staged files that no snapshot names, not even one of a rewound epoch (time travel needs those)."""
        from cutline.connectors.iceberg.commits import named_since

        root = self._known_layout().root
        pieces = [piece for piece in pieces_of(staged) if (root / piece["path"]).exists()]
        if not pieces:
            return
        names = {(root / piece["path"]).name for piece in pieces}
        oldest_ms = min(int(piece["modified_ms"]) for piece in pieces)
        named = named_since(self._target.view().table, names, oldest_ms - _CLOCK_MARGIN_MS)
        for piece in pieces:
            if (root / piece["path"]).name not in named:
                (root / piece["path"]).unlink(missing_ok=True)

    def published(self) -> Epoch | None:
        return self._target.view().published or None

    def highest(self) -> Epoch:
        return self._target.judged(self._target.view()).highest

    def rewind(self, epoch: Epoch) -> None:
        """Make a snapshot with the rows of the one in which ``epoch`` was newest, and set the published epoch back."""
        from cutline.connectors.iceberg.rewind import rewind_table

        rewind_table(self._target, epoch)

    def oldest_rewind(self) -> Epoch:
        """A rewind reaches no further back than the snapshots, or the newest change by another writer."""
        return self._target.judged(self._target.view()).reach

    def rewind_gaps(self) -> tuple[Gap, ...]:
        """Epochs whose snapshots have expired, while older ones are kept by tags."""
        return self._target.judged(self._target.view()).gaps

    def read(self, request: ReadRequest) -> ReadResult:
        """The table, including other writers' rows, or the rows that later epochs of this sink have added."""
        from cutline.connectors.iceberg.reader import read_table

        return read_table(self._target, request, appends=self.mode == "append")

    # ------------------------------------------------------------------ the table

    def _publication(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> Publication:
        return Publication(self._target, self._known_layout(), permit, staged, self._check_still_fits)

    def _known_layout(self) -> Layout:
        if self._layout is None:
            raise not_opened(table=self.table)
        return self._layout

    def _create(self) -> Table:
        from pyiceberg.exceptions import TableAlreadyExistsError

        from cutline.connectors.iceberg.schema import partition_spec, table_schema

        catalog, identifier = self._target.catalog(), self._target.identifier
        schema = table_schema(self._schema)
        try:
            create_namespace(catalog, identifier)
            catalog.create_table(
                identifier, schema, partition_spec=partition_spec(schema, self.partition_by), properties=_NEW_TABLE
            )
        except TableAlreadyExistsError:
            pass  # by another flow, at this moment; the result is checked afterwards
        except catalog_errors() as error:
            if "warehouse" in str(error).lower() or "no default path" in str(error).lower():
                raise ConfigError(
                    "the catalog does not know where to create the table",
                    next_step="give the sink a folder for it: warehouse=…",
                    table=self.table,
                ) from None
            raise self._address.unreachable(error, table=self.table) from None
        found = self._target.find()
        if found is None:
            raise gone(self.table)
        return found

    def _check_fit(self, table: Table) -> None:
        from cutline.connectors.iceberg.schema import fit_problems

        self._refuse_if(fit_problems(table, self._rows, self._schema, self.partition_by))

    def _check_still_fits(self, table: Table) -> None:
        """Files name columns by id, so appended ones stay right when a column is renamed while the flow runs."""
        from cutline.connectors.iceberg.schema import dropped_columns

        if self.mode != "append":
            self._check_fit(table)
        elif dropped := dropped_columns(table, self._files):
            self._refuse_if([f"{name} is no longer in the table" for name in dropped])

    def _refuse_if(self, problems: Sequence[str]) -> None:
        if problems:
            context = self._opened.context
            raise SinkError(
                f"the table does not take these rows: {'; '.join(problems)}",
                next_step="change the rows or the table (ALTER TABLE … ADD COLUMNS), or give the sink another table",
                flow=context.flow,
                sink=context.sink,
                table=self.table,
            )


def _append() -> Any:
    from pyiceberg.table.snapshots import Operation

    return Operation.APPEND


def _check_mode(mode: str, key: tuple[str, ...], partition_by: tuple[str, ...]) -> None:
    problem = None
    if mode not in get_args(Mode):
        problem = f"the Iceberg sink has no mode {mode!r}", f"use one of: {', '.join(get_args(Mode))}"
    elif (mode == "upsert") != bool(key):
        problem = "mode='upsert' and key=[…] go together", "name the columns that identify a row"
    elif mode == "overwrite_partitions" and not partition_by:
        problem = "mode='overwrite_partitions' needs partitions", "give partition_by=[…]"
    if problem is not None:
        raise ConfigError(problem[0], next_step=problem[1])
