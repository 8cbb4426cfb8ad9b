"""The executors port: work beside the queries, on the machines that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Part = TypeVar("Part")
Report = TypeVar("Report")


class Executors(Protocol):
    """A cluster's executors; the queries keep the larger share of them."""

    def are_elsewhere(self) -> bool:
        """Whether they run on other machines than this process, with their own processors and network."""
        ...

    def slots(self) -> int:
        """How many parts may be processed in parallel without slowing the queries down; at least 1."""
        ...

    def run(self, work: Callable[[Part], Report], parts: Sequence[Part], *, limit_s: float) -> list[Report]:
        """Process all parts in parallel and return the reports in the same order.

        Work, parts and reports are pickled. Work may run twice, and may continue for a while after this call has
        raised, so it must be idempotent. Raises ExecutorsFailedError: how much was done is unknown.
        """
        ...

    def cancel(self) -> None:
        """Make a ``run`` that is under way end soon, with ExecutorsFailedError. Without one, do nothing."""
        ...
