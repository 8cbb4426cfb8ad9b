"""Which logs a generation continues, which it begins, and which no operator writes any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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


def names_in_last_run(
    last: GenerationRecord, taken_in: Generation, new_names: Mapping[OperatorId, OperatorId]
) -> dict[OperatorId, OperatorId]:
    """Per operator of a checkpoint: its name in the last run, as far as that is known.

    ``taken_in``: the generation of the checkpoint. ``new_names``: from the checkpoint's names to those of the code. An
    operator whose log began after the checkpoint had another name in it, or is new.
    """

    def is_younger(name: OperatorId) -> bool:
        return last.begun.get(name, taken_in) > taken_in

    names: dict[OperatorId, OperatorId] = {}
    for old, new in new_names.items():
        if old in last.spark_dirs and not is_younger(old):
            names[old] = old  # it is renamed only now, if at all
        elif old != new and new in last.spark_dirs and is_younger(new):
            names[old] = new
    return names
