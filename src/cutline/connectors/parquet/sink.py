"""A folder of Parquet files, one sub-folder per epoch, published by one atomic rename.

``<path>/cutline_epoch=7/…`` exists whole or not at all, so any reader that lists the folder sees whole epochs.
Everything unpublished lives below ``<path>/_cutline``; Spark and pyarrow pass over names with an underscore.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.base import records
from cutline.base.crashpoints import crashpoint
from cutline.base.durable import create, fsync_dir, fsync_file, is_temporary, make_dir, replace
from cutline.connectors.parquet.reader import read_folder
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.reading import nothing_there
from cutline.connectors.rows import check_partition_columns, differences, rows_schema, storable_schema
from cutline.connectors.staged_files import (
    STAGED_FOLDER,
    check_claim,
    check_commit,
    check_still_there,
    delete_staged,
    local_path,
    pieces_of,
    sweep_staged,
)
from cutline.errors import FencedError, InvariantViolation, SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, OperatorId, SinkId

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.ports import Piece, Published, SinkContext, StagedBatch, Stager, Wish
    from cutline.protocol.publish.commit import CommitPermit

EPOCH_COLUMN = "cutline_epoch"
PRIVATE = "_cutline"
_STAGED = f"{PRIVATE}/staged"
_EPOCH_NAME = re.compile(rf"{EPOCH_COLUMN}=(\d+)")
_LEDGER_KIND = "parquet-sink-ledger"
#: What a file system answers that has no hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EXDEV}


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Whose folder this is, and what must stay true of it across restarts."""

    flow: FlowName
    operator: OperatorId
    sink: SinkId
    partition_by: tuple[str, ...]
    #: Serialized Arrow schema of the rows in the files, partition columns included.
    schema_ipc: bytes
    #: Highest epoch that a rewind took away. It and all below are never published again.
    rewound: Epoch = NO_EPOCH
    #: Who may publish; empty: nobody has claimed it.
    claim: str = ""


