"""The readable generation records of a flow, and which checkpoints belong to its present history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cutline.base import durable, records
from cutline.errors import CutlineError
from cutline.maintenance.looking import names_in_folder, text_of
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Generation
from cutline.model.layout import Layout
from cutline.protocol.history.epochs import live_epochs
from cutline.protocol.history.known_checkpoints import generation_starts_of, is_of_history
from cutline.protocol.history.lineage import lineage_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGenerations:
    """The generation records that can be read, ascending, and those that cannot."""

    readable: list[GenerationRecord]
    #: What is wrong with each damaged record, by number.
    damaged: Mapping[Generation, str]

    @property
    def newest(self) -> GenerationRecord | None:
        """The current generation; None if there is none, or a newer one cannot be read."""
        newest = self.readable[-1] if self.readable else None
        return None if newest and any(number > newest.generation for number in self.damaged) else newest

    @property
    def numbers(self) -> set[Generation]:
        return {record.generation for record in self.readable} | set(self.damaged)

    def problem_of(self, generation: Generation) -> str | None:
        """A clone has the record of its savepoint's generation and none before it: older records are not expected."""
        if generation in self.damaged:
            return self.damaged[generation]
        is_expected = generation >= min(self.numbers, default=generation)
        return "generation record is missing" if is_expected and generation not in self.numbers else None


def load_generations(layout: Layout) -> StoredGenerations:
    readable: list[GenerationRecord] = []
    damaged: dict[Generation, str] = {}
    for name in sorted(names_in_folder(layout.generations)):
        number = name.removesuffix(".json")
        if durable.is_temporary(name) or not number.isdigit():
            continue
        try:
            readable.append(records.load("generation", layout.generations / name, GenerationRecord))
        except (CutlineError, OSError) as error:
            damaged[Generation(int(number))] = text_of(error)
    return StoredGenerations(readable=readable, damaged=damaged)


def is_live(manifest: Manifest, generations: StoredGenerations) -> bool:
    """Whether no restore has abandoned the epoch; True if that is unknown because a record is lost."""
    current = generations.newest
    if current is None or (current.generation < manifest.generation and manifest.carried_from is None):
        return True
    if not live_epochs([(manifest.epoch, manifest.generation)], generation_starts_of(generations.readable)):
        return False
    if manifest.carried_from is not None and manifest.generation not in generations.numbers:
        return False  # the start that stored it was killed before its generation was stored
    return is_of_history(manifest, {name: lineage_of(spans) for name, spans in current.lineage.items()}, current.begun)
