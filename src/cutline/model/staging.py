"""Output that is staged in a sink and not yet published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cutline.model.ids import BatchId, Count, Generation, SizeBytes

if TYPE_CHECKING:
    pass


#: What a sink's executors report about one staged piece (a file, a table …). Plain JSON.
Piece = dict[str, Any]


class StagedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The durable, invisible output of one batch for one sink."""

    generation: Generation
    batch: BatchId
    rows: Count
    bytes: SizeBytes
    pieces: list[Piece]
