"""The progress port: a start tells what it does, for a person who waits."""

from __future__ import annotations

import enum
from typing import Protocol


class Step(enum.StrEnum):
    """The steps of a start, in their order. The values are shown to users."""

    FLOW = "flow"
    JAVA = "Java"
    SPARK = "Spark"
    RECOVERY = "recovery"
    QUERIES = "queries"


class Progress(Protocol):
    """Each call tells something. It never blocks and never fails: telling must not disturb the start."""

    def begin(self, step: Step, detail: str = "") -> None:
        """A step begins; the one before it has ended."""
        ...

    def tell(self, detail: str, of_bytes: int = 0) -> None:
        """What the present step does now, or has found. ``of_bytes``: how much it has to do; 0: not known."""
        ...

    def add_bytes(self, size_bytes: int) -> None:
        """So many more of these bytes are done. Called on any thread."""
        ...


class NoProgress:
    """Tells nothing."""

    def begin(self, step: Step, detail: str = "") -> None:
        pass

    def tell(self, detail: str, of_bytes: int = 0) -> None:
        pass

    def add_bytes(self, size_bytes: int) -> None:
        pass
