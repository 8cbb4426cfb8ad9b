"""The source guard port: can a source reread from a position, and how is a position moved past lost input?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from cutline.model.plan import PlannedSource, RecordedSource
from cutline.ports.inspection import SourceProgress, SourceReport


class Today(NamedTuple):
    """What is known about a source beside its offset at a checkpoint."""

    #: The newest offset in the live directory, if there is one.
    newest: bytes | None = None
    #: What the operator's function reads now; empty: unknown, because the operator was not planned.
    planned: Sequence[PlannedSource] = ()
    #: What was recorded beside the offset; empty: its kind needs nothing, or a former version wrote the offset.
    recorded: Sequence[RecordedSource] = ()


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
    #: (any later offset, its folder in ``sources/``) → where reading began, as far as known: Spark itself does not
    #: record it for every source. Set together with ``moved``.
    beginning: Callable[[bytes, Path], bytes] | None = None
    #: Spark's name of the format, known before there is an offset; empty: the format does not identify this kind.
    format: str = ""
    #: (its folder in ``sources/``, where reading begins) → writes that down where Spark keeps it. None: Spark does not.
    begin_at: Callable[[Path, bytes], None] | None = None
    #: (what the operator reads now) → what must be recorded beside its offsets. Raises StoreError if a server is needed
    #: and does not answer. None: its offsets say everything.
    recorded: Callable[[PlannedSource], RecordedSource] | None = None
    #: (the source as it is set up now) → why it cannot be guarded; empty: it can.
    why_not: Callable[[PlannedSource], str] | None = None
    #: (the source as it is set up now) → what a person should know of it although it is guarded; empty: nothing.
    warning: Callable[[PlannedSource], str] | None = None
    #: (the newest offset, offsets of checkpoints, what else is known) → lag, and until when each of them can be reread.
    #: Raises StoreError if a server does not answer. None: nothing is known of it; or None is returned, for one source.
    progress: Callable[[bytes, Sequence[bytes], Today], SourceProgress | None] | None = None


class SourceGuard(Protocol):
    """Knows the kinds of sources that can be checked. A source of another kind is not guarded."""

    def kind_of(self, position: bytes | None, folder: Path) -> SourceKind | None:
        """The kind of a source with this offset. ``folder``: its folder in the live ``sources/``. None: unknown."""
        ...

    def why_not_guarded(self, source: PlannedSource) -> str | None:
        """Why a source that has read nothing yet is not guarded; None: it is guarded."""
        ...

    def warning(self, source: PlannedSource) -> str:
        """What a person should know of a source although it is guarded; empty: nothing."""
        ...

    def recorded(self, planned: Sequence[PlannedSource], former: Sequence[RecordedSource]) -> list[RecordedSource]:
        """What to record beside the offsets of an operator's query. ``former``: what is recorded there.

        Servers are asked only about what is not recorded yet; if they do not answer, it is recorded without ids.
        """
        ...


class NoGuard:
    """Knows no kind of source."""

    def kind_of(self, position: bytes | None, folder: Path) -> SourceKind | None:
        return None

    def why_not_guarded(self, source: PlannedSource) -> str | None:
        return "there is no guard"

    def warning(self, source: PlannedSource) -> str:
        return ""

    def recorded(self, planned: Sequence[PlannedSource], former: Sequence[RecordedSource]) -> list[RecordedSource]:
        return []
