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
    #: As JSON, exactly the settings that determine its rows; only for sources that store no rows.
    settings: bytes | None = None
    #: Of a server, as the operator's function names it; empty: there is none, or it is not known.
    address: str = ""


class OperatorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine knows about an operator before anything runs."""

    operator: OperatorId
    subtasks: int
    is_stateful: bool
    #: Arrow schema of the rows, as an IPC message.
    schema_ipc: bytes
    #: What it reads from outside of the flow, each once.
    sources: tuple[PlannedSource, ...] = ()
