"""After the last fault: everything is read, checkpointed, published and collected, within a bounded time."""

from __future__ import annotations

from collections.abc import Callable

from cutline.model.ids import NO_EPOCH
from cutline.protocol.messages.coordinator import CheckpointOptions
from cutline.testing.simulator.site import Site
from cutline.testing.simulator.storage.log import Data
from cutline.testing.simulator.trouble import People
from cutline.testing.simulator.world import Steps, Violation

#: After the last fault everything must be done within this time, and so much more for each operator.
_LIMIT_MS = 60_000
_LIMIT_PER_OPERATOR_MS = 4_000


class FairWeather:
    """Nothing goes wrong any more; what went wrong before must not be felt."""

    def __init__(self, site: Site, people: People) -> None:
        self._site = site
        self._world = site.world
        self._people = people

    def run(self) -> None:
        if not self._site.refusal:
            self._expect("everything is read and published", self._drain)
        if self._site.refusal:
            return  # a person must decide; what readers see was checked with every commit
        self._expect("what nothing needs is gone", self._collect)

    def _expect(self, what: str, steps_of: Callable[[], Steps]) -> None:
        done: list[bool] = []

        def steps() -> Steps:
            yield from steps_of()
            done.append(True)

        self._world.spawn(steps())
        limit_ms = _LIMIT_MS + _LIMIT_PER_OPERATOR_MS * len(self._site.graph.operators)
        if not self._world.run(lambda: bool(done or self._site.refusal), limit_ms=limit_ms):
            why = self._unpublished()
            raise Violation(f"not in {limit_ms} ms after the last fault: {what}{': ' if why else ''}{why}")

    def _drain(self) -> Steps:
        """Everything is read by every operator; then one more checkpoint, which every sink publishes."""
        self._people.pause(self._site.flow, is_paused=False)
        while not self._is_drained():
            yield 20
        while True:
            flow = self._site.flow
            coordinator = flow.coordinator
            if coordinator is None or not coordinator.is_alive:
                yield 20
                continue
            request = self._people.request(coordinator, CheckpointOptions(alignment_limit_ms=None))
            while request not in coordinator.answers and flow.coordinator is coordinator:
                yield 10
            answer = coordinator.answers.get(request)
            if answer is not None and answer.completed:
                break
        # Sinks answer after their checkpoint is complete; those that publish immediately may have failed before it.
        while self._unpublished() and not self._site.refusal:
            yield 20

    def _is_drained(self) -> bool:
        flow = self._site.flow
        if flow.coordinator is None or set(flow.operators) != set(flow.graph.operators):
            return False
        for name, process in flow.operators.items():
            if not process.is_alive or not process.credits.is_drained():
                return False
            if not flow.graph.inputs[name] and not process.query.is_exhausted():
                return False
        return True

    def _unpublished(self) -> str:
        """What is missing of what a run without faults publishes: every row of every source on every path, once."""
        graph, rows = self._site.graph, self._site.settings.rows_per_source
        for name, operator in graph.sinks.items():
            for path in graph.paths[operator].values():
                published = self._site.sinks[name].next_row.get(path, 0)
                if published != rows:
                    return f"{name} has published {published} of {rows} rows of path {path}"
        return ""

    def _collect(self) -> Steps:
        """After a collection nothing is left that no retained epoch needs."""
        for epoch in sorted(self._site.flow.disk.pins):
            self._people.pin(self._site.flow, epoch, is_pinned=False)
        yield 50
        while not self._is_collected():
            coordinator = self._site.flow.coordinator
            if coordinator is not None and coordinator.is_alive and not coordinator.core.pending:
                coordinator.collector.collect_now()
            yield 100

    def _is_collected(self) -> bool:
        flow, disk = self._site.flow, self._site.flow.disk
        live = flow.live()
        reached = {
            blob
            for one in live
            for name in flow.graph.operators
            if (record := disk.record_of(one, name)) is not None
            for blob in record.blobs
        }
        if disk.blobs - reached - flow.references():
            return False
        oldest = live[0].manifest.epoch if live else NO_EPOCH
        for name in flow.graph.operators:
            attached = [one for one in live if one.manifest.epoch not in disk.detached]
            needed = min(one.needs.channels[name] for one in attached if name in one.needs.channels)
            entries = disk.logs[name].view(flow.lineage(name)).entries
            if any(isinstance(entry, Data) and entry.seq < needed for entry in entries[:-1]):
                return False
        return all(epoch >= oldest for epoch, _, _ in disk.records)
