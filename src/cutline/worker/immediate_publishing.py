"""Sinks that publish every batch as soon as it is in the log, where low delay matters more than whole epochs.

The user's sink sees no difference: to it every batch is an epoch of its own, see ``protocol.publish.immediate``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import RecoveryError
from cutline.model.graph import FlowGraph, SinkNode
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, SinkId
from cutline.model.staging import StagedBatch
from cutline.ports.sinks import Claimable, Sink, SinkContext, Stager
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.immediate import (
    Comparison,
    LogFacts,
    Standing,
    check_numbering,
    compare,
    generation_of,
    place_of,
)

log = get_logger(__name__)


class ImmediateSink:
    """Wraps the user's sink; the service sees only the wrapper.

    The commit of a flow's epoch publishes only those batches that could not be published earlier.
    """

    def __init__(self, sink: Sink, node: SinkNode, flow: FlowName) -> None:
        self.output_modes = sink.output_modes
        self.can_rewind = sink.can_rewind
        self._sink = sink
        self._node = node
        self._flow = flow
        self._lock = threading.Lock()
        #: Batches in the log that are not published yet, in the order of the log.
        self._waiting: deque[StagedBatch] = deque()
        #: Until this epoch is committed, batches wait: what it publishes comes before them.
        self._behind = NO_EPOCH
        self._published = NO_EPOCH
        #: The newest published batch with rows: batches without rows leave no trace in the sink.
        self._with_rows = NO_EPOCH
        #: The newest batch that the sink has according to the flow's records, and how to update them.
        self._seen = NO_EPOCH
        self._store_seen: Callable[[Epoch], None] = lambda _: None

    @property
    def sink(self) -> Sink:
        """The user's sink."""
        return self._sink

    def open(self, context: SinkContext) -> None:
        self._sink.open(context)
        check_numbering(self._sink.highest(), self._node.publish, flow=self._flow, sink=self._node.sink)

    def claimed(self) -> str:
        return self._sink.claimed() if isinstance(self._sink, Claimable) else ""

    def claim(self, history: str, *, expected: str) -> None:
        if isinstance(self._sink, Claimable):
            self._sink.claim(history, expected=expected)

    def newest_batch(self) -> Epoch:
        """The number of the newest published batch, as its target says."""
        return self._sink.published() or NO_EPOCH

    def stager(self) -> Stager:
        return self._sink.stager()

    # ------------------------------------------------------------------ at the start

    def remember(self, seen: Epoch, store_seen: Callable[[Epoch], None]) -> None:
        """``seen``: the newest batch that the sink has according to the records; ``store_seen`` updates the records."""
        self._seen, self._store_seen = seen, store_seen

    def rewind_given_up(self, channel: ChannelLog) -> None:
        """Rewind published batches that do not belong to the history. Call it before any batch runs."""
        with self._lock:
            self._waiting.clear()
            published = self._sink.published() or NO_EPOCH
            found = self._compare(channel, published)
            if found.standing is Standing.AHEAD and self._node.on_rollback == "keep":
                log.warning("sink_keeps_what_was_given_up", flow=self._flow, sink=self._node.sink)
            elif found.standing is Standing.AHEAD:
                log.warning("sink_rewound", flow=self._flow, sink=self._node.sink, published=published, to=found.end)
                # First: killed in between, the sink must not look as if another program had rewound it.
                self._note(NO_EPOCH)
                self._sink.rewind(found.end)
                published = self._sink.published() or NO_EPOCH
            self._published = self._with_rows = published
            self._note(published)

    def _compare(self, channel: ChannelLog, published: Epoch) -> Comparison:
        """Raises RecoveryError if the flow cannot go on with what the sink has."""
        entries = channel.entries()
        given_up = [] if entries else [place_of(one.generation, one.batch) for one in channel.invisible_entries()]
        facts = LogFacts(entries=entries, given_up=given_up)
        found = compare(self._node.sink, facts, published=published, seen=self._seen)
        if found.standing is Standing.UNKNOWN:
            raise RecoveryError(
                f"sink {self._node.sink} holds output of this flow, but the storage has no record of it",
                next_step="check the storage option; to start over, empty the sink's target or name another",
                flow=self._flow,
            )
        if found.standing is Standing.BEHIND:
            raise RecoveryError(
                f"sink {self._node.sink} no longer has batches that were published to it: "
                "it was restored from a backup, emptied, or is another target",
                next_step="correct its target; to continue without the missing batches: "
                f"cutline sinks {self._flow} --accept {self._node.sink}",
                flow=self._flow,
                published=published,
                expected=found.needed,
            )
        return found

    def _note(self, published: Epoch) -> None:
        if published != self._seen:
            self._store_seen(published)
            self._seen = published

    def begin(self, *, behind: Epoch) -> None:
        """``behind``: the newest epoch that is complete but not committed at the start; NO_EPOCH if there is none."""
        with self._lock:
            self._behind = behind

    # ------------------------------------------------------------------ publishing

    def publish(self, batch: StagedBatch) -> None:
        """Publish a batch that is in the log. If that fails, the next batch or the next epoch publishes it too."""
        with self._lock:
            self._waiting.append(batch)
            self._drain()

    def _drain(self) -> None:
        while self._waiting and not self._behind:
            self._put(self._waiting[0])
            self._waiting.popleft()

    def _put(self, batch: StagedBatch) -> None:
        number = place_of(batch.generation, batch.batch)
        if number <= self._published:
            return  # batches come in order, so every lower number is published too
        permit = CommitPermit(
            flow=self._flow,
            operator=self._node.operator,
            sink=self._node.sink,
            epoch=number,
            generation=batch.generation,
            previous_epoch=self._published,
            after_batch=BatchId(batch.batch - 1),
            through_batch=batch.batch,
            rewind_points=(),  # it numbers batches, so the sink keeps as many as it does by itself
        )
        self._sink.commit(permit, [batch], self._sink.prepare(number, [batch]))
        self._published = number
        if batch.pieces:
            self._with_rows = number

    # ------------------------------------------------------------------ as every sink

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the epoch's unpublished batches, then the batches that waited for the epoch."""
        with self._lock:
            for batch in staged:
                self._put(batch)
            if permit.epoch >= self._behind:
                self._behind = NO_EPOCH
            self._drain()
            self._note(self._with_rows)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        self._sink.abort(staged)

    def published(self) -> Epoch | None:
        """None: its numbers are not epochs of the flow. The flow's records count, and publishing twice does no harm."""
        return None

    def highest(self) -> Epoch:
        return NO_EPOCH

    def newest_generation(self) -> Generation:
        """The newest generation that has published to it, as its target says."""
        return generation_of(self._sink.highest())

    def rewind(self, epoch: Epoch) -> None:
        """Nothing to do: the log says what has to go, see ``rewind_given_up``."""


def with_immediate_sinks(
    graph: FlowGraph, sinks: Mapping[SinkId, Sink], *, renamed: Collection[str] = ()
) -> dict[SinkId, Sink]:
    """The sinks of a flow as the service uses them. ``renamed``: operators that are restored under these new names."""
    nodes = {node.sink: node for node in graph.sinks}
    return {
        name: _immediate(sink, nodes[name], graph.flow, renamed) if nodes[name].publish == "at_once" else sink
        for name, sink in sinks.items()
    }


def _immediate(sink: Sink, node: SinkNode, flow: FlowName, renamed: Collection[str]) -> ImmediateSink:
    if node.operator in renamed:
        # A log under a new name no longer says in which generations its batches ran: no rewind would be possible.
        raise RecoveryError(
            f"sink {node.sink} publishes immediately, so its operator cannot be restored under another name",
            next_step='restore it under its old name, or with publish="checkpoint" and another target',
            flow=flow,
            operator=node.operator,
        )
    return ImmediateSink(sink, node, flow)
