"""Publishes an epoch to a Delta table, on top of exactly the version in which it was judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cutline.base.crashpoints import crashpoint
from cutline.base.retry import Retry
from cutline.connectors.delta.commits import append_files, replace_files
from cutline.connectors.delta.maintenance import write_log_checkpoint
from cutline.connectors.delta.replace import discard_written, files_of, replacement_of, upsert_of
from cutline.connectors.replaced_rows import overwritten_partitions, rewriting
from cutline.connectors.rows import storable_schema
from cutline.connectors.staged_files import check_still_there, digest_of, pieces_of
from cutline.errors import NotDone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltalake import DeltaTable

    from cutline.connectors.delta.log import Mark
    from cutline.connectors.delta.table import SinkTable
    from cutline.model.staging import Piece, StagedBatch
    from cutline.protocol.publish.commit import CommitPermit

#: Attempts of one transaction. deltalake resolves harmless conflicts within each; another attempt rereads the table.
ATTEMPTS = Retry(limit=5)
VACUUM_HINT = (
    "restore the flow to an older checkpoint; never run a full VACUUM with a retention shorter than "
    "the longest time the flow may be stopped"
)

Mode = Literal["append", "upsert", "overwrite_partitions"]
#: The operation's name in the table's history.
_OPERATIONS: dict[Mode, str] = {"append": "WRITE", "upsert": "MERGE", "overwrite_partitions": "WRITE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows go into the table."""

    mode: Mode
    key: tuple[str, ...]
    partition_by: tuple[str, ...]


class Publication:
    """The publication of one epoch."""

    def __init__(
        self,
        table: SinkTable,
        layout: Layout,
        permit: CommitPermit,
        staged: Sequence[StagedBatch],
        check_fit: Callable[[DeltaTable], None],
    ) -> None:
        """``check_fit`` raises SinkError if the table no longer takes such rows."""
        self._table = table
        self._layout = layout
        self._permit = permit
        self._staged = staged
        self._check_fit = check_fit
        self._pieces: list[Piece] = pieces_of(staged)
        self._digest = digest_of(self._pieces)

    def run(self) -> None:
        """Publish the epoch unless it is published; an epoch without rows makes no version."""
        if not self._pieces or not self.is_due():
            return
        self._table.opened.reach("sink-commit-begun")
        check_still_there(self._table.path, self._pieces, hint=VACUUM_HINT)
        seen = self._table.current.version()
        self._publish()
        self._table.opened.reach("sink-commit-done")
        if write_log_checkpoint(self._table.refresh(), self._table.log, seen):
            # Reading the table again from a checkpoint is faster than updating it.
            self._table.invalidate()

    def is_due(self, *, after: Exception | None = None) -> bool:
        """Judge the newest version. False: it contains the epoch, durably."""
        table = self._table.refresh(after=after)
        publication = self._table.publication_of(table, self._permit.epoch)
        ledger = self._table.ledger(table, publication)
        if self._table.opened.is_to_publish(ledger, self._permit, self._digest):
            return True
        if publication is not None:
            # The process that published it may have died before it was durable.
            self._table.log.make_durable(publication.version - 1, table.version())
        return False

    def _publish(self) -> None:
        failure: Exception | None = None
        for _ in ATTEMPTS.attempts():
            failure = self.attempt()
            # A failed attempt may have taken effect: only the table itself knows.
            if not self.is_due(after=failure):
                return
            # The conflict may have been a change of the table's schema.
            self._check_fit(self._table.current)
        raise NotDone(
            f"the table did not take the epoch in {ATTEMPTS.limit} attempts: {failure}",
            next_step="check whether another writer blocks the table; the commit can be repeated as it is",
            flow=self._permit.flow,
            sink=self._permit.sink,
            epoch=self._permit.epoch,
            path=self._table.path,
        ) from failure

    def attempt(self) -> Exception | None:
        """One attempt on top of the version in which the epoch was judged.

        A concurrent change of what was judged conflicts with it. After a failure only the table tells what happened.
        """
        from deltalake.exceptions import DeltaError

        table = self._table.current
        mark = self._table.mark(table, self._permit.epoch, self._digest)
        if self._layout.mode != "append":
            return self._replace(table, mark)
        crashpoint("sink-commit-half", self._permit.sink)
        try:
            append_files(table, self._pieces, self._layout.partition_by, mark, self._table.own_claim())
        except (DeltaError, OSError) as error:
            return error
        return None

    def _replace(self, table: DeltaTable, mark: Mark) -> Exception | None:
        """Compute from the current version which files to remove and add, and make exactly the next version."""
        import pyarrow as pa

        layout = self._layout
        files = files_of(table, layout.partition_by)
        # Rewritten files keep all columns of the table, including those that the flow's rows lack.
        whole = storable_schema(pa.schema(table.schema().to_arrow()))
        if layout.mode == "upsert":
            upsert = upsert_of(self._table.path, layout.key, whole, layout.partition_by, rewriting(self._permit))
            change = replacement_of(upsert.replacement(files, self._pieces))
        else:
            change = replacement_of(overwritten_partitions(files, self._staged))
        crashpoint("sink-commit-half", self._permit.sink)
        try:
            operation = _OPERATIONS[layout.mode]
            if replace_files(self._table.log, table.version() + 1, change, mark, operation=operation):
                return None
        except OSError as error:
            return error  # the version may exist and name the files that were written
        discard_written(self._table.path, change)
        return NotDone("another writer made that version", path=self._table.path)
