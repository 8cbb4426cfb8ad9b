"""A sink that keeps what it publishes in memory and records how it was used."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cutline.errors import FencedError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.model.staging import StagedBatch
from cutline.ports.sinks import SinkContext, StageAttempt, Stager, StageWriter
from cutline.protocol.publish.commit import CommitPermit


class NoStager:
    """No executor ever opens it."""

    def open(self, attempt: StageAttempt) -> StageWriter:
        raise NotImplementedError


class MemorySink:
    """See ``cutline.ports.Sink``. The next calls raise the ``failures``, oldest first."""

    output_modes = frozenset({"append", "update", "complete"})
    can_rewind = True

    def __init__(self) -> None:
        #: Epoch → its published batches.
        self.visible: dict[int, list[int]] = {}
        self.prepared: dict[int, list[int]] = {}
        self.aborted: list[StagedBatch] = []
        self.commit_failures: list[Exception] = []
        self.prepare_failures: list[Exception] = []
        self.newest_claim = ""

    def open(self, context: SinkContext) -> None: ...

    def claimed(self) -> str:
        return self.newest_claim

    def claim(self, history: str, *, expected: str) -> None:
        if self.newest_claim != expected:
            raise FencedError("another start has taken the sink over meanwhile")
        self.newest_claim = f"{secrets.token_hex(8)} {history}"

    def stager(self) -> Stager:
        return NoStager()

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        if self.prepare_failures:
            raise self.prepare_failures.pop(0)
        self.prepared[epoch] = [batch.batch for batch in staged]
        return {"prepared": len(staged)}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        if self.commit_failures:
            raise self.commit_failures.pop(0)
        self.visible.setdefault(permit.epoch, [batch.batch for batch in staged])

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        self.aborted += staged

    def published(self) -> Epoch | None:
        return Epoch(max(self.visible)) if self.visible else None

    def highest(self) -> Epoch:
        return self.published() or NO_EPOCH

    def rewind(self, epoch: Epoch) -> None:
        self.visible = {number: batches for number, batches in self.visible.items() if number <= epoch}
