"""Which generation's entry stands at which place of a channel's log.

A restore forks the log: the new generation goes on after the barrier, older entries stay readable through the
lineage, and what a zombie writes into its own generation later is read by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cutline.errors import InvariantViolation
from cutline.model.ids import START, Generation, Position


class Span(msgspec.Struct, frozen=True, array_like=True):
    """From ``start`` on (up to the next span) entries are those of ``generation``."""

    generation: Generation
    start: Position


class Lineage(msgspec.Struct, frozen=True):
    """Spans with strictly growing generations and never falling starts."""

    spans: tuple[Span, ...]

    @classmethod
    def begin(cls, generation: Generation) -> Lineage:
        return cls(spans=(Span(generation, START),))

    @property
    def generation(self) -> Generation:
        """The generation that writes now."""
        return self.spans[-1].generation

    def fork(self, generation: Generation, at: Position) -> Lineage:
        """The lineage in which ``generation`` writes from ``at`` on."""
        if generation <= self.generation:
            raise InvariantViolation(f"generation {generation} cannot follow {self.generation}")
        kept = tuple(span for span in self.spans if span.start < at)
        return Lineage(spans=(*kept, Span(generation, at)))

    def owner(self, seq: Position) -> Generation:
        """Whose entry stands at this place."""
        for span in reversed(self.spans):
            if span.start <= seq:
                return span.generation
        raise InvariantViolation(f"position {seq} lies before the lineage")

    def shows(self, generation: Generation, seq: Position) -> bool:
        """Whether what a generation has written at this place is visible."""
        return self.spans[0].start <= seq and self.owner(seq) == generation

    def ranges(self) -> Iterator[tuple[Generation, Position, Position | None]]:
        """(generation, first, one past the last or None for "still growing")."""
        ends: list[Position | None] = [span.start for span in self.spans[1:]]
        for span, end in zip(self.spans, [*ends, None], strict=True):
            yield span.generation, span.start, end
