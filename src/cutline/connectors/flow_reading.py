"""``cutline.read`` and ``cutline.latest_common_epoch``: one table, or all tables of a flow at one epoch.

Asks the targets only: what each of them says about itself, then for the chosen epoch, then again what it says about
itself. If a sink was taken over or rewound in between, the attempt counts for nothing and the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast, overload

from cutline.base.backoff import Backoff
from cutline.base.retry import Retry
from cutline.connectors.reading import read as read_sink
from cutline.errors import ConfigError, CutlineError, RewoundError, SinkError, StoreError
from cutline.model.ids import NO_EPOCH, Epoch, SinkId
from cutline.ports.reading import FlowRead, Readable, ReadRequest, ReadResult, TellsStanding
from cutline.ports.sinks import Sink
from cutline.protocol.publish.flow_epochs import (
    Answer,
    Judgement,
    Standing,
    common_epoch,
    is_unchanged,
    judge_epoch,
    may_be_rewound,
)

T = TypeVar("T")

#: How long to try again while sinks are rewound, or one that shows only its newest epoch is ahead of others.
TIMEOUT_S = 10.0
_BACKOFF = Backoff(first_s=0.02, limit_s=0.5, jitter=0.5)


class FlowLike(Protocol):
    """A ``cutline.Flow``: its definition names its sinks. Nothing of it is run."""

    @property
    def name(self) -> str: ...

    @property
    def sinks(self) -> Mapping[SinkId, Sink]: ...


#: A flow, or sinks written as in the flow: by their names, or without names if each writes to its target alone.
Tables = FlowLike | Mapping[str, Sink] | Sequence[Sink]


@overload
def read(
    what: Sink, *, after: int | None = None, as_of: int | None = None, flow: str | None = None, name: str | None = None
) -> ReadResult: ...


@overload
def read(
    what: Tables,
    *,
    as_of: int | None = None,
    flow: str | None = None,
    leave_out: Collection[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> FlowRead: ...


def read(
    what: Sink | Tables,
    *,
    after: int | None = None,
    as_of: int | None = None,
    flow: str | None = None,
    name: str | None = None,
    leave_out: Collection[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> ReadResult | FlowRead:
    """The rows that a sink has published, of whole epochs; or all tables of a flow at the same epoch.

    ``what``: a sink, written as in the flow: it names the target. Or a flow, a mapping from names to sinks, or a list
    of sinks. ``after``: only rows that later epochs have added, for one sink that appends. ``as_of``: as it was when
    that epoch was newest; for several tables the newest epoch that all have reached if not named. ``flow`` and ``name``
    (of the sink) are needed only where several write to one target. ``leave_out``: names of sinks not to read.
    ``timeout_s``: how long to try again while the tables are at no common epoch. Raises RewoundError if the epoch was
    rewound.

    Several tables: the call chooses the epoch and fixes the state of every table. Rows of databases are read in the
    call, those of files when ``batches()`` runs.
    """
    if isinstance(what, Mapping | Sequence) or (hasattr(what, "sinks") and not hasattr(what, "stager")):
        if after is not None or name is not None:
            raise ConfigError(
                "after= and name= are for one sink", next_step="read one sink with them, or all without them"
            )
        return _Tables.of(what, flow, leave_out).read(as_of, timeout_s=timeout_s)
    if leave_out:
        raise ConfigError("leave_out= is for several sinks", next_step="name a flow, or sinks in a list")
    return read_sink(cast("Sink", what), after=after, as_of=as_of, flow=flow, name=name)


def latest_common_epoch(
    what: Tables, *, flow: str | None = None, leave_out: Collection[str] = (), timeout_s: float = TIMEOUT_S
) -> int:
    """The newest epoch that every sink has reached and can be read as of; 0: none yet. Reads no rows."""
    return _Tables.of(what, flow, leave_out).latest(timeout_s=timeout_s)


class _TryAgain(Exception):  # noqa: N818 (never leaves this module)
    """The targets changed meanwhile, or will soon fit together."""

    def __init__(self, error: CutlineError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Tables:
    """The sinks to read, by the names that the caller knows them by."""

    flow: str | None
    sinks: Mapping[str, Sink]
    #: The names are those of the sinks in the flow.
    is_named: bool

    @classmethod
    def of(cls, what: Tables, flow: str | None, leave_out: Collection[str]) -> _Tables:
        left_out = {leave_out} if isinstance(leave_out, str) else set(leave_out)
        if isinstance(what, Mapping):
            sinks, is_named = dict(what), True
        elif isinstance(what, Sequence):
            sinks, is_named = {str(index): sink for index, sink in enumerate(what)}, False
        else:
            flow, sinks, is_named = flow or what.name, {str(name): sink for name, sink in what.sinks.items()}, True
        if unknown := left_out - sinks.keys():
            raise ConfigError(
                f"leave_out= names what is not a sink: {', '.join(sorted(unknown))}",
                next_step=f"the sinks are: {', '.join(sinks) or 'none'}",
                flow=flow,
            )
        chosen = {name: sink for name, sink in sinks.items() if name not in left_out}
        if not chosen:
            raise ConfigError("there is no sink to read", next_step="name at least one", flow=flow)
        for name, sink in chosen.items():
            if not isinstance(sink, TellsStanding) and (not isinstance(sink, Readable) or sink.can_rewind):
                raise _cannot_take_part(f"{type(sink).__name__} cannot be read as of an epoch", flow, name)
        return cls(flow, chosen, is_named)

    # ------------------------------------------------------------------ reading

    def read(self, as_of: int | None, *, timeout_s: float) -> FlowRead:
        if as_of is not None and as_of < 0:
            raise ConfigError(f"no epoch is {as_of}", next_step="ask for an epoch that exists", flow=self.flow)
        return _retried(lambda: self._read(as_of), timeout_s)

    def latest(self, *, timeout_s: float) -> Epoch:
        return _retried(self._latest, timeout_s)

    def _latest(self) -> Epoch:
        standings = self._standings()
        epoch = self._chosen(standings, None)
        for name, one in standings.items():
            if one.oldest is None and epoch < one.published:
                self._read_one(name, one, epoch)  # it reads no rows, but finds out whether it could
        self._check_unchanged(standings, epoch)
        return epoch

    def _read(self, as_of: int | None) -> FlowRead:
        standings = self._standings()
        epoch = self._chosen(standings, as_of)
        found = {name: self._read_one(name, one, epoch) for name, one in standings.items()}
        self._check_unchanged(standings, epoch)
        flow = next(iter(standings.values())).flow
        shown = [one.epoch for one in found.values()]
        if as_of is not None and may_be_rewound(list(standings.values()), epoch, shown):
            still = max(shown)
            raise RewoundError(
                f"epoch {epoch} was rewound, or no sink had rows in it",
                next_step=f"undo what was derived from it, then read as_of={still} or without as_of=",
                still=still,
                flow=flow,
                epoch=epoch,
            )
        names = {name: name if self.is_named else one.sink for name, one in standings.items()}
        return FlowRead(flow, epoch, {names[name]: one for name, one in found.items()})

    def _standings(self) -> dict[str, Standing]:
        found = {name: self._standing(name, sink) for name, sink in self.sinks.items()}
        flows = {one.flow for one in found.values() if one.flow}
        if len(flows) > 1:
            raise ConfigError(
                f"the tables belong to several flows ({', '.join(sorted(flows))}), whose epochs have nothing in common",
                next_step="read the tables of one flow; where several flows write to one table, name it: flow=",
            )
        for name, one in found.items():
            if one.is_immediate:
                raise _cannot_take_part("it publishes batch by batch, so its numbers are no epochs", self.flow, name)
            if one.is_per_operator and len(found) > 1:
                raise ConfigError(
                    "the flow takes checkpoints operator by operator, so its epochs are no cuts of the whole flow",
                    next_step="read each table by itself",
                    flow=one.flow,
                )
        return found

    def _standing(self, name: str, sink: Sink) -> Standing:
        request = ReadRequest(flow=self.flow, sink=name if self.is_named else None)
        try:
            if isinstance(sink, TellsStanding):
                return sink.standing(request)
            # It never rewinds, so the newest epoch is all that counts.
            found = cast("Readable", sink).read(request)
            return Standing(flow=found.flow, sink=found.sink, published=found.epoch)
        except StoreError as error:
            raise _TryAgain(_named(error, self.flow, name)) from error
        except CutlineError as error:
            raise _named(error, self.flow, name) from None

    def _chosen(self, standings: Mapping[str, Standing], as_of: int | None) -> Epoch:
        """The epoch to read, if the targets say that they can be read as of it."""
        all_of_them = list(standings.values())
        epoch = common_epoch(all_of_them) if as_of is None else Epoch(as_of)
        judged = judge_epoch(all_of_them, epoch)
        if judged.answer is Answer.YES:
            return epoch
        error = self._refusal(judged, epoch, common_epoch(all_of_them))
        # The other sinks catch up with one that shows only its newest epoch.
        if as_of is None or judged.answer is Answer.TAKEN_OVER:
            raise _TryAgain(error)
        raise error

    def _refusal(self, judged: Judgement, epoch: Epoch, common: Epoch) -> SinkError:
        of = judged.of
        name, at = (of.sink, of.reached) if of is not None else ("", NO_EPOCH)
        match judged.answer:
            case Answer.NOT_YET:
                what = f"sink {name} has published up to epoch {at}, not yet epoch {epoch}"
                step = f"read as_of={common}, or read again later"
            case Answer.TAKEN_OVER:
                what = f"a start of the flow is taking its sinks over: they have one history up to epoch {common} only"
                step = f"read as_of={common}, or wait for the start; if it failed, start the flow again"
            case _:
                what = f"sink {name} is at epoch {of.published if of else at} and cannot show epoch {epoch} any more"
                step = "read again; leave it out (leave_out=), or let the flow take checkpoints less often"
        return SinkError(what, next_step=step, flow=self.flow or (of.flow if of else None), sink=name or None)

    def _read_one(self, name: str, standing: Standing, epoch: Epoch) -> ReadResult:
        request = ReadRequest(as_of=epoch, flow=standing.flow or self.flow, sink=standing.sink or None)
        sink = self.sinks[name]
        try:
            return cast("Readable", sink).read(request)
        except CutlineError as error:
            told = _named(error, standing.flow, name, epoch)
            told.add_next_step("or leave the sink out: leave_out=")
            if not isinstance(error, StoreError) and self._standing(name, sink) == standing:
                raise
            raise _TryAgain(told) from error  # it has published or was rewound since it was asked

    def _check_unchanged(self, before: Mapping[str, Standing], epoch: Epoch) -> None:
        after = self._standings()
        if not is_unchanged(list(before.values()), list(after.values())):
            error = SinkError(
                "the flow was restarted or restored while its tables were read",
                next_step="read again",
                flow=next(iter(before.values())).flow,
                epoch=epoch,
            )
            raise _TryAgain(error)


def _retried(attempt: Callable[[], T], timeout_s: float) -> T:
    try:
        return Retry(deadline_s=timeout_s, backoff=_BACKOFF).call(attempt, on=_TryAgain)
    except _TryAgain as last:
        raise last.error from last.__cause__


def _named(error: CutlineError, flow: str | None, name: str, epoch: Epoch | None = None) -> CutlineError:
    error.add_where(flow=flow, sink=name, epoch=epoch)
    return error


def _cannot_take_part(why: str, flow: str | None, name: str) -> ConfigError:
    return ConfigError(
        f"sink {name} cannot be read together with others: {why}",
        next_step=f'leave it out: leave_out=["{name}"]; docs/sinks.md says how to read it alone',
        flow=flow,
        sink=name,
    )
