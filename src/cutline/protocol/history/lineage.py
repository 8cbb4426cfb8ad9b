"""Which generation's entries are visible at which positions of a channel's log.

A restore forks the log: the new generation continues after the barrier, older entries stay readable through the
lineage, and no reader sees what a zombie later writes into its own generation.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cutline.errors import InvariantViolation
from cutline.model.generation import Spans
from cutline.model.ids import START, Generation, Position


class Span(msgspec.Struct, frozen=True, array_like=True):
    """From ``start`` up to the next span, the entries are those of ``generation``."""

    generation: Generation
    start: Position


class Lineage(msgspec.Struct, frozen=True):
    """Spans with strictly ascending generations and starts that never decrease."""

    spans: tuple[Span, ...]

    @classmethod
    def begin(cls, generation: Generation) -> Lineage:
        return cls(spans=(Span(generation, START),))

    @property
    def generation(self) -> Generation:
        """The generation that currently writes."""
        return self.spans[-1].generation

    def fork(self, generation: Generation, at: Position) -> Lineage:
        """The lineage in which ``generation`` writes from ``at`` on."""
        if generation <= self.generation:
            raise InvariantViolation(f"generation {generation} cannot follow {self.generation}")
        kept = tuple(span for span in self.spans if span.start < at)
        return Lineage(spans=(*kept, Span(generation, at)))

    def owner(self, seq: Position) -> Generation:
        """The generation of the visible entry at this position."""
        for span in reversed(self.spans):
            if span.start <= seq:
                return span.generation
        raise InvariantViolation(f"position {seq} lies before the lineage")

    def shows(self, generation: Generation, seq: Position) -> bool:
        """Whether a generation's entry at this position is visible."""
        return self.spans[0].start <= seq and self.owner(seq) == generation

    def parts_from(self, other: Lineage) -> Position | None:
        """The first position at which both lineages show an entry, but not the same one; None if there is none."""
        begin = max(self.spans[0].start, other.spans[0].start)
        changes = {begin, *(span.start for span in (*self.spans, *other.spans) if span.start > begin)}
        return min((seq for seq in changes if self.owner(seq) != other.owner(seq)), default=None)

    def ranges(self) -> Iterator[tuple[Generation, Position, Position | None]]:
        """(generation, first, one past the last or None for "still growing")."""
        ends: list[Position | None] = [span.start for span in self.spans[1:]]
        for span, end in zip(self.spans, [*ends, None], strict=True):
            yield span.generation, span.start, end


def lineage_of(spans: Spans) -> Lineage:
    return Lineage(spans=tuple(Span(generation, start) for generation, start in spans))


def spans_of(lineage: Lineage) -> Spans:
    return [(span.generation, span.start) for span in lineage.spans]
