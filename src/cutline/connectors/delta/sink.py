"""A Delta table: executors write its Parquet files, and one Delta transaction makes each epoch visible.

Files that no transaction names are invisible to every reader. The transaction carries the epoch as its application
version, so the table itself knows what was published, and two writers of one epoch cannot both succeed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote

from cutline.base.durable import is_temporary, settle_dir
from cutline.config.arguments import checked
from cutline.connectors.delta.claim_files import ClaimFiles
from cutline.connectors.delta.commits import store_versions
from cutline.connectors.delta.fit import fit_problems
from cutline.connectors.delta.publish import ATTEMPTS, VACUUM_HINT, Layout, Mode, Publication
from cutline.connectors.delta.reader import read_table, table_standing
from cutline.connectors.delta.rewind import oldest_rewind, rewind_table
from cutline.connectors.delta.table import SinkTable
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.reach import file_in, own_reach, store_reach
from cutline.connectors.rows import check_partition_columns, key_problems, rows_schema, storable_schema
from cutline.connectors.sink_base import OpenedSink
from cutline.connectors.staged_files import check_still_there, local_path, pieces_of
from cutline.errors import ConfigError, NotDone, SinkError
from cutline.ports.reading import ReadRequest

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from cutline.model.ids import Epoch
    from cutline.model.staging import StagedBatch
    from cutline.ports.reading import ReadResult
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit
    from cutline.protocol.publish.flow_epochs import Standing

#: A staged file is older than the commit that names it, but the clocks of hosts differ.
_CLOCK_MARGIN_MS = 24 * 3_600_000


class Delta:
    """Exactly-once rows in a Delta table, which other writers and flows may share.

    ``append``: every row is a new row, also the updated ones of output mode ``update``. ``upsert``: a row replaces the
    one with the same ``key``. ``overwrite_partitions``: a batch replaces the partitions that its rows are in.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = True

    @checked("sinks.Delta")
    def __init__(
        self,
        path: str | os.PathLike[str],
        partition_by: Sequence[str] = (),
        *,
        mode: Mode = "append",
        key: Sequence[str] = (),
    ) -> None:
        if find_spec("deltalake") is None:
            raise ConfigError("the Delta sink needs the package deltalake", next_step="pip install cutline[delta]")
        self.path = local_path(path, sink="Delta")
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.mode: Mode = mode
        _check_mode(mode, self.key, self.partition_by)
        self._opened = OpenedSink("the table", path=self.path)
        self._view = SinkTable(self.path, self._opened)
        #: The schemas of the incoming rows and of the files; ``open`` sets both.
        self._rows: pa.Schema = None
        self._schema: pa.Schema = None

    def __repr__(self) -> str:
        return f"Delta({str(self.path)!r}, partition_by={self.partition_by!r}, mode={self.mode!r}, key={self.key!r})"

    def open(self, context: SinkContext) -> None:
        """Create the table, or check that such rows may be added to the existing one."""
        from deltalake import DeltaTable

        self._rows = rows_schema(context)
        self._schema = storable_schema(self._rows)
        check_partition_columns(self._schema, self.partition_by)
        if wrong := key_problems(self._schema, self.key):
            raise SinkError("; ".join(wrong), next_step="name other columns as key=[…]", path=self.path)
        self._opened.enter(context)
        self._view.invalidate()
        settle_dir(self.path)
        self._view.log.remove_torn_end()
        if not DeltaTable.is_deltatable(str(self.path)):
            self._create()
        table = self._view.refresh()
        self._check_fit(table)
        # The process that made the newest commits may have died before they were durable, and from now on the sink
        # relies on them.
        self._view.log.make_newest_checkpoint_durable()
        if self._view.published_in(table):
            self._view.sync_log(table)
        else:
            self._view.log.make_durable(-1, table.version())

    def claimed(self) -> str:
        number = self._view.claim_in(self._view.refresh())
        return f"{number} {self._claims().history(number)}" if number else ""

    def claim(self, history: str, *, expected: str) -> None:
        """A separate commit, which conflicts with concurrent commits of other instances."""
        from deltalake.exceptions import DeltaError

        failure: Exception | None = None
        claims, attempted = self._claims(), 0
        for _ in ATTEMPTS.attempts():
            table = self._view.refresh(after=failure)
            found = self._view.claim_in(table)
            if found != attempted or not found:  # it is, if an earlier attempt failed after it had taken effect
                self._opened.check_expected(self.claimed(), expected)
            number = attempted = claims.create(found, history)
            try:
                store_versions(table, self.partition_by, {self._view.claim_app: number})
            except (DeltaError, OSError) as error:
                failure = error
            else:
                self._opened.claim = str(number)
                # All versions since the one it was based on: deltalake does not say which one the commit became.
                self._view.log.make_durable(table.version(), self._view.read_anew().version())
                # Only now: until then a power cut may bring the claim before it into force again.
                claims.collect(number)
                return
        raise NotDone(
            f"the table did not take the claim in {ATTEMPTS.limit} attempts: {failure}",
            next_step="check whether another writer blocks the table, then restart",
            path=self.path,
        ) from failure

    def stager(self) -> Stager:
        return ParquetStager(
            root=str(self.path),
            folder="",
            sink=self._opened.context.sink,
            schema_ipc=self._schema.serialize().to_pybytes(),
            partition_by=self.partition_by,
            key=self.key,
            in_calendar=self.key,
            has_stats=True,
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Check that the staged files exist before the epoch relies on them; they are durable already."""
        check_still_there(self.path, pieces_of(staged), hint=VACUUM_HINT)
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Add the batches' files in one transaction; an epoch without rows makes none."""
        self._opened.check_covered(permit, staged)
        self._publication(permit, staged).run()

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete staged files that no commit names, not even a rewound one (time travel needs those)."""
        pieces = [piece for piece in pieces_of(staged) if (self.path / piece["path"]).exists()]
        if not pieces:
            return
        import pyarrow as pa

        oldest_ms = min(int(piece["modified_ms"]) for piece in pieces)
        table = self._view.refresh()
        named = self._view.log.named_since(table.version(), oldest_ms - _CLOCK_MARGIN_MS)
        named.update(map(unquote, pa.table(table.get_add_actions())["path"].to_pylist()))
        for piece in pieces:
            if piece["path"] not in named:
                (self.path / piece["path"]).unlink(missing_ok=True)

    def published(self) -> Epoch | None:
        return self._view.published_in(self._view.refresh()) or None

    def highest(self) -> Epoch:
        return self._view.ledger(self._view.refresh()).highest

    def rewind(self, epoch: Epoch) -> None:
        """Restore the version in which ``epoch`` was newest: rows and published epoch, in one transaction."""
        rewind_table(self._view, epoch, replaces=self.mode != "append")

    def oldest_rewind(self) -> Epoch:
        return oldest_rewind(self._view)

    def read(self, request: ReadRequest) -> ReadResult:
        """The table, including other writers' rows, or the rows that later epochs of this sink have added."""
        return read_table(self.path, self._view.log, request, appends=self.mode == "append")

    def standing(self, request: ReadRequest) -> Standing:
        return table_standing(self.path, self._view.log, request)

    def record_reach(self, epoch: Epoch, *, is_per_operator: bool, at_start: bool = False) -> None:
        """In a file beside the table's data: an epoch without rows makes no version."""
        context = self._opened.context
        found = self.standing(ReadRequest(flow=context.flow, sink=context.sink))
        reach = own_reach(found, self._opened.claim, epoch, is_per_operator=is_per_operator, at_start=at_start)
        if reach is not None:
            store_reach(file_in(self.path, context.flow, context.sink), reach)

    # ------------------------------------------------------------------ the table

    def _claims(self) -> ClaimFiles:
        context = self._opened.context
        return ClaimFiles.of(self.path, context.flow, context.sink)

    def _publication(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> Publication:
        layout = Layout(mode=self.mode, key=self.key, partition_by=self.partition_by)
        return Publication(self._view, layout, permit, staged, self._check_fit)

    def _create(self) -> None:
        from deltalake import DeltaTable

        foreign = [name for name in os.listdir(self.path) if name != "_delta_log" and not is_temporary(name)]
        if foreign:
            raise SinkError(
                f"the folder is not empty ({sorted(foreign)[0]} …) and is not a Delta table",
                next_step="give the sink a new folder or an existing Delta table",
                path=self.path,
            )
        # "ignore": another flow may create the shared table at the same time; the result is checked afterwards.
        DeltaTable.create(str(self.path), self._schema, mode="ignore", partition_by=list(self.partition_by))
        # The name of the log's folder is synced with the first staged files, before anything names them.
        self._view.log.make_durable(-1, 0)

    def _check_fit(self, table: DeltaTable) -> None:
        problems = fit_problems(table, self._rows, self._schema, self.partition_by, replaces=self.mode != "append")
        if problems:
            context = self._opened.context
            raise SinkError(
                f"the table does not take these rows: {'; '.join(problems)}",
                next_step="change the rows or the table (ALTER TABLE … ADD COLUMNS), or give the sink another path",
                flow=context.flow,
                sink=context.sink,
                path=self.path,
            )


def _check_mode(mode: str, key: tuple[str, ...], partition_by: tuple[str, ...]) -> None:
    problem = None
    if mode not in get_args(Mode):
        problem = f"the Delta sink has no mode {mode!r}", f"use one of: {', '.join(get_args(Mode))}"
    elif (mode == "upsert") != bool(key):
        problem = "mode='upsert' and key=[…] go together", "name the columns that identify a row"
    elif mode == "overwrite_partitions" and not partition_by:
        problem = "mode='overwrite_partitions' needs partitions", "give partition_by=[…]"
    if problem is not None:
        raise ConfigError(problem[0], next_step=problem[1])
