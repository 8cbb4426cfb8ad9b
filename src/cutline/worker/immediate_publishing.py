"""Sinks that publish every batch as soon as it has happened, where low delay matters more than whole epochs.

The user's sink is not told: to it every batch is an epoch of its own, with a number made from the generation and the
batch. These numbers grow along every history and are never used twice, so all that the sink does for epochs (publish
once, refuse what is stale, take back) it does for batches. What belongs to the history the channel's log says: whatever
the sink has published above the log's end was given up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import RecoveryError, SinkError
from cutline.model.entries import DataEntry
from cutline.model.graph import FlowGraph, SinkNode
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, SinkId
from cutline.ports import Claimable, Sink, SinkContext, StagedBatch, Stager
from cutline.protocol.publish.commit import CommitPermit

log = get_logger(__name__)

#: More than a flow runs in its life (30 years at ten a second). Decimal, so that people can read the numbers:
#: 30000000042 is batch 42 of generation 3.
BATCHES_PER_GENERATION = 10_000_000_000


def place_of(generation: Generation, batch: BatchId) -> Epoch:
    """The number under which a sink publishes a batch."""
    return Epoch(generation * BATCHES_PER_GENERATION + batch)


def is_place(number: int) -> bool:
    """Whether it is such a number, and no epoch of the flow."""
    return number >= BATCHES_PER_GENERATION


def end_of(channel: ChannelLog) -> Epoch | None:
    """Above this number nothing belongs to the history that the log shows; None if the log has never held anything.

    Of the entries that name the last batch (it itself, and barriers behind it) the oldest: an entry that was given up
    was written after it, so its batch is higher and its generation at least the same.
    """
    entries = channel.entries()
    if not entries:
        return None
    oldest = next(entry for entry in entries if entry.batch == entries[-1].batch)
    return place_of(oldest.generation, oldest.batch)


def check_numbering(sink: Sink, node: SinkNode, flow: FlowName) -> None:
    """Refuse a target that was published to the other way: what it has and what it is to get could not be compared."""
    highest = sink.highest()
    if highest and is_place(highest) != (node.publish == "at_once"):
        way = "batch by batch, at once" if is_place(highest) else "with checkpoints"
        raise SinkError(
            f"what is in the sink's target was published {way}, and publish={node.publish!r} numbers otherwise",
            next_step="give the sink another target, or its former publish=… back",
            flow=flow,
            sink=node.sink,
        )


class AtOnce:
    """A sink as the service sees it, around the one that the user gave.

    The epochs of the flow only close ranks: their commits publish what could not be published earlier.
    """

    def __init__(self, sink: Sink, node: SinkNode, flow: FlowName) -> None:
        self.output_modes = sink.output_modes
        self.can_rewind = sink.can_rewind
        self._sink = sink
        self._node = node
        self._flow = flow
        self._lock = threading.Lock()
        #: Happened, and not published; in the order of the log.
        self._waiting: deque[StagedBatch] = deque()
        #: Until this epoch is committed batches only wait: what it publishes comes before them.
        self._behind = NO_EPOCH
        self._published = NO_EPOCH
        #: The newest that had rows: batches without any leave no trace in the sink.
        self._with_rows = NO_EPOCH
        #: What the flow's records say that the sink has; and how they are told.
        self._seen = NO_EPOCH
        self._store_seen: Callable[[Epoch], None] = lambda _: None

    def open(self, context: SinkContext) -> None:
        self._sink.open(context)
        check_numbering(self._sink, self._node, self._flow)

    def claim(self) -> None:
        if isinstance(self._sink, Claimable):
            self._sink.claim()

    def stager(self) -> Stager:
        return self._sink.stager()

    # ------------------------------------------------------------------ at the start

    def remember(self, seen: Epoch, store_seen: Callable[[Epoch], None]) -> None:
        """``seen``: what the records say that the sink has; ``store_seen`` writes down that it has more, or less."""
        self._seen, self._store_seen = seen, store_seen

    def take_back(self, channel: ChannelLog) -> None:
        """Take back what was published and is no part of the history; to be called before anything runs."""
        with self._lock:
            self._waiting.clear()
            published, end = self._sink.published() or NO_EPOCH, self._end_of_history(channel)
            self._refuse_behind(channel, published, end)
            if published > end and self._node.on_rollback == "keep":
                log.warning("sink_keeps_what_was_given_up", flow=self._flow, sink=self._node.sink)
            elif published > end:
                log.warning("sink_rewound", flow=self._flow, sink=self._node.sink, published=published, to=end)
                # First: killed in between, it must not look as if somebody else had taken the sink back.
                self._note(NO_EPOCH)
                self._sink.rewind(end)
                published = self._sink.published() or NO_EPOCH
            self._published = self._with_rows = published
            self._note(published)

    def _refuse_behind(self, channel: ChannelLog, published: Epoch, end: Epoch) -> None:
        """A sink that no longer has what was published to it would go on with rows missing."""
        needed = self._seen
        if needed > end:  # the flow goes back; what it keeps of what the sink had, the log says as far as it reaches
            places = (
                place_of(entry.generation, entry.batch) for entry in channel.data_entries() if self._has_rows(entry)
            )
            needed = max((place for place in places if place <= self._seen), default=NO_EPOCH)
        if published < needed:
            raise RecoveryError(
                f"sink {self._node.sink} no longer has batches that were published to it: "
                "it was restored from a backup, emptied, or is another target",
                next_step="put its target right; to go on without what is missing: "
                f"cutline sinks --flow {self._flow} --accept {self._node.sink}",
                flow=self._flow,
                published=published,
                expected=needed,
            )

    def _has_rows(self, entry: DataEntry) -> bool:
        staged = entry.staged.get(self._node.sink)
        return staged is not None and bool(staged.pieces)

    def _note(self, published: Epoch) -> None:
        if published != self._seen:
            self._store_seen(published)
            self._seen = published

    def _end_of_history(self, channel: ChannelLog) -> Epoch:
        end = end_of(channel)
        published = self._sink.published()
        if end is None and published is not None:
            # The flow begins anew, because it never had a checkpoint to go back to. Or the storage is another one.
            known = (place_of(entry.generation, entry.batch) for entry in channel.invisible_entries())
            if published not in known:
                raise RecoveryError(
                    f"sink {self._node.sink} holds what this flow published, but the storage knows nothing of it",
                    next_step="check the storage option; to start over, empty the sink's target or name another",
                    flow=self._flow,
                )
        return end or NO_EPOCH

    def begin(self, *, behind: Epoch) -> None:
        """``behind``: the newest epoch that was complete and not committed at the start; NO_EPOCH if there is none."""
        with self._lock:
            self._behind = behind

    # ------------------------------------------------------------------ publishing

    def publish(self, batch: StagedBatch) -> None:
        """Make a batch visible that stands in the log. If it fails, it comes with the next one or the next epoch."""
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
            return  # in order, so whatever is below was published too
        permit = CommitPermit(
            flow=self._flow,
            operator=self._node.operator,
            sink=self._node.sink,
            epoch=number,
            generation=batch.generation,
            previous_epoch=self._published,
            after_batch=BatchId(batch.batch - 1),
            through_batch=batch.batch,
        )
        self._sink.commit(permit, [batch], self._sink.prepare(number, [batch]))
        self._published = number
        if batch.pieces:
            self._with_rows = number

    # ------------------------------------------------------------------ as every sink

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish what of the epoch is not published yet, then whatever has waited for it."""
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
        """Its numbers are no epochs of the flow. What is recorded as committed counts, and publishing twice is fine."""
        return None

    def highest(self) -> Epoch:
        return NO_EPOCH

    def rewind(self, epoch: Epoch) -> None:
        """Nothing to do: the log says what has to go, see ``take_back``."""


def with_at_once(
    graph: FlowGraph, sinks: Mapping[SinkId, Sink], *, renamed: Collection[str] = ()
) -> dict[SinkId, Sink]:
    """The sinks of a flow as the service uses them. ``renamed``: operators that go back under these new names."""
    nodes = {node.sink: node for node in graph.sinks}
    return {
        name: _at_once(sink, nodes[name], graph.flow, renamed) if nodes[name].publish == "at_once" else sink
        for name, sink in sinks.items()
    }


def _at_once(sink: Sink, node: SinkNode, flow: FlowName, renamed: Collection[str]) -> AtOnce:
    if node.operator in renamed:
        # A log under a new name no longer says in which generations its batches ran: nothing could be taken back.
        raise RecoveryError(
            f"sink {node.sink} publishes at once, and its operator cannot go back under another name",
            next_step='restore it under its old name, or with publish="checkpoint" and another target',
            flow=flow,
            operator=node.operator,
        )
    return AtOnce(sink, node, flow)
