"""The generation records of the local tier."""

from __future__ import annotations

from pathlib import Path

from cutline.base import durable, records
from cutline.model.generation import GenerationRecord
from cutline.model.layout import Layout

_KIND = "generation"


class LocalGenerationStore:
    """One file per generation. See ``cutline.ports.generation_store`` for what each method promises."""

    def __init__(self, layout: Layout, *, is_reader: bool = False) -> None:
        """``is_reader``: opening it changes nothing, so another process may be running the flow."""
        self._layout = layout
        if not is_reader:
            durable.make_dir(layout.generations)

    def create(self, record: GenerationRecord) -> bool:
        if any(other.generation > record.generation for other in self.load_all()):
            return False
        return durable.create(self._layout.generation(record.generation), records.encode(_KIND, record))

    def load_all(self) -> list[GenerationRecord]:
        folder = self._layout.generations
        if not folder.is_dir():
            return []
        paths = sorted(path for path in folder.iterdir() if not durable.is_temporary(path.name))
        return [self._load(path) for path in paths]

    def _load(self, path: Path) -> GenerationRecord:
        record = records.load(_KIND, path, GenerationRecord, flow=self._layout.flow)
        records.check_identity(_KIND, self._layout.generation(record.generation).name, path.name, path=path)
        return record
