"""What readers of a sink may see: the part of ``cutline.read`` for one sink, and what its readers share."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.errors import ConfigError, RewoundError, SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports.reading import Readable, ReadRequest, ReadResult
from cutline.ports.sinks import Sink


def read(
    sink: Sink, *, after: int | None = None, as_of: int | None = None, flow: str | None = None, name: str | None = None
) -> ReadResult:
    """The rows that a sink has published, of whole epochs.

    ``sink`` is written as in the flow, and names the target. ``after``: only rows that later epochs have added, for a
    sink that appends. ``as_of``: as it was when that epoch was newest, if the sink knows. ``flow`` and ``name`` (of the
    sink) are needed only where several write to one target. Raises RewoundError if ``after`` was rewound.
    """
    if not isinstance(sink, Readable):
        raise ConfigError(
            f"{type(sink).__name__} cannot be read this way",
            next_step="docs/sinks.md describes how to read the epochs of each sink",
        )
    if min(after or 0, as_of or 0) < 0 or (as_of is not None and as_of < (after or 0)):
        raise ConfigError(f"no epoch is after {after} and as of {as_of}", next_step="ask for epochs that exist")
    return sink.read(
        ReadRequest(
            after=Epoch(after or NO_EPOCH),
            as_of=None if as_of is None else Epoch(as_of),
            flow=flow,
            sink=name,
        )
    )


def check_still_published(request: ReadRequest, epochs: Iterable[Epoch], *, rewound: Epoch) -> None:
    """Refuse the request if ``request.after`` is not in the history of ``epochs``; epochs without rows leave no trace.

    ``rewound``: the highest epoch that a rewind removed. No epoch above it was ever rewound.
    """
    if request.after == NO_EPOCH:
        return
    still = max((epoch for epoch in epochs if epoch <= request.after), default=NO_EPOCH)
    if still != request.after and request.after <= rewound:
        raise rewound_error(request.after, still)
    if request.after > max(epochs, default=NO_EPOCH):
        raise SinkError(
            f"epoch {request.after} is not published here, the newest is {max(epochs, default=NO_EPOCH)}",
            next_step="check that this is the target that was read before; read without after= to start over",
        )


def rewound_error(after: Epoch, still: Epoch) -> RewoundError:
    return RewoundError(
        f"epoch {after} was rewound; of the rows that were read, those up to epoch {still} are still published",
        next_step=f"undo what was derived from later rows, then read after={still}",
        still=still,
    )


def refuse_after(why: str) -> SinkError:
    return SinkError(f"the rows added since an epoch cannot be read: {why}", next_step="read without after=")


def refuse_as_of(why: str) -> SinkError:
    return SinkError(f"earlier epochs cannot be read: {why}", next_step="read without as_of=")


def nothing_published(target: object) -> SinkError:
    return SinkError(
        "no flow has published anything there",
        next_step="check the name of the target; it exists once the flow has started",
        target=target,
    )
