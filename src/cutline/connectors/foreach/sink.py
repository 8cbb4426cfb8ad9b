"""A function of the user's own, called in the driver with the rows of each epoch: at least once, usually exactly once.

Nobody but the function knows whether it has taken effect, so a crash after it and before the ledger repeats the call.
The idempotency key is the same in every repeat: a receiver that remembers keys makes it exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.base import records
from cutline.base.crashpoints import crashpoint
from cutline.base.durable import create, make_dir, replace
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import differences, rows_schema, storable_schema
from cutline.connectors.staged_files import (
    STAGED_FOLDER,
    check_commit,
    check_still_there,
    delete_staged,
    digest_of,
    local_path,
    pieces_of,
    sweep_staged,
)
from cutline.errors import InvariantViolation, SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.ports import Piece, SinkContext, StagedBatch, Stager
    from cutline.protocol.publish.commit import CommitPermit

#: Epochs of which the ledger remembers what they held. A repeat is one of the newest.
EPOCHS_REMEMBERED = 100
_LEDGER_KIND = "foreach-sink-ledger"
_HINT = "restore the flow to an older checkpoint; who deletes in the staging folder?"

#: Called with the rows, the number of the epoch and the idempotency key.
Function = Callable[["Iterator[pa.RecordBatch]", int, str], object]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch with which the function was called, and what it held."""

    epoch: Epoch
    digest: str


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Whose staging folder this is, and what the function has done."""

    flow: FlowName
    sink: SinkId
    #: Serialized Arrow schema of the rows.
    schema_ipc: bytes
    #: The last epochs, oldest first.
    done: tuple[Done, ...] = ()

    @property
    def newest(self) -> Epoch:
        return self.done[-1].epoch if self.done else NO_EPOCH


class Foreach:
    """At least once: ``function(rows, epoch, idempotency_key)``, in the driver, epoch after epoch, in order.

    The rows come as Arrow batches and are read while the function asks for them. An epoch without rows makes no call.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = False

    def __init__(self, function: Function, *, staging: str | os.PathLike[str]) -> None:
        """``staging``: a folder of this sink's own, which the driver and all executors share."""
        self.function = function
        self.staging = local_path(staging, sink="Foreach")
        self._staged = self.staging / "staged"
        self._ledger_path = self.staging / "ledger.json"
        self._context: SinkContext | None = None
        self._schema_ipc = b""

    def __repr__(self) -> str:
        return f"Foreach({getattr(self.function, '__name__', self.function)!r}, staging={str(self.staging)!r})"

    def open(self, context: SinkContext) -> None:
        """Claim the staging folder, or check that it is this sink's and that the rows are as they were."""
        schema = storable_schema(rows_schema(context))
        wanted = Ledger(flow=context.flow, sink=context.sink, schema_ipc=schema.serialize().to_pybytes())
        make_dir(self._staged)
        if not self._ledger_path.exists():
            create(self._ledger_path, records.encode(_LEDGER_KIND, wanted))
        self._check(self._load_ledger(), wanted, schema)
        self._context, self._schema_ipc = context, wanted.schema_ipc

    def stager(self) -> Stager:
        return ParquetStager(
            root=str(self._staged), folder=STAGED_FOLDER, sink=self._opened().sink, schema_ipc=self._schema_ipc
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Staged files are durable and named by their batch: make sure before the epoch relies on them."""
        check_still_there(self._staged, pieces_of(staged), hint=_HINT)
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Call the function, then write down that it is done."""
        context = self._opened()
        check_commit(context, permit, staged)
        pieces = pieces_of(staged)
        ledger = self._load_ledger()
        if pieces and not _is_done(ledger, permit, digest_of(pieces)):
            crashpoint("sink-commit-begun", context.sink)
            check_still_there(self._staged, pieces, hint=_HINT)
            self.function(self._rows(pieces), permit.epoch, idempotency_key(permit))
            crashpoint("sink-commit-half", context.sink)
            done = (*ledger.done, Done(epoch=permit.epoch, digest=digest_of(pieces)))
            self._store_ledger(msgspec.structs.replace(ledger, done=done[-EPOCHS_REMEMBERED:]))
            crashpoint("sink-commit-done", context.sink)
        sweep_staged(self._staged, staged, permit.through_batch)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named staged files."""
        self._opened()
        delete_staged(self._staged, pieces_of(staged))

    def published(self) -> Epoch | None:
        self._opened()
        return self._load_ledger().newest or None

    def highest(self) -> Epoch:
        return self.published() or NO_EPOCH

    def rewind(self, epoch: Epoch) -> None:
        if self.highest() > epoch:
            raise SinkError(
                "what a function has done cannot be taken back",
                next_step='give the sink on_rollback="keep"; the rows come again under new keys',
                epoch=epoch,
            )

    # ------------------------------------------------------------------ the staging folder

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise InvariantViolation("the sink is used before it was opened", path=self.staging)
        return self._context

    def _check(self, found: Ledger, wanted: Ledger, schema: pa.Schema) -> None:
        import pyarrow as pa

        if (found.flow, found.sink) != (wanted.flow, wanted.sink):
            problems = [f"it belongs to sink {found.sink} of flow {found.flow}"]
        else:
            problems = differences(schema, pa.ipc.read_schema(pa.BufferReader(found.schema_ipc)))
        if problems:
            raise SinkError(
                f"the staging folder is not for these rows: {'; '.join(problems)}",
                next_step="give the sink another staging folder, after everything in this one is published",
                flow=wanted.flow,
                sink=wanted.sink,
                path=self.staging,
            )

    def _load_ledger(self) -> Ledger:
        return records.load(_LEDGER_KIND, self._ledger_path, Ledger)

    def _store_ledger(self, ledger: Ledger) -> None:
        replace(self._ledger_path, records.encode(_LEDGER_KIND, ledger))

    def _rows(self, pieces: Iterable[Piece]) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        for piece in pieces:
            with pq.ParquetFile(self._staged / piece["path"]) as file:
                yield from file.iter_batches()


def idempotency_key(permit: CommitPermit) -> str:
    """Names an epoch's rows: the same in every repeat, another for every other epoch of every history."""
    return f"{permit.flow}/{permit.sink}/{permit.generation}/{permit.epoch}"


def _is_done(ledger: Ledger, permit: CommitPermit, digest: str) -> bool:
    if Done(epoch=permit.epoch, digest=digest) in ledger.done:
        return True
    if permit.epoch <= ledger.newest:
        raise SinkError(
            f"the ledger is at epoch {ledger.newest} of another history of this flow",
            next_step="was the flow's storage deleted? Give the sink another staging folder",
            flow=permit.flow,
            sink=permit.sink,
            epoch=permit.epoch,
        )
    return False
