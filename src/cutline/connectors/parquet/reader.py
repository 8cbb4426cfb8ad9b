"""Reads the folder of a Parquet sink: whole epochs, even while epochs are published and rewound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.connectors.reading import check_still_published
from cutline.errors import RewoundError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports.reading import ReadRequest, ReadResult

if TYPE_CHECKING:
    import pyarrow as pa


def settled(listed: Callable[[], Sequence[Epoch]]) -> list[Epoch]:
    """The published epochs, with none missing below the newest.

    A listing that runs while epochs appear may show a later one and miss an earlier one. All below the newest of a
    first listing existed before it ended, so a second listing shows them.
    """
    newest = max(listed(), default=NO_EPOCH)
    return sorted(epoch for epoch in listed() if epoch <= newest)


def file_batches(
    files: Sequence[str], schema: pa.Schema, partition_by: Sequence[str], root: Path
) -> Iterator[pa.RecordBatch]:
    """The rows of these files, one after the other; the folders' names hold the values of partition columns."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    if not files:
        return
    partitions = pa.schema([schema.field(name) for name in partition_by])
    dataset = ds.dataset(
        list(files),
        schema=schema,
        format="parquet",
        partitioning=ds.partitioning(partitions, flavor="hive"),
        partition_base_dir=str(root),
    )
    yield from dataset.to_batches()


def read_folder(
    request: ReadRequest,
    *,
    owner: tuple[str, str],
    schema: pa.Schema,
    partition_by: Sequence[str],
    rewound: Callable[[], Epoch],
    listed: Callable[[], Sequence[Epoch]],
    folder_of: Callable[[Epoch], Path],
) -> ReadResult:
    epochs = settled(listed)
    # Read after the listing: a rewind records itself before it removes epochs.
    check_still_published(request, epochs, rewound=rewound())
    chosen = [epoch for epoch in epochs if request.after < epoch and request.reaches(epoch)]
    folders = {epoch: folder_of(epoch) for epoch in chosen}
    files = {epoch: sorted(map(str, folder.rglob("*.parquet"))) for epoch, folder in folders.items()}
    for epoch, folder in folders.items():
        # A folder is removed in one step, so a folder that exists after the listing was listed completely.
        if not folder.exists():
            raise _vanished(epoch, request)

    def batches() -> Iterator[pa.RecordBatch]:
        for epoch in chosen:
            try:
                yield from file_batches(files[epoch], schema, partition_by, folders[epoch])
            except FileNotFoundError as error:
                raise _vanished(epoch, request) from error

    newest = max((epoch for epoch in epochs if request.reaches(epoch)), default=NO_EPOCH)
    return ReadResult(flow=owner[0], sink=owner[1], epoch=newest, schema=schema, batches=batches)


def _vanished(epoch: Epoch, request: ReadRequest) -> RewoundError:
    return RewoundError(
        f"epoch {epoch} was rewound, or its folder deleted, while it was read",
        next_step="read again",
        still=request.after,
        epoch=epoch,
    )
