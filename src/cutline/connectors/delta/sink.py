"""A Delta table: executors write its Parquet files, each epoch becomes visible with one Delta transaction.

Files that no transaction names are invisible to every reader. The transaction carries the epoch as its application
version, so the table itself knows what was published, and two writers of one epoch cannot both succeed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import unquote

from cutline.base.crashpoints import crashpoint
from cutline.base.durable import fsync_dir, is_temporary, make_dir
from cutline.connectors.delta.commits import append_files, no_hooks, properties, replace_files, store_versions
from cutline.connectors.delta.fit import check_removable, feature_problems, property_problems, schema_problems
from cutline.connectors.delta.log import DeltaLog, Mark, app_id, claim_id, rewound_id
from cutline.connectors.delta.maintenance import condense
from cutline.connectors.delta.reader import read_table
from cutline.connectors.delta.replace import Upsert, check_whole, files_of, overwritten_partitions
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import check_partition_columns, key_problems, rows_schema, storable_schema
from cutline.connectors.staged_files import (
    check_claim,
    check_commit,
    check_still_there,
    digest_of,
    local_path,
    pieces_of,
)
from cutline.errors import ConfigError, FencedError, InvariantViolation, NotDone, OutcomeUnknown, SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports import StageAttempt

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from cutline.ports import Piece, Published, SinkContext, StagedBatch, Stager, Wish
    from cutline.protocol.publish.commit import CommitPermit

#: Tries of one transaction. deltalake itself settles harmless conflicts within each; more tries need a fresh view.
MOST_TRIES = 5
#: A staged file is older than the commit that names it, but clocks of hosts differ.
_CLOCK_MARGIN_MS = 24 * 3_600_000
_VACUUM_HINT = (
    "restore the flow to an older checkpoint; never run a full VACUUM with a retention shorter than "
    "the longest time the flow may stand still"
)

Mode = Literal["append", "upsert", "overwrite_partitions"]
#: What the table's history calls it.
_OPERATIONS: dict[Mode, str] = {"append": "WRITE", "upsert": "MERGE", "overwrite_partitions": "WRITE"}


class Delta:
    """Exactly-once rows in a Delta table, which other writers and flows may share.

    ``append``: every row is a new row, also the updated ones of output mode ``update``. ``upsert``: a row replaces the
    one with the same ``key``. ``overwrite_partitions``: a batch replaces the partitions that its rows are in.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = True

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
        self._delta_log = DeltaLog(self.path / "_delta_log")
        self._context: SinkContext | None = None
        #: Of the rows as they come, and of the files they go into; both set by open.
        self._rows: pa.Schema = None
        self._schema: pa.Schema = None
        self._table: DeltaTable | None = None
        self._own_claim = 0

    def __repr__(self) -> str:
        return f"Delta({str(self.path)!r}, partition_by={self.partition_by!r}, mode={self.mode!r}, key={self.key!r})"

    def open(self, context: SinkContext) -> None:
        """Create the table, or check that such rows may be added to the one that is there."""
        from deltalake import DeltaTable

        self._rows = rows_schema(context)
        self._schema = storable_schema(self._rows)
        check_partition_columns(self._schema, self.partition_by)
        if wrong := key_problems(self._schema, self.key):
            raise SinkError("; ".join(wrong), next_step="name other columns as key=[…]", path=self.path)
        self._context, self._table = context, None
        if not DeltaTable.is_deltatable(str(self.path)):
            self._create()
        table = self._refresh()
        self._check_fit(table)
        # Whoever made the newest commits may have died before they were durable, and what is published counts now.
        if self._epoch_in(table):
            self._sync_log(table)

    def claim(self) -> None:
        """A commit of its own, that those of others who are on their way conflict with."""
        from deltalake.exceptions import DeltaError

        failure: Exception | None = None
        for _ in range(MOST_TRIES):
            table = self._refresh(after=failure)
            number = self._claim_in(table) + 1
            try:
                store_versions(table, self.partition_by, {self._claim_app: number})
            except (DeltaError, OSError) as error:
                failure = error
            else:
                self._own_claim = number
                # From the version on which it was made: deltalake does not say which one it got.
                self._delta_log.make_durable(table.version(), self._read_anew().version())
                return
        raise NotDone(
            f"the table did not take the claim in {MOST_TRIES} tries: {failure}",
            next_step="see whether another writer blocks the table; start again",
            path=self.path,
        ) from failure

    def stager(self) -> Stager:
        context = self._opened()
        return ParquetStager(
            root=str(self.path),
            folder="",
            sink=context.sink,
            schema_ipc=self._schema.serialize().to_pybytes(),
            partition_by=self.partition_by,
            key=self.key,
            in_calendar=self.key,
            has_stats=True,
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Staged files are durable and named by their batch: make sure before the epoch relies on them."""
        check_still_there(self.path, pieces_of(staged), hint=_VACUUM_HINT)
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Add the batches' files in one transaction; an epoch without rows makes none."""
        context = self._opened()
        check_commit(context, permit, staged)
        pieces = pieces_of(staged)
        if not pieces or self._is_published(permit, pieces):
            return
        crashpoint("sink-commit-begun", context.sink)
        check_still_there(self.path, pieces, hint=_VACUUM_HINT)
        seen = self._current().version()
        failure: Exception | None = None
        for _ in range(MOST_TRIES):
            failure = self._try_publish(permit, staged)
            # A failed try may have taken effect: only the table itself knows.
            if self._is_published(permit, pieces, after=failure):
                break
            # What stood in the way may have been a change of the table's schema.
            self._check_fit(self._current())
        else:
            raise NotDone(
                f"the table did not take the epoch in {MOST_TRIES} tries: {failure}",
                next_step="see whether another writer blocks the table; the commit can be repeated as it is",
                flow=permit.flow,
                epoch=permit.epoch,
                path=self.path,
            ) from failure
        crashpoint("sink-commit-done", context.sink)
        if condense(self._refresh(), self._delta_log, seen):
            # From a checkpoint a table is read anew faster than it is brought up to date.
            self._table = None

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete staged files that no commit names, not even one that was taken back (time travel needs those)."""
        pieces = [piece for piece in pieces_of(staged) if (self.path / piece["path"]).exists()]
        if not pieces:
            return
        import pyarrow as pa

        oldest_ms = min(int(piece["modified_ms"]) for piece in pieces)
        table = self._refresh()
        named = self._delta_log.named_since(table.version(), oldest_ms - _CLOCK_MARGIN_MS)
        named.update(map(unquote, pa.table(table.get_add_actions())["path"].to_pylist()))
        for piece in pieces:
            if piece["path"] not in named:
                (self.path / piece["path"]).unlink(missing_ok=True)

    def published(self) -> Epoch | None:
        return self._epoch_in(self._refresh()) or None

    def highest(self) -> Epoch:
        """Highest epoch this table has ever seen from this sink, taken back or not: new ones must be above it."""
        table = self._refresh()
        return max(self._epoch_in(table), self._rewound_in(table))

    def rewind(self, epoch: Epoch) -> None:
        """Restore the version in which ``epoch`` was newest; rows and published epoch go back in one transaction."""
        failure: Exception | None = None
        for _ in range(MOST_TRIES):
            table = self._refresh(after=failure)
            if self._epoch_in(table) <= epoch:
                break
            failure = self._try_rewind(table, epoch)
        table = self._refresh(after=failure)
        if self._epoch_in(table) > epoch:
            raise NotDone(
                f"the table could not be rewound in {MOST_TRIES} tries: {failure}",
                next_step="see whether another writer blocks the table; the rewind can be repeated as it is",
                epoch=epoch,
                path=self.path,
            ) from failure
        self._sync_log(table)

    def oldest_rewind(self) -> Epoch:
        """Behind a change that somebody else has made, and behind what the log still has, there is no way."""
        table = self._refresh()
        return self._delta_log.oldest_rewind(table.version(), self._app, self._epoch_in(table))

    def read(self, wish: Wish) -> Published:
        """The table, with other writers' rows, or the rows that later epochs of this sink have added."""
        return read_table(self.path, self._delta_log, wish, appends=self.mode == "append")

    # ------------------------------------------------------------------ the table

    @property
    def _app(self) -> str:
        context = self._opened()
        return app_id(context.flow, context.sink)

    @property
    def _claim_app(self) -> str:
        context = self._opened()
        return claim_id(context.flow, context.sink)

    def _claim_in(self, table: DeltaTable) -> int:
        return table.transaction_version(self._claim_app) or 0

    def _check_claim(self, table: DeltaTable, epoch: Epoch) -> None:
        check_claim(str(self._claim_in(table) or ""), str(self._own_claim or ""), self._opened(), epoch)

    def _claimed(self) -> dict[str, int]:
        return {self._claim_app: self._own_claim} if self._own_claim else {}

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise InvariantViolation("the sink is used before it was opened", path=self.path)
        return self._context

    def _create(self) -> None:
        from deltalake import DeltaTable

        make_dir(self.path)
        strangers = [name for name in os.listdir(self.path) if name != "_delta_log" and not is_temporary(name)]
        if strangers:
            raise SinkError(
                f"the folder is not empty ({sorted(strangers)[0]} …) and is not a Delta table",
                next_step="give the sink a new folder or an existing Delta table",
                path=self.path,
            )
        # "ignore": another flow may create the shared table at the same moment; what is there is checked after.
        DeltaTable.create(str(self.path), self._schema, mode="ignore", partition_by=list(self.partition_by))
        self._delta_log.make_durable(-1, 0)
        fsync_dir(self.path)

    def _check_fit(self, table: DeltaTable) -> None:
        import pyarrow as pa
        from deltalake import Schema

        context = self._opened()
        # The files' schema allows nulls everywhere; whether nulls can come is what the rows' own schema says.
        strict = pa.schema([field.with_nullable(self._rows.field(field.name).nullable) for field in self._schema])
        problems = property_problems(table.metadata().configuration, replaces=self.mode != "append")
        if self.mode != "append":
            protocol = table.protocol()
            problems += feature_problems(protocol.min_writer_version, protocol.writer_features)
        problems += schema_problems(Schema.from_arrow(strict).to_json(), table.schema().to_json())
        if (found := tuple(table.metadata().partition_columns)) != self.partition_by:
            problems.append(f"it is partitioned by {found or 'nothing'}, the sink by {self.partition_by or 'nothing'}")
        if problems:
            raise SinkError(
                f"the table does not take these rows: {'; '.join(problems)}",
                next_step="change the rows or the table (ALTER TABLE … ADD COLUMNS), or give the sink another path",
                flow=context.flow,
                sink=context.sink,
                path=self.path,
            )

    def _refresh(self, after: Exception | None = None) -> DeltaTable:
        """The table as it is now. ``after`` is a failure whose effect this look is meant to find out."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        self._opened()
        try:
            if self._table is None:
                self._table = DeltaTable(str(self.path))
            else:
                self._table.update_incremental()
        except (DeltaError, OSError) as error:
            self._table = None
            kind = OutcomeUnknown if after is not None else NotDone
            raise kind(f"the table cannot be read: {error}", path=self.path) from (after or error)
        return self._table

    def _read_anew(self) -> DeltaTable:
        """Not brought up to date in place, so that a version held before stays what it was."""
        self._table = None
        return self._refresh()

    def _current(self) -> DeltaTable:
        """The table as last seen."""
        if self._table is None:
            raise InvariantViolation("the table is used before it was read", path=self.path)
        return self._table

    def _epoch_in(self, table: DeltaTable) -> Epoch:
        return Epoch(table.transaction_version(self._app) or NO_EPOCH)

    def _rewound_in(self, table: DeltaTable) -> Epoch:
        """Highest epoch that a rewind took away. It and all below are never published again."""
        context = self._opened()
        return Epoch(table.transaction_version(rewound_id(context.flow, context.sink)) or NO_EPOCH)

    def _sync_log(self, table: DeltaTable) -> None:
        """Make this sink's newest commit, and all after it, durable."""
        if (newest := self._delta_log.newest_of(table.version(), self._app)) is not None:
            self._delta_log.make_durable(newest - 1, table.version())

    # ------------------------------------------------------------------ publishing

    def _is_published(self, permit: CommitPermit, pieces: list[Piece], *, after: Exception | None = None) -> bool:
        """Whether the epoch is there already, and is this one; raises if it must not be published at all."""
        table = self._refresh(after=after)
        newest = self._epoch_in(table)
        if permit.epoch > newest:
            if permit.epoch <= self._rewound_in(table):
                raise FencedError(
                    "the epoch was taken back by a rewind; this commit comes from the abandoned history",
                    flow=permit.flow,
                    epoch=permit.epoch,
                    path=self.path,
                )
            return False
        commit = self._delta_log.find_publish(table.version(), self._app, permit.epoch)
        if commit is not None and commit.mark is not None and commit.mark.digest == digest_of(pieces):
            # The one who published it may have died before it was durable.
            self._delta_log.make_durable(commit.version - 1, table.version())
            return True
        if commit is None and permit.epoch == newest:
            return True  # so old that its commit was cleaned away; the transaction version vouches for it
        raise SinkError(
            f"the table is at epoch {newest} of another history of this flow",
            next_step="was the flow's storage deleted? Give the flow or the sink another name, or use another table",
            flow=permit.flow,
            sink=permit.sink,
            epoch=permit.epoch,
            path=self.path,
        )

    def _try_publish(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> Exception | None:
        """One try on top of the very version in which the epoch was not published and not fenced.

        Whoever changes either in between conflicts with it. After a failure only a fresh look tells what happened.
        """
        from deltalake.exceptions import DeltaError

        table, pieces = self._current(), pieces_of(staged)
        self._check_claim(table, permit.epoch)
        mark = Mark(
            app=self._app,
            kind="publish",
            before=self._epoch_in(table),
            after=permit.epoch,
            digest=digest_of(pieces),
        )
        if self.mode != "append":
            return self._try_replace(permit, staged, mark)
        crashpoint("sink-commit-half", permit.sink)
        try:
            append_files(table, pieces, self.partition_by, mark, self._claimed())
        except (DeltaError, OSError) as error:
            return error
        return None

    def _try_replace(self, permit: CommitPermit, staged: Sequence[StagedBatch], mark: Mark) -> Exception | None:
        """Compute from the version that is current what leaves and what comes, and make exactly the next version."""
        import pyarrow as pa

        table = self._current()
        files = files_of(table, self.partition_by)
        # Files that are written anew keep all columns of the table, also those that the flow's rows lack.
        whole = storable_schema(pa.schema(table.schema().to_arrow()))
        upsert = Upsert(self.path, self.key, whole, self.partition_by, _rewriting(permit))
        if self.mode == "upsert":
            change = upsert.replacement(files, pieces_of(staged))
        else:
            change = overwritten_partitions(files, staged)
        crashpoint("sink-commit-half", permit.sink)
        try:
            if replace_files(self._delta_log, table.version() + 1, change, mark, operation=_OPERATIONS[self.mode]):
                return None
        except OSError as error:
            return error  # the version may exist and name what was written
        upsert.discard(change)
        return NotDone("another writer made that version", path=self.path)

    def _try_rewind(self, table: DeltaTable, epoch: Epoch) -> Exception | None:
        from deltalake.exceptions import DeltaError

        check_removable(table.metadata().configuration, self.path)
        self._check_claim(table, epoch)
        published = self._epoch_in(table)
        version, after = self._delta_log.rewind_target(table.version(), self._app, published, epoch)
        if self.mode != "append":
            check_whole(self.path, version)
        mark = Mark(app=self._app, kind="rewind", before=published, after=after)
        rewound, context = max(self._rewound_in(table), published), self._opened()
        crashpoint("sink-rewind-half", context.sink)
        try:
            # Fails if anybody commits in between, so a foreign change is never restored away unseen.
            table.restore(
                version,
                commit_properties=properties(
                    mark, {rewound_id(context.flow, context.sink): rewound, **self._claimed()}
                ),
                post_commithook_properties=no_hooks(),
            )
        except (DeltaError, OSError) as error:
            return error
        return None


def _check_mode(mode: str, key: tuple[str, ...], partition_by: tuple[str, ...]) -> None:
    problem = None
    if mode not in get_args(Mode):
        problem = f"the Delta sink has no mode {mode!r}", f"use one of: {', '.join(get_args(Mode))}"
    elif (mode == "upsert") != bool(key):
        problem = "mode='upsert' and key=[…] go together", "name the columns that tell rows apart"
    elif mode == "overwrite_partitions" and not partition_by:
        problem = "mode='overwrite_partitions' needs partitions", "give partition_by=[…]"
    if problem is not None:
        raise ConfigError(problem[0], next_step=problem[1])


def _rewriting(permit: CommitPermit) -> StageAttempt:
    """Names the files that a commit writes anew."""
    return StageAttempt(
        flow=permit.flow,
        operator=permit.operator,
        generation=permit.generation,
        batch=permit.through_batch,
        partition=0,
        attempt=f"e{permit.epoch}",
    )
