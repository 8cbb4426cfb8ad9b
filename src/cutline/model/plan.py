"""The engine's plan of an operator."""

from __future__ import annotations

import msgspec

from cutline.model.ids import OperatorId


class PlannedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source outside of the flow that an operator's function reads, as it is set up now."""

    #: As Spark calls it: "json", "rate", "cutline_nats".
    format: str
    #: For Spark's file sources the folder, with its scheme unless it is on this file system; empty for all others.
    folder: str = ""
    #: As JSON, exactly the settings that its guard must know: those that determine its rows, or what it subscribes to.
    #: Never a secret: they are stored.
    settings: bytes | None = None
    #: Of a server, as the operator's function names it; empty: there is none, or it is not known.
    address: str = ""


class RecordedSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a query's directory records of a source whose offsets do not say enough: it is part of every snapshot."""

    format: str
    address: str
    settings: str
    #: By name (of a topic): which of those that may have had this name it is. Unknown ones are left out.
    ids: dict[str, str] = {}


class OperatorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine knows about an operator before anything runs."""

    operator: OperatorId
    subtasks: int
    is_stateful: bool
    #: Arrow schema of the rows, as an IPC message.
    schema_ipc: bytes
    #: What it reads from outside of the flow, each once.
    sources: tuple[PlannedSource, ...] = ()
