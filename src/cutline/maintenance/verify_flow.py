"""Verifies what all checkpoints of a flow share: identity, generations, the coordinator's records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cutline.base import durable, records
from cutline.errors import CutlineError
from cutline.maintenance.findings import BACKUP, Finding
from cutline.maintenance.looking import name_below, names_in_folder, text_of
from cutline.maintenance.stored_generations import StoredGenerations, load_generations
from cutline.model.ids import Generation
from cutline.model.layout import Layout
from cutline.ports.inspection import CoordinatorRecords


class FlowCheck:
    """Verifies a flow's identity, generation records and database."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def problems(self, coordinator: CoordinatorRecords) -> list[Finding]:
        """``coordinator`` was read before: a generation is counted after its record was created."""
        generations = load_generations(self._layout)
        problems = [*self._identity_problems()]
        for number, problem in sorted(generations.damaged.items()):
            problems.append(self._of_flow(self._layout.generation(number), problem))
        if coordinator.problem is not None:
            problems.append(self._of_flow(self._layout.metadata, coordinator.problem))
        problems += self._missing_generations(generations, coordinator.recoveries)
        return problems

    def _of_flow(self, path: Path, problem: str) -> Finding:
        return Finding(
            epoch=None, operator=None, path=name_below(self._layout, path), problem=problem, next_step=BACKUP
        )

    def _identity_problems(self) -> Iterator[Finding]:
        path = self._layout.identity
        try:
            name = records.load("flow", path, dict[str, Any]).get("name")
        except (CutlineError, OSError) as error:
            yield self._of_flow(path, text_of(error))
            return
        if name != self._layout.root.name:
            yield self._of_flow(path, f"the folder belongs to the flow {name!r}")

    def _missing_generations(self, generations: StoredGenerations, recoveries: int) -> Iterator[Finding]:
        """Generation records are never deleted, and every generation that wrote a readable entry had one."""
        named = {span[0] for one in generations.readable for spans in one.lineage.values() for span in spans}
        now = load_generations(self._layout)  # again: the flow may have been started meanwhile
        if recoveries > len(now.numbers):
            named |= self._writers()
        missing = [number for number in sorted(named - now.numbers) if now.problem_of(number)]
        for number in missing:
            yield self._of_flow(self._layout.generation(number), "generation record is missing")
        # The number is unknown if the record was the oldest, or the generation left no entries.
        if recoveries > len(now.numbers) and not missing:
            yield self._of_flow(
                self._layout.generations, f"there were {recoveries} generations, but only {len(now.numbers)} records"
            )

    def _writers(self) -> set[Generation]:
        """All generations that have written an entry, including starts that were killed before they began."""
        folders = [folder for folder in self._layout.root.glob("channels/*/g*") if folder.name[1:].isdigit()]
        return {
            Generation(int(folder.name[1:]))
            for folder in folders
            if any(not durable.is_temporary(name) for name in names_in_folder(folder))
        }
