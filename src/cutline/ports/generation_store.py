"""The generation port: the records that create the generations of a flow."""

from __future__ import annotations

from typing import Protocol

from cutline.model.generation import GenerationRecord


class GenerationStore(Protocol):
    """Keeps the generations of one flow."""

    def create(self, record: GenerationRecord) -> bool:
        """Create the record; False if that generation or a newer one exists: another process has taken over."""
        ...

    def load_all(self) -> list[GenerationRecord]:
        """All generations, ascending; empty if the flow has never started."""
        ...
