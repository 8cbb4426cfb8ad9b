"""What a flow has done since a checkpoint, by its records: also of checkpoints that were released since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import START, Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.model.status import EpochOutcome, OperatorStatus
from cutline.ports.metadata import MetadataStore
from cutline.protocol.history.known_checkpoints import live_in, newest_of
from cutline.protocol.history.lineage import lineage_of
from cutline.protocol.preview import EpochWork, Work


def work_since(
    epoch: Epoch,
    *,
    layout: Layout,
    metadata: MetadataStore,
    generations: Sequence[GenerationRecord],
    manifests: Sequence[Manifest],
    operators: Mapping[str, OperatorStatus],
) -> Work:
    """``manifests``: the complete checkpoints, ascending. ``operators``: their status, now or when the flow ended."""
    rates = {
        OperatorId(name): one.rows * 1000 / one.busy_ms for name, one in operators.items() if one.rows and one.busy_ms
    }
    return Work(epochs=_epochs(epoch, metadata, generations), since=_since(layout, generations, manifests), rates=rates)


def _epochs(epoch: Epoch, metadata: MetadataStore, generations: Sequence[GenerationRecord]) -> list[EpochWork]:
    """Complete checkpoints after ``epoch``. Numbers are never used twice, so there are no more than these."""
    newest = metadata.history(max(metadata.last_epoch() - epoch, 0))
    complete = {one.epoch: one for one in newest if one.outcome == "completed" and one.epoch > epoch}
    live = live_in([(one.epoch, one.generation) for one in complete.values()], generations)
    return [EpochWork(epoch=number, rows=_rows(complete[number])) for number in live]


def _rows(outcome: EpochOutcome) -> dict[OperatorId, int | None]:
    """Former versions did not record them."""
    return {OperatorId(name): one.get("rows") for name, one in outcome.details.get("operators", {}).items()}


def _since(
    layout: Layout, generations: Sequence[GenerationRecord], manifests: Sequence[Manifest]
) -> dict[OperatorId, int | None]:
    """Rows in the logs behind the barriers of the newest checkpoint."""
    if not generations:
        return {}
    found: dict[OperatorId, int | None] = {}
    for name, spans in generations[-1].lineage.items():
        newest = newest_of(manifests, name)
        first = newest.operators[name].barrier if newest is not None else START
        try:
            channel = ChannelLog.open(name, layout.channel(name), lineage_of(spans), first, is_reader=True)
        except (CutlineError, OSError):  # the flow releases entries while they are read
            found[name] = None
            continue
        found[name] = sum(entry.rows for entry in channel.data_entries())
    return found
