"""Generation records in memory."""

from __future__ import annotations

import threading

from cutline.model.generation import GenerationRecord
from cutline.model.ids import Generation


class MemoryGenerationStore:
    """See ``cutline.ports.generation_store`` for what each method promises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[Generation, GenerationRecord] = {}

    def create(self, record: GenerationRecord) -> bool:
        with self._lock:
            if any(number >= record.generation for number in self._records):
                return False
            self._records[record.generation] = record
            return True

    def load_all(self) -> list[GenerationRecord]:
        with self._lock:
            return [record for _, record in sorted(self._records.items())]
