"""The source guard port: can a source reread from a position, and how is a position moved past lost input?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from cutline.model.plan import PlannedSource
from cutline.ports.inspection import SourceReport


class Today(NamedTuple):
    """What is known about a source beside its offset at a checkpoint."""

    #: The newest offset in the live directory, if there is one.
    newest: bytes | None = None
    #: What the operator's function reads now; empty: unknown, because the operator was not planned.
    planned: Sequence[PlannedSource] = ()


class SourceKind(NamedTuple):
    """One kind of source."""

    name: str
    #: Whether an offset at the checkpoint, as JSON, is of this kind; None: the source had read nothing yet.
    is_mine: Callable[[bytes | None, Path], bool]
    #: (offset at the checkpoint, its folder in the live ``sources/``, what else is known) → what cannot be reread.
    #: Raises StoreError if a server is needed and does not answer.
    check: Callable[[bytes | None, Path, Today], SourceReport]
    #: (an offset and those of batches planned after it, what else is known) → the same offsets, moved to the earliest
    #: input that exists. None: there is nothing to move; the source simply continues without the lost input.
    moved: Callable[[Sequence[bytes], Today], list[bytes]] | None = None
    #: (any later offset) → where reading began, which Spark itself does not record. Set together with ``moved``.
    beginning: Callable[[bytes], bytes] | None = None
    #: Spark's name of the format, known before there is an offset; empty: the format does not identify this kind.
    format: str = ""


class SourceGuard(Protocol):
    """Knows the kinds of sources that can be checked. A source of another kind is not guarded."""

    def kind_of(self, position: bytes | None, folder: Path) -> SourceKind | None:
        """The kind of a source with this offset. ``folder``: its folder in the live ``sources/``. None: unknown."""
        ...

    def why_not_guarded(self, source: PlannedSource) -> str | None:
        """Why a source that has read nothing yet is not guarded; None: it is guarded."""
        ...


class NoGuard:
    """Knows no kind of source."""

    def kind_of(self, position: bytes | None, folder: Path) -> SourceKind | None:
        return None

    def why_not_guarded(self, source: PlannedSource) -> str | None:
        return "there is no guard"
