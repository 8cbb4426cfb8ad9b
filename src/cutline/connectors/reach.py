"""How a sink's target stores its reach, see ``cutline.protocol.publish.flow_epochs``."""

from __future__ import annotations

from pathlib import Path

from cutline.base import records
from cutline.base.durable import make_dir, replace
from cutline.base.paths import NotPlainError, TooLargeError, read_plain
from cutline.errors import DamagedRecordError, UnknownFormatError
from cutline.model.ids import Epoch
from cutline.protocol.publish.flow_epochs import Reach, Standing, reach_to_store, token_in

_KIND = "sink-reach"
_MOST_BYTES = 1 << 16


def encoded(reach: Reach) -> bytes:
    return records.encode(_KIND, reach)


def decoded(data: bytes | str | None) -> Reach | None:
    """None: there is none. One that cannot be read is worth as much: readers then see what the ledger proves."""
    if not data:
        return None
    try:
        return records.decode(_KIND, data.encode() if isinstance(data, str) else data, Reach)
    except (DamagedRecordError, UnknownFormatError):
        return None


def load_reach(path: Path) -> Reach | None:
    try:
        return decoded(read_plain(path, _MOST_BYTES))
    except (OSError, NotPlainError, TooLargeError):
        return None


def store_reach(path: Path, reach: Reach) -> None:
    """Not synced: after a power cut the next epoch stores it again."""
    make_dir(path.parent)
    replace(path, encoded(reach), sync=False)


def file_in(folder: Path, flow: str, sink: str) -> Path:
    """The file of one sink's reach in a table's folder; readers and vacuum ignore names that begin so."""
    return folder / "_cutline" / "reach" / flow / f"{sink}.json"


def own_reach(standing: Standing, claim: str, epoch: Epoch, *, is_per_operator: bool, at_start: bool) -> Reach | None:
    """What the instance with this claim stores; None: nothing, for example because another one has replaced it."""
    if standing.token != token_in(claim):
        return None
    return reach_to_store(standing, epoch, is_per_operator=is_per_operator, at_start=at_start)
