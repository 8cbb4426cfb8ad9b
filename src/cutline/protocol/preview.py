"""What a restore would do: the decision of a start in figures, for a person. Decides nothing that a start does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cutline.model.ids import Epoch, OperatorId, SinkId
from cutline.protocol.recovery.facts import SinkFacts
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.protocol.recovery.sink_rules import settle, why_not_restored

#: rewind: readers no longer see what was published since; keep: they do, and see it again; refuse: the start refuses.
SinkFate = Literal["nothing", "rewind", "keep", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWork:
    """A complete checkpoint after the one that is restored, and the rows that each operator had produced for it."""

    epoch: Epoch
    #: None: not measured.
    rows: Mapping[OperatorId, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the flow has done since the checkpoint, and how fast."""

    #: Of the present history, ascending.
    epochs: Sequence[EpochWork] = ()
    #: Rows after the newest complete checkpoint; None: not known.
    since: Mapping[OperatorId, int | None] = field(default_factory=dict)
    #: Rows a second while a batch ran, as measured; operators without a rate were not measured.
    rates: Mapping[OperatorId, float] = field(default_factory=dict)


class Rows(NamedTuple):
    """A number of rows."""

    rows: int
    #: Checkpoints, or open ends of logs, whose rows were not measured: the number is too low then.
    unmeasured: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPreview:
    """What happens to a sink."""

    sink: SinkId
    operator: OperatorId
    fate: SinkFate
    published: Epoch
    #: The oldest epoch that it can be rewound to; NO_EPOCH: any.
    oldest_rewind: Epoch
    #: Why the start refuses because of it.
    why: str
    #: What readers see now and will not see, or will see twice.
    epochs: int
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How long the operators need to be where they are now."""

    seconds: float
    #: The operator that needs longest.
    operator: OperatorId
    rows: Rows
    rows_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a start that restores an epoch would do."""

    decision: RestorePlan | Refusal
    sinks: tuple[SinkPreview, ...]
    #: Per operator, the rows since the checkpoint: sources read them again.
    rows: Mapping[OperatorId, Rows]
    #: None: no rate is known.
    estimate: Estimate | None


def preview(
    decision: RestorePlan | Refusal,
    epoch: Epoch,
    *,
    sinks: Iterable[SinkFacts],
    operators: Iterable[OperatorId],
    work: Work,
    is_per_operator: bool = False,
) -> Preview:
    """``decision``: of ``choose``, for a restore to ``epoch``. ``operators``: those that run now."""
    rows = {name: _rows_of(name, work.epochs, _open_end(work, name)) for name in operators}
    return Preview(
        decision=decision,
        sinks=tuple(_sink(one, decision, epoch, work, is_per_operator=is_per_operator) for one in sinks),
        rows=rows,
        estimate=_estimate(rows, work.rates),
    )


def _open_end(work: Work, operator: OperatorId) -> Rows:
    rows = work.since.get(operator)
    return Rows(rows or 0, int(rows is None))


def _rows_of(operator: OperatorId, epochs: Iterable[EpochWork], beyond: Rows) -> Rows:
    found = [one.rows.get(operator) for one in epochs]
    known = [one for one in found if one is not None]
    return Rows(beyond.rows + sum(known), beyond.unmeasured + len(found) - len(known))


def _sink(
    sink: SinkFacts, decision: RestorePlan | Refusal, epoch: Epoch, work: Work, *, is_per_operator: bool
) -> SinkPreview:
    published = [one for one in work.epochs if epoch < one.epoch <= sink.published]
    why = why_not_restored(sink, epoch)
    fate: SinkFate = "nothing"
    if why is not None:
        fate = "refuse"
    elif isinstance(decision, RestorePlan):
        settled = settle(sink, decision.manifests, is_per_operator=is_per_operator)
        fate = "keep" if settled.keeps else "rewind" if settled.rewind_to is not None else "nothing"
    elif sink.published > epoch:
        fate = "keep" if sink.on_rollback == "keep" else "rewind"
    return SinkPreview(
        sink=sink.sink,
        operator=sink.operator,
        fate=fate,
        published=sink.published,
        oldest_rewind=sink.oldest_rewind or Epoch(0),
        why=why or "",
        epochs=len(published),
        rows=_rows_of(sink.operator, published, Rows(0, 0)),
    )


def _estimate(rows: Mapping[OperatorId, Rows], rates: Mapping[OperatorId, float]) -> Estimate | None:
    """The operators work at the same time, so the slowest one decides."""
    found = [
        Estimate(seconds=rows[name].rows / rate, operator=name, rows=rows[name], rows_per_second=rate)
        for name, rate in rates.items()
        if name in rows and rate > 0
    ]
    return max(found, key=lambda one: one.seconds, default=None)