class Parquet:
    """Exactly-once Parquet files. One flow owns the folder; readers see whole epochs, in order.

    With output mode ``update`` every updated row is appended as a new row.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = True

    def __init__(self, path: str | os.PathLike[str], partition_by: Sequence[str] = ()) -> None:
        self.path = local_path(path, sink="Parquet")
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self._private = self.path / PRIVATE
        self._ledger_path = self._private / "ledger.json"
        self._context: SinkContext | None = None
        self._schema_ipc = b""
        self._own_claim = ""

    def __repr__(self) -> str:
        return f"Parquet({str(self.path)!r}, partition_by={self.partition_by!r})"

    def open(self, context: SinkContext) -> None:
        """Claim the folder, or check that it is this flow's and takes such rows; clear away what a crash left."""
        schema = storable_schema(rows_schema(context))
        check_partition_columns(schema, self.partition_by)
        if EPOCH_COLUMN in schema.names:
            raise SinkError(
                f"the column name {EPOCH_COLUMN} is taken by the sink's own folders",
                next_step="rename the column in the flow",
                sink=context.sink,
            )
        wanted = Ledger(
            flow=context.flow,
            operator=context.operator,
            sink=context.sink,
            partition_by=self.partition_by,
            schema_ipc=schema.serialize().to_pybytes(),
        )
        self._claim(wanted, schema)
        self._context, self._schema_ipc = context, wanted.schema_ipc
        self._clear_leftovers()
        # Whoever published the newest epoch may have died before it was durable, and what is published counts now.
        fsync_dir(self.path)

    def claim(self) -> None:
        """First the claim, then what others have prepared goes away: see ``commit``."""
        self._opened()
        self._own_claim = secrets.token_hex(8)
        self._store_ledger(msgspec.structs.replace(self._load_ledger(), claim=self._own_claim))
        self._clear_leftovers()

    def stager(self) -> Stager:
        return ParquetStager(
            root=str(self.path),
            folder=f"{_STAGED}/{STAGED_FOLDER}",
            sink=self._opened().sink,
            schema_ipc=self._schema_ipc,
            partition_by=self.partition_by,
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Staged files are durable and named by their batch: make sure before the epoch relies on them."""
        check_still_there(self.path, pieces_of(staged), hint=f"take another checkpoint; who deletes in {PRIVATE}?")
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the batches as ``cutline_epoch=<n>``; an epoch without rows makes no folder."""
        context = self._opened()
        check_commit(context, permit, staged)
        pieces = pieces_of(staged)
        if pieces and not self._is_published(permit, pieces):
            crashpoint("sink-commit-begun", context.sink)
            prepared = self._prepare_folder(permit, pieces)
            # Only now: who claims the folder after this look takes the prepared one away, and nothing can be published.
            check_claim(self._load_ledger().claim, self._own_claim, context, permit.epoch)
            self._publish(permit, prepared)
            crashpoint("sink-commit-done", context.sink)
        sweep_staged(self.path / _STAGED, staged, permit.through_batch)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named staged files. A published epoch has links of its own and stays."""
        self._opened()
        below = f"{_STAGED}/"  # which itself stays
        delete_staged(self.path / _STAGED, [{"path": piece["path"].removeprefix(below)} for piece in pieces_of(staged)])

    def published(self) -> Epoch | None:
        return max(self._epochs(), default=None)

    def highest(self) -> Epoch:
        """Highest epoch this folder has ever seen, taken back or not: new ones must be above it."""
        self._opened()
        return max(self._load_ledger().rewound, *self._epochs(), NO_EPOCH)

    def rewind(self, epoch: Epoch) -> None:
        """Take away the epochs above ``epoch``, newest first, so that readers see whole earlier states throughout."""
        context = self._opened()
        later = sorted((found for found in self._epochs() if found > epoch), reverse=True)
        if not later:
            return
        ledger = self._load_ledger()
        check_claim(ledger.claim, self._own_claim, context, epoch)
        # First of all: a commit of the abandoned history that arrives late must find the door shut.
        self._store_ledger(msgspec.structs.replace(ledger, rewound=max(ledger.rewound, later[0])))
        discarded = self._private / "discarded"
        make_dir(discarded)
        for found in later:
            os.rename(self._folder_of(found), discarded / f"{found}-{secrets.token_hex(4)}")
            fsync_dir(self.path)
            crashpoint("sink-rewind-half", context.sink)
        shutil.rmtree(discarded, ignore_errors=True)

    def read(self, wish: Wish) -> Published:
        """Of which epochs there are folders, readers see the rows."""
        import pyarrow as pa

        if not self._ledger_path.exists():
            raise nothing_there(self.path)
        ledger = self._load_ledger()
        return read_folder(
            wish,
            owner=(ledger.flow, ledger.sink),
            schema=pa.ipc.read_schema(pa.BufferReader(ledger.schema_ipc)),
            partition_by=ledger.partition_by,
            rewound=lambda: self._load_ledger().rewound,
            listed=self._epochs,
            folder_of=self._folder_of,
        )

    # ------------------------------------------------------------------ ownership

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise InvariantViolation("the sink is used before it was opened", path=self.path)
        return self._context

    def _claim(self, wanted: Ledger, schema: pa.Schema) -> None:
        import pyarrow as pa

        make_dir(self.path)
        if not self._ledger_path.exists():
            strangers = [name for name in os.listdir(self.path) if name != PRIVATE and not is_temporary(name)]
            if strangers:
                raise SinkError(
                    f"the folder is not empty ({sorted(strangers)[0]} …) and was not made by a Cutline sink",
                    next_step="give the sink an empty or new folder",
                    path=self.path,
                )
            make_dir(self._private)
            create(self._ledger_path, records.encode(_LEDGER_KIND, wanted))
        found = self._load_ledger()
        if (found.flow, found.sink) != (wanted.flow, wanted.sink):
            raise SinkError(
                f"the folder belongs to sink {found.sink} of flow {found.flow}",
                next_step="give this sink a folder of its own; to reuse this one, move its whole content away first",
                flow=wanted.flow,
                sink=wanted.sink,
                path=self.path,
            )
        problems = differences(schema, pa.ipc.read_schema(pa.BufferReader(found.schema_ipc)))
        if found.partition_by != wanted.partition_by:
            problems.append(f"partitioned by {wanted.partition_by} but was by {found.partition_by}")
        if problems:
            raise SinkError(
                f"the rows do not fit what the folder holds: {'; '.join(problems)}",
                next_step="give the changed rows a new folder, or cast them to the old schema",
                flow=wanted.flow,
                sink=wanted.sink,
                path=self.path,
            )

    def _clear_leftovers(self) -> None:
        """By a rename: whoever was thought dead and is about to publish a folder finds it whole, or not at all."""
        discarded = self._private / "discarded"
        make_dir(discarded)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._private / "prepared", discarded / f"prepared-{secrets.token_hex(4)}")
        shutil.rmtree(discarded, ignore_errors=True)

    def _load_ledger(self) -> Ledger:
        return records.load(_LEDGER_KIND, self._ledger_path, Ledger)

    def _store_ledger(self, ledger: Ledger) -> None:
        replace(self._ledger_path, records.encode(_LEDGER_KIND, ledger))

    # ------------------------------------------------------------------ publishing

    def _folder_of(self, epoch: Epoch) -> Path:
        return self.path / f"{EPOCH_COLUMN}={epoch}"

    def _epochs(self) -> list[Epoch]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [Epoch(int(match[1])) for name in names if (match := _EPOCH_NAME.fullmatch(name))]

    def _is_published(self, permit: CommitPermit, pieces: list[Piece]) -> bool:
        """Whether the epoch is there already, and is this one; raises if it must not be published at all."""
        folder = self._folder_of(permit.epoch)
        if folder.is_dir():
            there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet")}
            if there != {_public_name(piece) for piece in pieces}:
                raise SinkError(
                    "the folder holds an epoch of this number with other files: it belongs to another history",
                    next_step="was the flow's storage deleted? Give the sink a new folder, or move this one's away",
                    flow=permit.flow,
                    epoch=permit.epoch,
                    path=folder,
                )
            fsync_dir(self.path)
            return True
        if permit.epoch <= self._load_ledger().rewound:
            raise FencedError(
                "the epoch was taken back by a rewind; this commit comes from the abandoned history",
                flow=permit.flow,
                epoch=permit.epoch,
                path=self.path,
            )
        newest = self.published()
        if newest is not None and newest > permit.epoch:
            raise SinkError(
                f"a later epoch ({newest}) is published but this one is not",
                next_step="was the flow's storage or an epoch folder deleted? Give the sink a new folder",
                flow=permit.flow,
                epoch=permit.epoch,
                path=self.path,
            )
        return False

    def _prepare_folder(self, permit: CommitPermit, pieces: list[Piece]) -> Path:
        """A folder that looks as the published one will. Links, so that staged files survive a crash in here."""
        check_still_there(self.path, pieces, hint="restore the flow to an older checkpoint and rewind the sink to it")
        prepared = self._private / "prepared" / f"{permit.epoch}-{secrets.token_hex(4)}"
        targets = [prepared / _public_name(piece) for piece in pieces]
        folders = {prepared} | {parent for target in targets for parent in target.parents if prepared in parent.parents}
        for folder in sorted(folders):
            make_dir(folder)
        for index, (piece, target) in enumerate(zip(pieces, targets, strict=True)):
            if index == len(pieces) // 2:
                crashpoint("sink-commit-half", permit.sink)
            _link(self.path / piece["path"], target)
        for folder in folders:
            fsync_dir(folder)
        return prepared

    def _publish(self, permit: CommitPermit, prepared: Path) -> None:
        target = self._folder_of(permit.epoch)
        try:
            os.rename(prepared, target)
        except OSError as error:
            # Somebody else holding the same permit was faster; the epoch is there once either way.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(prepared, ignore_errors=True)
        fsync_dir(self.path)


def _public_name(piece: Piece) -> str:
    """The file's place inside the epoch's folder: without ``_cutline/staged/<batch>``."""
    return "/".join(piece["path"].split("/")[3:])


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        fsync_file(target)
