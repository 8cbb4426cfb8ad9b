"""Pauses the sources, and waits until everything under way is processed."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from cutline.errors import ConfigError
from cutline.model.graph import FlowGraph
from cutline.model.ids import OperatorId
from cutline.ports.engine import Query
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.parts import FlowParts
from cutline.worker.operator import OperatorService


class SourcePause:
    """Whether the flow's sources get credit for new batches."""

    def __init__(self, graph: FlowGraph, operators: Mapping[OperatorId, OperatorService]) -> None:
        """``operators``: the present services; restoring a region replaces its services."""
        self._sources = graph.sources
        self._operators = operators
        self._is_paused = False
        self._lock = threading.RLock()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def set(self, *, is_paused: bool) -> None:
        with self._lock:
            self._is_paused = is_paused
            for source in self._sources:
                self.settle(self._operators[source])

    def settle(self, service: OperatorService) -> None:
        """Apply the present state to a service that may have just been rebuilt."""
        with self._lock:
            if service.operator in self._sources:
                service.credits.set_paused(self._is_paused)


class Draining:
    """Pauses the sources and waits for the operators."""

    def __init__(self, parts: FlowParts, lifecycle: Lifecycle) -> None:
        self._graph = parts.definition.graph
        self._workers = parts.workers
        self._regions = parts.regions
        self._lifecycle = lifecycle

    @property
    def is_paused(self) -> bool:
        return self._workers.pause.is_paused

    def set_paused(self, *, is_paused: bool) -> None:
        self._workers.pause.set(is_paused=is_paused)

    def pause(self, seconds: float) -> bool:
        """Pause the sources and wait until everything under way is processed; True when drained."""
        self._lifecycle.raise_if_over()
        self.set_paused(is_paused=True)
        return self._lifecycle.wait(self.is_drained, seconds)

    def is_drained(self) -> bool:
        # While a region is being restored, upstream operators do not know yet that their rows will be reread.
        if self._regions.is_busy():
            return False
        operators = self._workers.operators.values()
        return all(one.credits.is_drained() and not one.credits.is_in_batch() for one in operators)

    def wait_all_processed(self) -> None:
        """Wait until every operator has processed everything that the sources have now."""
        if self.is_paused:
            raise ConfigError("the flow is paused", next_step="call resume() first", flow=self._graph.flow)
        appended = -1
        while True:
            for name in self._graph.names:
                self.wait_processed(name)
                self._wait_read(name)
            # A batch that ran meanwhile may have given a later operator more input: repeat until none ran.
            now = sum(service.batches_total for service in self._workers.operators.values())
            if now == appended and self.is_drained():
                return
            appended = now

    def wait_processed(self, operator: OperatorId) -> None:
        """Wait until the operator's query has processed its input, even if it fails and is replaced meanwhile."""
        while (query := self._workers.supervisors[operator].query) is not None:
            query.wait_processed()
            if query.is_active():
                return
            self._wait_replaced(operator, query)

    def _wait_replaced(self, operator: OperatorId, failed: Query) -> None:
        self._lifecycle.wait(lambda: self._workers.supervisors[operator].query is not failed, None)

    def _wait_read(self, operator: OperatorId) -> None:
        """Wait until its consumers have read everything that it has written."""
        operators, ended = self._workers.operators, self._lifecycle.ended
        self._lifecycle.wait(lambda: operators[operator].credits.is_drained() or ended.is_set(), None)
        self._lifecycle.raise_if_over()
