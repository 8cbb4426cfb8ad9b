"""``cutline.read``: what readers of a sink may see."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.errors import ConfigError, SinkError, TakenBackError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports import Published, Readable, Sink, Wish


def read(
    sink: Sink, *, after: int | None = None, as_of: int | None = None, flow: str | None = None, name: str | None = None
) -> Published:
    """The rows that a sink has published, of whole epochs.

    ``sink`` is written as in the flow, and names the target. ``after``: only what later epochs have added, for a sink
    that appends. ``as_of``: as it was when that epoch was newest, for a sink that knows. ``flow`` and ``name`` (of the
    sink) are needed only where several write to one target. Raises TakenBackError if ``after`` does not stand any more.
    """
    if not isinstance(sink, Readable):
        raise ConfigError(
            f"{type(sink).__name__} cannot be read this way",
            next_step="docs/sinks.md says for each sink how its epochs are read",
        )
    if min(after or 0, as_of or 0) < 0 or (as_of is not None and as_of < (after or 0)):
        raise ConfigError(f"no epoch is after {after} and as of {as_of}", next_step="ask for epochs that there are")
    return sink.read(
        Wish(
            after=Epoch(after or NO_EPOCH),
            as_of=None if as_of is None else Epoch(as_of),
            flow=flow,
            sink=name,
        )
    )


def check_stands(wish: Wish, epochs: Iterable[Epoch], *, rewound: Epoch) -> None:
    """Whether ``wish.after`` is part of the history that ``epochs`` are of; those that had no rows leave no trace.

    ``rewound``: the highest that a rewind took away. Above it nothing was ever taken back.
    """
    if wish.after == NO_EPOCH:
        return
    still = max((epoch for epoch in epochs if epoch <= wish.after), default=NO_EPOCH)
    if still != wish.after and wish.after <= rewound:
        raise taken_back(wish.after, still)
    if wish.after > max(epochs, default=NO_EPOCH):
        raise SinkError(
            f"epoch {wish.after} is not published here, the newest is {max(epochs, default=NO_EPOCH)}",
            next_step="is this the target that was read before? Read without after= to begin anew",
        )


def taken_back(after: Epoch, still: Epoch) -> TakenBackError:
    return TakenBackError(
        f"epoch {after} was taken back; of what was read, the rows up to epoch {still} stand",
        next_step=f"undo what was made of later rows and read after={still}",
        still=still,
    )


def refuse_after(why: str) -> SinkError:
    return SinkError(f"what is new since an epoch cannot be told: {why}", next_step="read without after=")


def refuse_as_of(why: str) -> SinkError:
    return SinkError(f"earlier epochs cannot be read: {why}", next_step="read without as_of=")


def nothing_there(target: object) -> SinkError:
    return SinkError(
        "no flow has published anything there",
        next_step="check the name of the target; it exists once the flow has started",
        target=target,
    )
