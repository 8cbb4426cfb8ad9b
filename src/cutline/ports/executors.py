"""The executors port: work that is done beside the queries, on the machines that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Part = TypeVar("Part")
Report = TypeVar("Report")


class Executors(Protocol):
    """A cluster's executors, of which the queries keep the larger part."""

    def are_elsewhere(self) -> bool:
        """Whether they run on other machines than this process, with processors and a line of their own."""
        ...

    def slots(self) -> int:
        """How many parts may be worked on at once without getting into the way of the queries; at least 1."""
        ...

    def run(self, work: Callable[[Part], Report], parts: Sequence[Part], *, limit_s: float) -> list[Report]:
        """Let each part be worked on, all at once, and return the reports in the same order.

        Work, parts and reports are pickled. Work may be done twice, and for a while after this has raised: whatever it
        does must bear that. Raises ExecutorsFailedError: nothing is known of what was done.
        """
        ...

    def cancel(self) -> None:
        """Make a ``run`` that is under way end soon, with ExecutorsFailedError. Without one nothing happens."""
        ...
