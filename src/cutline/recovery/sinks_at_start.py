"""What sinks have published already decides which ways back there are: they are asked before one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cutline.coordinator.manifests import epoch_in, newest_of, not_held
from cutline.errors import RecoveryError
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_EPOCH, Epoch, SinkId
from cutline.ports import Manifest, RewindsSoFar, Sink
from cutline.protocol.history.evolution import Matching


class SinksAtStart:
    """The sinks of a flow, open and at rest."""

    def __init__(self, graph: FlowGraph, sinks: Mapping[SinkId, Sink], problem: Callable[[str], None]) -> None:
        """``problem`` hears of what does not hold."""
        self._graph = graph
        self._sinks = sinks
        self._problem = problem

    def has(self, sink: SinkId) -> bool:
        return sink in self._sinks

    def published(self, sink: SinkId) -> Epoch:
        return (self._sinks[sink].published() if sink in self._sinks else None) or NO_EPOCH

    def highest(self) -> Epoch:
        """That any of them has ever seen."""
        return max((sink.highest() for sink in self._sinks.values()), default=NO_EPOCH)

    def are_ahead(self, manifests: Sequence[Manifest]) -> bool:
        """Whether a sink has published what the records no longer know: going on would leave a gap or a repetition."""
        are_ahead = False
        for node in self._graph.sinks:
            published = self.published(node.sink)
            newest = epoch_in(manifests, node.operator)
            if published > newest and node.on_rollback != "keep":  # what is kept may well be ahead
                self._problem(
                    f"sink {node.sink} has published epoch {published}, the newest readable checkpoint is {newest}"
                )
                are_ahead = True
        return are_ahead

    def refuse_behind(self, seen: Mapping[SinkId, Epoch], restore_to: Epoch | None) -> None:
        """A sink that no longer has what was published to it would go on with rows missing.

        ``seen``: the newest epoch with rows that each was told to publish. Whoever goes back to what it still has
        publishes the rest again.
        """
        for node in self._graph.sinks:
            published = self.published(node.sink)
            if node.publish == "at_once":
                continue  # its numbers are of batches, and it looks for itself before anything is taken back
            if published >= seen.get(node.sink, NO_EPOCH) or (restore_to is not None and restore_to <= published):
                continue
            has = f"holds what was published up to epoch {published}" if published else "holds nothing of this flow"
            way_out = f"go back to where it is: cutline restore --to {published}; or " if published else ""
            raise RecoveryError(
                f"sink {node.sink} {has}, but epoch {seen[node.sink]} was published to it: "
                "it was restored from a backup, emptied, or is another target",
                next_step=f"{way_out}put its target right; to go on without what is missing: "
                f"cutline sinks --flow {self._graph.flow} --accept {node.sink}",
                flow=self._graph.flow,
            )

    def refuse_to_empty(self, manifests: Sequence[Manifest], matching: Matching) -> None:
        """A wiped or mistyped storage folder must never empty a table."""
        old_names = {new: old for old, new in matching.renaming.new_names.items()}
        for node in self._graph.sinks:
            published = self.published(node.sink)
            if published and newest_of(manifests, old_names.get(node.operator, node.operator)) is None:
                raise RecoveryError(
                    f"sink {node.sink} holds what this flow published up to epoch {published}, "
                    "but the storage has no readable checkpoint of it",
                    next_step="check the storage option; to start over, empty the sink's target or name another",
                    flow=self._graph.flow,
                )

    def refuse_to_pass(self, epoch: Epoch) -> None:
        """No sink is taken back behind what it has published that cannot be, or is not to be."""
        for node in self._graph.sinks:
            published = self.published(node.sink)
            if published <= epoch or node.on_rollback == "keep":
                continue
            sink = self._sinks[node.sink]
            oldest = sink.oldest_rewind() if isinstance(sink, RewindsSoFar) else NO_EPOCH
            if node.on_rollback == "fail" or not sink.can_rewind or epoch < oldest:
                why = "cannot take rows back" if epoch >= oldest else f"cannot take rows back behind epoch {oldest}"
                why = "is not to be taken back" if node.on_rollback == "fail" else why
                raise RecoveryError(
                    f"sink {node.sink} has published epoch {published}, the flow would go back to epoch {epoch}, "
                    f"and the sink {why}",
                    next_step='empty its target, mend the later checkpoint, or give it on_rollback="keep"',
                    flow=self._graph.flow,
                )

    def slowest(self, manifest: Manifest, known: Sequence[Manifest]) -> Epoch:
        """How far all of them are, as far as a checkpoint and those that are known before it concern them."""
        before = [one for one in known if one.epoch < manifest.epoch]
        return min(
            (max(self.published(node.sink), not_held(before, node.operator)) for node in self._graph.sinks),
            default=manifest.epoch,
        )
