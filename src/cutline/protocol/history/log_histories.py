"""Which logs a generation continues, which it begins, and which no operator writes any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord, Spans
from cutline.model.ids import START, Generation, OperatorId, Position
from cutline.protocol.history.lineage import lineage_of, spans_of

Begun = dict[OperatorId, Generation]
Left = dict[OperatorId, Spans]


def log_histories(
    generations: Sequence[GenerationRecord],
    *,
    generation: Generation,
    names: Collection[OperatorId],
    begun_now: Collection[OperatorId],
    restored: Manifest | None,
    existing: Collection[OperatorId],
) -> tuple[Begun, Left]:
    """``begun`` and ``left`` for the record of ``generation``.

    ``names``: the operators of the flow; those in ``begun_now`` get a log that continues none of their name.
    ``restored``: the checkpoint that the whole flow is restored to. ``existing``: channels that have a folder.
    """
    if not generations:
        return dict.fromkeys(begun_now, generation), {}
    current = generations[-1]
    then = current
    if restored is not None:
        then = next((one for one in generations if one.generation == restored.generation), current)
    begun: Begun = {name: since for name, since in then.begun.items() if name in names}
    begun.update(dict.fromkeys(begun_now, generation))
    left: Left = {}
    for name in {*current.left, *current.lineage}:
        if name not in existing:
            continue
        if name in names and name not in begun_now:
            # Its log continues. An older one of the same name may have been left long ago.
            if name in begun and name in current.left:
                left[name] = current.left[name]
        elif restored is not None and name in restored.channels:
            cut = restored.channels[name]
            left[name] = spans_of(lineage_of(cut.lineage).fork(generation, Position(cut.barrier + 1)))
        elif name in current.left:
            left[name] = current.left[name]
        elif restored is not None:
            left[name] = [(generation, START)]  # it joined after the checkpoint: its log does not belong to the history
    return begun, left
