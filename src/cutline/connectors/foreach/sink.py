"""A user's function, called in the driver with the rows of each epoch: at least once, usually exactly once.

Only the function knows whether it has taken effect, so a crash between the call and the ledger's update repeats the
call. The idempotency key is the same in every repeat: a receiver that remembers keys makes it exactly once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.base import records
from cutline.base.durable import create, exclusive, make_dir, replace
from cutline.config.arguments import checked
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import differences, recorded_schema, rows_schema, storable_schema
from cutline.connectors.sink_base import OpenedSink
from cutline.connectors.staged_files import (
    STAGED_FOLDER,
    check_still_there,
    collect_staged,
    delete_staged,
    digest_of,
    local_path,
    pieces_of,
)
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.protocol.publish.sink_ledger import EPOCHS_REMEMBERED, SinkLedger

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.model.staging import Piece, StagedBatch
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit

_LEDGER_KIND = "foreach-sink-ledger"
_HINT = "find out what deletes files in the staging folder, then restore the flow to an older checkpoint"

#: Called with the rows, the number of the epoch and the idempotency key.
Function = Callable[["Iterator[pa.RecordBatch]", int, str], object]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch with which the function was called, and the digest of its rows."""

    epoch: Epoch
    digest: str


class FunctionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of the staging folder, and the epochs that the function has processed."""

    flow: FlowName
    sink: SinkId
    #: Serialized Arrow schema of the rows.
    schema_ipc: bytes
    #: The last epochs, oldest first.
    done: tuple[Done, ...] = ()
    #: The instance that may call the function; empty: unclaimed.
    claim: str = ""

    def ledger(self) -> SinkLedger:
        digests = {one.epoch: one.digest for one in self.done}
        newest = max(digests, default=NO_EPOCH)
        return SinkLedger(flow=self.flow, sink=self.sink, published=newest, digests=digests, claim=self.claim)


class Foreach:
    """At least once: ``function(rows, epoch, idempotency_key)``, in the driver, epoch after epoch, in order.

    The rows are Arrow batches, read while the function iterates over them. An epoch without rows makes no call.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = False

    @checked("sinks.Foreach")
    def __init__(self, function: Function, *, staging: str | os.PathLike[str]) -> None:
        """``staging``: a folder for this sink only, which the driver and all executors share."""
        self.function = function
        self.staging = local_path(staging, sink="Foreach")
        self._staged = self.staging / "staged"
        self._ledger_path = self.staging / "ledger.json"
        self._opened = OpenedSink("the staging folder", path=self.staging)
        self._schema_ipc = b""

    def __repr__(self) -> str:
        return f"Foreach({getattr(self.function, '__name__', self.function)!r}, staging={str(self.staging)!r})"

    def open(self, context: SinkContext) -> None:
        """Take the staging folder, or check that it belongs to this sink and that the schema has not changed."""
        schema = storable_schema(rows_schema(context))
        wanted = FunctionRecord(flow=context.flow, sink=context.sink, schema_ipc=schema.serialize().to_pybytes())
        make_dir(self._staged)
        if not self._ledger_path.exists():
            create(self._ledger_path, records.encode(_LEDGER_KIND, wanted))
        self._check(self._load_record(), wanted, schema)
        self._opened.enter(context)
        self._schema_ipc = wanted.schema_ipc

    def claimed(self) -> str:
        self._opened.require()
        return self._load_record().claim

    def claim(self, history: str, *, expected: str) -> None:
        """A process that was thought dead calls the function no more, except for a call that it has begun."""
        self._opened.require()
        claim = f"{secrets.token_hex(8)} {history}"
        with self._locked():
            record = self._load_record()
            self._opened.check_expected(record.claim, expected)
            self._store_record(msgspec.structs.replace(record, claim=claim))
        self._opened.claim = claim

    def stager(self) -> Stager:
        return ParquetStager(
            root=str(self._staged), folder=STAGED_FOLDER, sink=self._opened.context.sink, schema_ipc=self._schema_ipc
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Check that the staged files exist before the epoch relies on them; they are durable already."""
        check_still_there(self._staged, pieces_of(staged), hint=_HINT)
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Call the function, then record that it is done."""
        self._opened.check_covered(permit, staged)
        pieces = pieces_of(staged)
        record, digest = self._load_record(), digest_of(pieces)
        if pieces and self._opened.is_to_publish(record.ledger(), permit, digest):
            self._opened.reach("sink-commit-begun")
            check_still_there(self._staged, pieces, hint=_HINT)
            self.function(self._rows(pieces), permit.epoch, idempotency_key(permit))
            self._opened.reach("sink-commit-half")
            with self._locked():
                # As it is now: a start may have claimed the sink while the function ran.
                record = self._load_record()
                done = (*record.done, Done(epoch=permit.epoch, digest=digest))
                self._store_record(msgspec.structs.replace(record, done=done[-EPOCHS_REMEMBERED:]))
            self._opened.reach("sink-commit-done")
        collect_staged(self._staged, staged, permit.through_batch)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named staged files."""
        self._opened.require()
        delete_staged(self._staged, pieces_of(staged))

    def published(self) -> Epoch | None:
        self._opened.require()
        return self._load_record().ledger().published or None

    def highest(self) -> Epoch:
        return self.published() or NO_EPOCH

    def rewind(self, epoch: Epoch) -> None:
        if self.highest() > epoch:
            raise SinkError(
                "the effects of a function cannot be rewound",
                next_step='give the sink on_rollback="keep"; the rows are passed again under new keys',
                epoch=epoch,
            )

    # ------------------------------------------------------------------ the staging folder

    def _check(self, found: FunctionRecord, wanted: FunctionRecord, schema: pa.Schema) -> None:
        if (found.flow, found.sink) != (wanted.flow, wanted.sink):
            problems = [f"it belongs to sink {found.sink} of flow {found.flow}"]
        else:
            problems = differences(schema, recorded_schema(found.schema_ipc, path=self._ledger_path))
        if problems:
            raise SinkError(
                f"the staging folder is not for these rows: {'; '.join(problems)}",
                next_step="give the sink another staging folder, after everything in this one is published",
                flow=wanted.flow,
                sink=wanted.sink,
                path=self.staging,
            )

    def _locked(self) -> AbstractContextManager[None]:
        return exclusive(self.staging / "lock")

    def _load_record(self) -> FunctionRecord:
        return records.load(_LEDGER_KIND, self._ledger_path, FunctionRecord)

    def _store_record(self, record: FunctionRecord) -> None:
        replace(self._ledger_path, records.encode(_LEDGER_KIND, record))

    def _rows(self, pieces: Iterable[Piece]) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        for piece in pieces:
            with pq.ParquetFile(self._staged / piece["path"]) as file:
                yield from file.iter_batches()


def idempotency_key(permit: CommitPermit) -> str:
    """Identifies an epoch's rows: the same in every repeat, different for every other epoch of every history."""
    return f"{permit.flow}/{permit.sink}/{permit.generation}/{permit.epoch}"
