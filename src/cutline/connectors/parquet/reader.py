"""Reading the folder of a Parquet sink: whole epochs, also while epochs come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.connectors.reading import check_stands
from cutline.errors import TakenBackError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports import Published, Wish

if TYPE_CHECKING:
    import pyarrow as pa


def settled(listed: Callable[[], Sequence[Epoch]]) -> list[Epoch]:
    """The epochs that are there, with none missing below the newest.

    A listing that runs while epochs appear may show a later one and not an earlier one that it had passed by. All below
    the newest of a first listing were there before it ended, so a second one shows them.
    """
    newest = max(listed(), default=NO_EPOCH)
    return sorted(epoch for epoch in listed() if epoch <= newest)


def file_batches(
    files: Sequence[str], schema: pa.Schema, partition_by: Sequence[str], root: Path
) -> Iterator[pa.RecordBatch]:
    """The rows of these files, one after the other; values of partition columns stand in the folders' names."""
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
    wish: Wish,
    *,
    owner: tuple[str, str],
    schema: pa.Schema,
    partition_by: Sequence[str],
    rewound: Callable[[], Epoch],
    listed: Callable[[], Sequence[Epoch]],
    folder_of: Callable[[Epoch], Path],
) -> Published:
    epochs = settled(listed)
    # Asked after the listing: whoever takes epochs away says so first.
    check_stands(wish, epochs, rewound=rewound())
    chosen = [epoch for epoch in epochs if wish.after < epoch and wish.reaches(epoch)]
    folders = {epoch: folder_of(epoch) for epoch in chosen}
    files = {epoch: sorted(map(str, folder.rglob("*.parquet"))) for epoch, folder in folders.items()}
    for epoch, folder in folders.items():
        # A folder leaves in one step, so one that is there after the listing was listed whole.
        if not folder.exists():
            raise _vanished(epoch, wish)

    def batches() -> Iterator[pa.RecordBatch]:
        for epoch in chosen:
            try:
                yield from file_batches(files[epoch], schema, partition_by, folders[epoch])
            except FileNotFoundError as error:
                raise _vanished(epoch, wish) from error

    newest = max((epoch for epoch in epochs if wish.reaches(epoch)), default=NO_EPOCH)
    return Published(flow=owner[0], sink=owner[1], epoch=newest, schema=schema, batches=batches)


def _vanished(epoch: Epoch, wish: Wish) -> TakenBackError:
    return TakenBackError(
        f"epoch {epoch} was taken back, or its folder deleted, while it was read",
        next_step="read again",
        still=wish.after,
        epoch=epoch,
    )
