"""A folder of Parquet files, one sub-folder per epoch, published by one atomic rename.

``<path>/cutline_epoch=7/…`` exists whole or not at all, so any reader that lists the folder sees whole epochs.
Everything unpublished is below ``<path>/_cutline``; Spark and pyarrow ignore names that begin with an underscore.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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
from cutline.base.durable import create, exclusive, fsync_dir, fsync_file, is_temporary, make_dir, replace, settle_dir
from cutline.config.arguments import checked
from cutline.connectors.parquet.reader import read_folder, settled
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.reach import load_reach, own_reach, store_reach
from cutline.connectors.reading import nothing_published
from cutline.connectors.rows import check_partition_columns, differences, recorded_schema, rows_schema, storable_schema
from cutline.connectors.sink_base import OpenedSink
from cutline.connectors.staged_files import (
    STAGED_FOLDER,
    check_still_there,
    collect_staged,
    delete_staged,
    local_path,
    pieces_of,
)
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, OperatorId, SinkId
from cutline.ports.reading import ReadRequest
from cutline.protocol.publish import sink_ledger
from cutline.protocol.publish.flow_epochs import Standing
from cutline.protocol.publish.sink_ledger import SinkLedger

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.model.staging import Piece, StagedBatch
    from cutline.ports.reading import ReadResult
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit

EPOCH_COLUMN = "cutline_epoch"
PRIVATE = "_cutline"
_STAGED = f"{PRIVATE}/staged"
_EPOCH_NAME = re.compile(rf"{EPOCH_COLUMN}=(\d+)")
_LEDGER_KIND = "parquet-sink-ledger"
#: Errors of a file system without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EXDEV}


class FolderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of the folder, and what must stay the same across restarts."""

    flow: FlowName
    operator: OperatorId
    sink: SinkId
    partition_by: tuple[str, ...]
    #: Serialized Arrow schema of the rows in the files, partition columns included.
    schema_ipc: bytes
    #: Highest epoch that a rewind removed. It and all below are never published again.
    rewound: Epoch = NO_EPOCH
    #: The instance that may publish; empty: unclaimed.
    claim: str = ""


