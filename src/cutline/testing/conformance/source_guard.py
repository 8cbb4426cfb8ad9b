"""The suite that every source guard must pass."""

from __future__ import annotations

from pathlib import Path

from cutline.model.plan import PlannedSource
from cutline.ports.source_guard import SourceGuard


class SourceGuardConformance:
    """Subclasses have fixtures ``guard`` and ``unknown``: a planned source of a kind that it does not know."""

    def test_a_position_of_an_unknown_kind_is_not_guarded(self, guard: SourceGuard, tmp_path: Path) -> None:
        assert guard.kind_of(b'{"kind":"of another program"}', tmp_path) is None

    def test_a_source_of_an_unknown_kind_says_why(self, guard: SourceGuard, unknown: PlannedSource) -> None:
        assert guard.why_not_guarded(unknown)
