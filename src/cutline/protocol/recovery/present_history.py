"""Which stored checkpoints a flow can restore: readable, of the present history, and without gaps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId
from cutline.protocol.history.epochs import lost_behind
from cutline.protocol.history.evolution import Definition
from cutline.protocol.history.known_checkpoints import newest_of, of_present_history
from cutline.protocol.recovery.facts import SinkFacts, StoredFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The present history, as far as it can be read."""

    generations: tuple[GenerationRecord, ...]
    #: Complete epochs that can be read and published one after the other, ascending.
    manifests: tuple[Manifest, ...]
    #: Complete epochs that cannot be read, or not be published because of one that cannot.
    unreadable: tuple[Epoch, ...]
    #: Per unreadable epoch: the operators whose snapshots it held, as far as known.
    owners: dict[Epoch, frozenset[OperatorId]]
    #: Readable epochs of the present history, ascending, whether they can be published or not.
    live: tuple[Epoch, ...]

    @property
    def newest(self) -> Epoch:
        return self.manifests[-1].epoch if self.manifests else NO_EPOCH

    @property
    def is_unreadable_at_end(self) -> bool:
        return any(epoch > self.newest for epoch in self.unreadable)


def present_history(
    stored: StoredFacts,
    definition: Definition,
    sinks: Sequence[SinkFacts],
    pins: Collection[Epoch],
    note: Callable[[str], None],
    *,
    published: Epoch = NO_EPOCH,
) -> History:
    """``note`` receives each unusable epoch; every sink has published at least up to ``published``."""
    unreadable: list[Epoch] = []
    owners: dict[Epoch, frozenset[OperatorId]] = {}
    readable: list[Manifest] = []
    for one in stored.epochs:
        if one.manifest is None or one.problem:
            note(f"epoch {one.epoch}: {one.problem}")
            unreadable.append(one.epoch)
            owners[one.epoch] = one.recorded
        else:
            readable.append(one.manifest)
    live = of_present_history(readable, stored.generations)
    reached = [
        (one.operator, max(one.published, one.recorded, noted, published))
        for one in sinks
        if (noted := _published_before(live, one)) is not None
    ]
    lost = _lost_in_gaps(live, definition, reached, unreadable, pins)
    for epoch, before in lost.items():
        note(f"epoch {epoch}: not published, and epoch {before} before it is lost")
    owners.update({one.epoch: frozenset(one.operators) for one in live if one.epoch in lost})
    return History(
        generations=stored.generations,
        manifests=tuple(one for one in live if one.epoch not in lost),
        unreadable=(*unreadable, *lost),
        owners=owners,
        live=tuple(one.epoch for one in live),
    )


def _published_before(live: Sequence[Manifest], sink: SinkFacts) -> Epoch | None:
    """How far the sink had published when the newest checkpoint was completed; None: it did not exist then.

    Retention releases what every sink has published. A sink that was added since has no part in older epochs, and must
    not make them look lost; nor must one whose ledger shows less, because an epoch without rows need not leave a trace.
    """
    newest = newest_of(live, sink.operator) or (live[-1] if live else None)
    if newest is None or newest.published is None:
        return NO_EPOCH
    return newest.published.get(sink.sink)


def _lost_in_gaps(
    live: Sequence[Manifest],
    definition: Definition,
    reached: Iterable[tuple[OperatorId, Epoch]],
    unreadable: Collection[Epoch],
    pins: Collection[Epoch],
) -> dict[Epoch, Epoch]:
    """Epochs that no sink can publish, each with the previous epoch, which is lost.

    ``reached``: per sink, its operator and how far it has published.
    """
    names = definition.names
    lost: dict[Epoch, Epoch] = {}
    # In per-operator mode the epochs of one operator follow one another, and only its own sinks publish them.
    for group in [{name} for name in names] if definition.is_per_operator else [set(names)]:
        published = [epoch for operator, epoch in reached if operator in group]
        chain = [(one.epoch, one.previous_epoch) for one in live if not group.isdisjoint(one.operators)]
        lost.update(lost_behind(chain, unreadable=unreadable, published=published, pins=pins))
    return lost


def to_publish(
    manifest: Manifest, known: Iterable[Manifest], *, published: Epoch, note: Callable[[str], None]
) -> tuple[Manifest, ...] | None:
    """An epoch, preceded by those that some sink has yet to publish; None if one of these is missing.

    Of the latter a host has only the records: they say what to publish; nothing is restored from them.
    ``published``: the newest epoch of the slowest sink.
    """
    chain = [*(one for one in known if published < one.epoch < manifest.epoch), manifest]
    before = published
    for one in chain:
        if one.epoch > published and one.previous_epoch > before:
            note(f"epoch {one.epoch}: not published, and epoch {one.previous_epoch} before it is missing")
            return None
        before = one.epoch
    return tuple(chain)