class Parquet:
    """Exactly-once Parquet files. One flow owns the folder; readers see whole epochs, in order.

    With output mode ``update`` every updated row is appended as a new row.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = True

    @checked("sinks.Parquet")
    def __init__(self, path: str | os.PathLike[str], partition_by: Sequence[str] = ()) -> None:
        self.path = local_path(path, sink="Parquet")
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self._private = self.path / PRIVATE
        self._ledger_path = self._private / "ledger.json"
        self._reach_path = self._private / "reach.json"
        self._opened = OpenedSink("the folder", path=self.path)
        self._schema_ipc = b""

    def __repr__(self) -> str:
        return f"Parquet({str(self.path)!r}, partition_by={self.partition_by!r})"

    def open(self, context: SinkContext) -> None:
        """Take the folder, or check that it belongs to this sink and takes such rows; discard what a crash left."""
        schema = storable_schema(rows_schema(context))
        check_partition_columns(schema, self.partition_by)
        _check_folder_names(schema, self.partition_by)
        wanted = FolderRecord(
            flow=context.flow,
            operator=context.operator,
            sink=context.sink,
            partition_by=self.partition_by,
            schema_ipc=schema.serialize().to_pybytes(),
        )
        self._take_folder(wanted, schema)
        self._opened.enter(context)
        self._schema_ipc = wanted.schema_ipc
        self._discard_prepared()
        # The process that published the newest epoch may have died before it was durable; the sink now relies on it.
        fsync_dir(self.path)

    def claimed(self) -> str:
        self._opened.require()
        return self._load_record().claim

    def claim(self, history: str, *, expected: str) -> None:
        """Store the claim, then discard what other instances have prepared: see ``commit``."""
        self._opened.require()
        claim = f"{secrets.token_hex(8)} {history}"
        with self._locked():
            record = self._load_record()
            self._opened.check_expected(record.claim, expected)
            self._store_record(msgspec.structs.replace(record, claim=claim))
        self._opened.claim = claim
        self._discard_prepared()

    def stager(self) -> Stager:
        return ParquetStager(
            root=str(self.path),
            folder=f"{_STAGED}/{STAGED_FOLDER}",
            sink=self._opened.context.sink,
            schema_ipc=self._schema_ipc,
            partition_by=self.partition_by,
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Check that the staged files exist before the epoch relies on them; they are durable already."""
        hint = f"find out what deletes files in {PRIVATE}, then take another checkpoint"
        check_still_there(self.path, pieces_of(staged), hint=hint)
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the batches as ``cutline_epoch=<n>``; an epoch without rows makes no folder."""
        self._opened.check_covered(permit, staged)
        pieces = pieces_of(staged)
        epochs = self._epochs() if pieces else []
        if pieces and self._is_to_publish(permit, pieces, epochs):
            self._opened.reach("sink-commit-begun")
            prepared = self._prepare_folder(permit, pieces)
            # Checked again, now that the folder is prepared: a claim made after this check discards the folder, so
            # that nothing is published. Only the holder of the claim publishes, so no other epoch has appeared.
            is_there = self._folder_of(permit.epoch).exists()
            if self._is_to_publish(permit, pieces, [*epochs, permit.epoch] if is_there else epochs):
                self._publish(permit, prepared)
            else:
                shutil.rmtree(prepared, ignore_errors=True)
            self._opened.reach("sink-commit-done")
        collect_staged(self.path / _STAGED, staged, permit.through_batch)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named staged files. A published epoch has links of its own and stays."""
        self._opened.require()
        below = f"{_STAGED}/"  # this folder itself stays
        delete_staged(self.path / _STAGED, [{"path": piece["path"].removeprefix(below)} for piece in pieces_of(staged)])

    def published(self) -> Epoch | None:
        return max(self._epochs(), default=None)

    def highest(self) -> Epoch:
        return self._ledger(self._epochs()).highest

    def rewind(self, epoch: Epoch) -> None:
        """Remove the epochs above ``epoch``, newest first, so that readers see whole earlier states throughout."""
        epochs = self._epochs()
        later = sorted((found for found in epochs if found > epoch), reverse=True)
        ledger = self._ledger(epochs)
        if not self._opened.is_to_rewind(ledger, epoch):
            return
        rewound = sink_ledger.rewind(ledger, epoch).rewound
        with self._locked():
            record = self._load_record()
            # Again, under the lock: otherwise this process could replace the claim of its successor by its own.
            self._opened.check_held(self._ledger(epochs), epoch)
            # First: a late commit of the rewound history must be refused from now on.
            self._store_record(msgspec.structs.replace(record, rewound=rewound))
        discarded = self._private / "discarded"
        make_dir(discarded)
        for found in later:
            os.rename(self._folder_of(found), discarded / f"{found}-{secrets.token_hex(4)}")
            fsync_dir(self.path)
            self._opened.reach("sink-rewind-half")
        shutil.rmtree(discarded, ignore_errors=True)

    def read(self, request: ReadRequest) -> ReadResult:
        """The rows of the epochs whose folders exist."""
        if not self._ledger_path.exists():
            raise nothing_published(self.path)
        record = self._load_record()
        return read_folder(
            request,
            owner=(record.flow, record.sink),
            schema=recorded_schema(record.schema_ipc, path=self._ledger_path),
            partition_by=record.partition_by,
            rewound=lambda: self._load_record().rewound,
            listed=self._epochs,
            folder_of=self._folder_of,
        )

    def standing(self, request: ReadRequest) -> Standing:
        if not self._ledger_path.exists():
            raise nothing_published(self.path)
        epochs = settled(self._epochs)
        # Read after the listing: a rewind records itself before it removes epochs.
        record = self._load_record()
        return Standing(
            flow=record.flow,
            sink=record.sink,
            published=max(epochs, default=NO_EPOCH),
            rewound=record.rewound,
            claim=record.claim,
            reach=load_reach(self._reach_path),
        )

    def record_reach(self, epoch: Epoch, *, is_per_operator: bool, at_start: bool = False) -> None:
        """In a file of its own: the ledger is replaced only under a lock."""
        reach = own_reach(
            self.standing(ReadRequest()), self._opened.claim, epoch, is_per_operator=is_per_operator, at_start=at_start
        )
        if reach is not None:
            store_reach(self._reach_path, reach)

    # ------------------------------------------------------------------ ownership

    def _take_folder(self, wanted: FolderRecord, schema: pa.Schema) -> None:
        settle_dir(self.path)
        if not self._ledger_path.exists():
            foreign = [name for name in os.listdir(self.path) if name != PRIVATE and not is_temporary(name)]
            if foreign:
                raise SinkError(
                    f"the folder is not empty ({sorted(foreign)[0]} …) and was not created by a Cutline sink",
                    next_step="give the sink an empty or new folder",
                    path=self.path,
                )
            make_dir(self._private)
            create(self._ledger_path, records.encode(_LEDGER_KIND, wanted))
        found = self._load_record()
        if (found.flow, found.sink) != (wanted.flow, wanted.sink):
            raise SinkError(
                f"the folder belongs to sink {found.sink} of flow {found.flow}",
                next_step="give this sink a folder of its own; to reuse this one, move its whole content away first",
                flow=wanted.flow,
                sink=wanted.sink,
                path=self.path,
            )
        problems = differences(schema, recorded_schema(found.schema_ipc, path=self._ledger_path))
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

    def _discard_prepared(self) -> None:
        """By a rename: a process believed dead that is about to publish a folder finds it complete, or not at all."""
        discarded = self._private / "discarded"
        make_dir(discarded)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._private / "prepared", discarded / f"prepared-{secrets.token_hex(4)}")
        shutil.rmtree(discarded, ignore_errors=True)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return exclusive(self._private / "lock")

    def _load_record(self) -> FolderRecord:
        return records.load(_LEDGER_KIND, self._ledger_path, FolderRecord)

    def _store_record(self, record: FolderRecord) -> None:
        replace(self._ledger_path, records.encode(_LEDGER_KIND, record))

    def _ledger(self, epochs: Sequence[Epoch], epoch: Epoch = NO_EPOCH) -> SinkLedger:
        """The sink's ledger; its only digest is that of ``epoch``.

        ``epochs`` were listed before the call: a rewind stores its record before it removes the first epoch.
        """
        self._opened.require()
        record = self._load_record()
        return SinkLedger(
            flow=record.flow,
            sink=record.sink,
            published=max(epochs, default=NO_EPOCH),
            rewound=record.rewound,
            digests={epoch: self._digest_in(self._folder_of(epoch))} if epoch in epochs else {},
            claim=record.claim,
        )

    # ------------------------------------------------------------------ publishing

    def _folder_of(self, epoch: Epoch) -> Path:
        return self.path / f"{EPOCH_COLUMN}={epoch}"

    def _epochs(self) -> list[Epoch]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [Epoch(int(match[1])) for name in names if (match := _EPOCH_NAME.fullmatch(name))]

    def _is_to_publish(self, permit: CommitPermit, pieces: list[Piece], epochs: Sequence[Epoch]) -> bool:
        digest = _digest(map(_public_name, pieces))
        if self._opened.is_to_publish(self._ledger(epochs, permit.epoch), permit, digest):
            return True
        # The process that published it may have died before it was durable.
        fsync_dir(self.path)
        return False

    def _digest_in(self, folder: Path) -> str:
        return _digest(path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet"))

    def _prepare_folder(self, permit: CommitPermit, pieces: list[Piece]) -> Path:
        """A folder with the content to publish. Its files are links, so that the staged files survive a crash here."""
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
            # Another holder of the same permit was faster; the epoch is published once either way.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(prepared, ignore_errors=True)
        fsync_dir(self.path)


def _check_folder_names(schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """Refuse columns that readers would confuse with the sink's folders, or whose folders they would not read."""
    for name in schema.names:
        if name.lower() == EPOCH_COLUMN:
            raise SinkError(
                f"the column name {EPOCH_COLUMN} is reserved for the sink's folders",
                next_step="rename the column in the flow",
                column=name,
            )
    for name in partition_by:
        if name.startswith("."):
            raise SinkError(
                "Spark and other readers skip folders whose names begin with a dot, so they would miss these rows",
                next_step="rename the partition column in the flow",
                column=name,
            )


def _digest(names: Iterable[str]) -> str:
    """Identifies an epoch by the files in its folder."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def _public_name(piece: Piece) -> str:
    """The file's path inside the epoch's folder: without ``_cutline/staged/<batch>``."""
    return "/".join(piece["path"].split("/")[3:])


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        fsync_file(target)
