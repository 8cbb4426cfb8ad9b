"""The stores of the local tier, opened together: they share one folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutline.model.ids import OperatorId
from cutline.model.layout import Layout
from cutline.model.plan import PlannedSource
from cutline.ports.engine import LiveDirs
from cutline.ports.source_guard import NoGuard, SourceGuard
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.generations import LocalGenerationStore
from cutline.storage.query_dir import LocalQueryDir


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStore:
    """One flow's stores. Callers get only the store that they need."""

    query_dirs: LocalQueryDir
    checkpoints: LocalCheckpointStore
    generations: LocalGenerationStore

    @classmethod
    def open(
        cls,
        layout: Layout,
        guard: SourceGuard,
        *,
        live_dirs: LiveDirs | None = None,
        sources: Mapping[OperatorId, Sequence[PlannedSource]] | None = None,
    ) -> LocalStore:
        """For the process that runs the flow; every other process uses ``reading``.

        ``guard`` checks whether the input of sources still exists.
        ``live_dirs``: Spark's directories, if those in the flow's folder are mirrors of them.
        ``sources``: what operators read now, if known.
        """
        checkpoints = LocalCheckpointStore(layout)
        query_dirs = LocalQueryDir(layout, checkpoints.place, guard, live_dirs=live_dirs, sources=sources)
        return cls(query_dirs=query_dirs, checkpoints=checkpoints, generations=LocalGenerationStore(layout))

    @classmethod
    def reading(cls, layout: Layout) -> LocalStore:
        """Opening it changes nothing, so another process may be running the flow. It cannot restore."""
        checkpoints = LocalCheckpointStore(layout, is_reader=True)
        return cls(
            query_dirs=LocalQueryDir(layout, checkpoints.place, NoGuard()),
            checkpoints=checkpoints,
            generations=LocalGenerationStore(layout, is_reader=True),
        )
