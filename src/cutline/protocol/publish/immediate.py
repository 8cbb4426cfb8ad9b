"""Immediate publishing: how batches are numbered for a sink, and which part of its content belongs to the history.

To the sink every batch is an epoch of its own, with a number made from the generation and the batch. These numbers grow
along every history and are never used twice, so all rules of ``sink_ledger`` hold for batches too. The channel's log
says what belongs to the history: batches that the sink has published above the log's end were given up.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cutline.errors import SinkError
from cutline.model.entries import DataEntry, Entry
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, SinkId

#: More than a flow ever runs (30 years at ten a second). Decimal, so that the numbers are readable:
#: 30000000042 is batch 42 of generation 3.
BATCHES_PER_GENERATION = 10_000_000_000


def place_of(generation: Generation, batch: BatchId) -> Epoch:
    """The number under which a sink publishes a batch."""
    return Epoch(generation * BATCHES_PER_GENERATION + batch)


def generation_of(place: Epoch) -> Generation:
    """The generation of the batch that is published under a number."""
    return Generation(place // BATCHES_PER_GENERATION)


def is_place(number: int) -> bool:
    """Whether it is the number of a batch, not an epoch of the flow."""
    return number >= BATCHES_PER_GENERATION


def end_of(entries: Sequence[Entry]) -> Epoch | None:
    """A number that everything of the history is at or below, and everything given up above; None without entries.

    Of a barrier behind the last batch it may be higher than that batch's own number, because a later generation wrote
    the barrier. No sink has published anything in between: before a generation writes its first entry, its start or
    restore has claimed the sink and rewound it to the end of the log at that time; what the generation publishes from
    then on has a number of its own, and a batch above the barrier's.
    """
    return place_of(entries[-1].generation, entries[-1].batch) if entries else None


def check_numbering(highest: Epoch, publish: str, *, flow: FlowName, sink: SinkId) -> None:
    """Refuse a target with output of the other way to publish: its numbers and the new ones cannot be compared.

    ``highest``: the highest number that the target has seen. ``publish``: how the sink is declared.
    """
    if highest and is_place(highest) != (publish == "at_once"):
        way = "batch by batch" if is_place(highest) else "with checkpoints"
        raise SinkError(
            f"what is in the sink's target was published {way}, and publish={publish!r} numbers otherwise",
            next_step="give the sink another target, or its former publish=… back",
            flow=flow,
            sink=sink,
        )


class Standing(enum.Enum):
    """How a sink's published output compares with the history that the flow continues."""

    #: All of it belongs to the history, and nothing that was recorded is missing.
    STANDS = "stands"
    #: Some of it was given up: the sink must be rewound to the end of the history.
    AHEAD = "ahead"
    #: Batches that were published to it are gone: continuing would leave rows missing.
    BEHIND = "behind"
    #: It holds output of this flow, but the storage has no record of it.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """What a channel's log says about the batches of one sink."""

    entries: Sequence[Entry]
    #: Numbers of the batches that were given up and whose files are still there.
    given_up: Collection[Epoch] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """See ``compare``."""

    standing: Standing
    #: The end of the history.
    end: Epoch
    #: The newest batch that the sink must have.
    needed: Epoch


def compare(sink: SinkId, log: LogFacts, *, published: Epoch, seen: Epoch) -> Comparison:
    """``published``: the sink's newest batch by its own ledger. ``seen``: the newest by the flow's records."""
    end = end_of(log.entries)
    if end is None and published and published not in log.given_up:
        # Only a flow that never had a checkpoint begins anew; its log then still has the batches that it gave up.
        return Comparison(standing=Standing.UNKNOWN, end=NO_EPOCH, needed=NO_EPOCH)
    last = end or NO_EPOCH
    needed = seen if seen <= last else _newest_with_rows(sink, log.entries, seen)
    if published < needed:
        standing = Standing.BEHIND
    else:
        standing = Standing.AHEAD if published > last else Standing.STANDS
    return Comparison(standing=standing, end=last, needed=needed)


def _newest_with_rows(sink: SinkId, entries: Sequence[Entry], up_to: Epoch) -> Epoch:
    """The flow was restored to before ``up_to``: the log says which of the sink's batches stay."""
    places = (
        place_of(entry.generation, entry.batch)
        for entry in entries
        if isinstance(entry, DataEntry) and sink in entry.staged and entry.staged[sink].pieces
    )
    return max((place for place in places if place <= up_to), default=NO_EPOCH)
