"""Publishes one operator's sinks, in the order of the requests, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from cutline.base.logs import get_logger
from cutline.base.outages import outage_of
from cutline.base.redaction import without_secrets
from cutline.errors import FencedError
from cutline.model.ids import NO_EPOCH, Epoch, SinkId
from cutline.model.staging import StagedBatch
from cutline.ports.sinks import RewindsSoFar, Sink
from cutline.protocol.messages.wire import SinkCommitFailed, SinkCommitted
from cutline.protocol.publish.commit import CommitPermit
from cutline.worker.immediate_publishing import ImmediateSink
from cutline.worker.operator_spec import OperatorPorts, OperatorSpec
from cutline.worker.outbox import Outbox
from cutline.worker.reach import record_reach

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _ImmediateBatch:
    """A batch in the log that a sink publishes immediately."""

    sink: ImmediateSink
    batch: StagedBatch


@dataclass(frozen=True, slots=True)
class _Question:
    """Something to find out about the sinks. Asked between two commits, because a sink serves one thread."""

    ask: Callable[[Mapping[SinkId, Sink]], Any]
    answer: Future[Any]


def _oldest_rewinds(sinks: Mapping[SinkId, Sink]) -> dict[SinkId, Epoch]:
    return {name: sink.oldest_rewind() if isinstance(sink, RewindsSoFar) else NO_EPOCH for name, sink in sinks.items()}


class SinkCommits:
    """Publishes epochs by permit, and single batches where a sink publishes immediately."""

    def __init__(
        self,
        spec: OperatorSpec,
        ports: OperatorPorts,
        *,
        outbox: Outbox,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._operator = spec.operator
        self._sinks = spec.sinks
        self._is_per_operator = spec.options.is_per_operator
        self._checkpoints = ports.checkpoints
        self._outbox = outbox
        self._on_fatal = on_fatal
        self._outages = ports.outages
        self._permits: queue.SimpleQueue[CommitPermit | _ImmediateBatch | _Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cutline-publish-{spec.operator}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._permits.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        for name in self._sinks:
            self._outages.ended(f"sink {name}")

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def publish(self, permit: CommitPermit) -> None:
        self._permits.put(permit)

    def publish_immediately(self, staged: Mapping[SinkId, StagedBatch]) -> None:
        """Publish a batch to the sinks that do not wait for a checkpoint. Call it in the order of the log."""
        for name, batch in staged.items():
            if isinstance(sink := self._sinks.get(name), ImmediateSink):
                self._permits.put(_ImmediateBatch(sink, batch))

    def ask_oldest_rewinds(self) -> Future[dict[SinkId, Epoch]]:
        """The oldest epoch that each sink can be rewound to; NO_EPOCH: any."""
        return self.ask(_oldest_rewinds)

    def ask(self, question: Callable[[Mapping[SinkId, Sink]], T]) -> Future[T]:
        """What ``question`` finds out about the sinks, on the thread that publishes; it must not change them."""
        answer: Future[T] = Future()
        self._permits.put(_Question(question, answer))
        return answer

    def _answer(self, question: _Question) -> None:
        try:
            question.answer.set_result(question.ask(self._sinks))
        except Exception as error:  # a sink may raise anything; it is a question, so publishing goes on
            log.debug("sinks_not_asked", operator=self._operator, exc_info=True)
            question.answer.set_exception(error)

    def _publish_early(self, immediate: _ImmediateBatch) -> bool:
        """False when the sink is fenced: a retry can never succeed."""
        try:
            immediate.sink.publish(immediate.batch)
        except FencedError as error:
            self._on_fatal(error)
            return False
        except Exception:  # a sink may raise anything; the next batch or the checkpoint publishes it
            log.warning("immediate_publish_failed", operator=self._operator, batch=immediate.batch.batch, exc_info=True)
        return True

    def _run(self) -> None:
        while (permit := self._permits.get()) is not None:
            if isinstance(permit, _ImmediateBatch):
                if not self._publish_early(permit):
                    return
                continue
            if isinstance(permit, _Question):
                self._answer(permit)
                continue
            try:
                has_rows = self._commit(permit)
            except FencedError as error:  # another history has replaced this one: a retry can never succeed
                self._on_fatal(error)
                return
            except Exception as error:  # a sink may raise anything; the coordinator retries
                log.warning("sink_commit_failed", sink=permit.sink, epoch=permit.epoch, exc_info=True)
                reason = without_secrets(f"{type(error).__name__}: {error}")
                if (outage := outage_of(error)) is not None:
                    self._outages.failed(f"sink {permit.sink}", outage, is_timed=False)  # the coordinator knows when
                self._outbox.tell(
                    SinkCommitFailed(operator=self._operator, sink=permit.sink, epoch=permit.epoch, reason=reason)
                )
            else:
                self._outages.over(f"sink {permit.sink}")
                self._outbox.tell(
                    SinkCommitted(operator=self._operator, sink=permit.sink, epoch=permit.epoch, has_rows=has_rows)
                )

    def _commit(self, permit: CommitPermit) -> bool:
        """Publish the epoch; whether it had rows, which the sink's ledger now shows as published."""
        record = self._checkpoints.load_record(self._checkpoints.load_manifest(permit.epoch), self._operator)
        prepared, sink = record.sinks.get(permit.sink), self._sinks[permit.sink]
        has_rows = False
        if prepared is not None:  # it is None if the sink was added to the flow after this epoch
            staged = [batch for batch in prepared.staged if permit.covers(batch.batch)]
            sink.commit(permit, staged, prepared.token)
            has_rows = any(batch.rows for batch in staged)
        if not has_rows:
            record_reach(sink, permit.sink, permit.epoch, is_per_operator=self._is_per_operator)
        return has_rows and not isinstance(sink, ImmediateSink)
