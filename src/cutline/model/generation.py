"""The record of one generation of a flow."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cutline.model import validation
from cutline.model.history import Identity
from cutline.model.ids import (
    NO_CODE,
    CodeHash,
    Count,
    Epoch,
    Generation,
    MomentMs,
    OperatorId,
    Position,
    SinkId,
    Text,
    Version,
)
from cutline.model.validation import Problem

#: (generation, first position) pairs; see ``cutline.protocol.history.lineage``.
Spans = list[tuple[Generation, Position]]


class LostInput(msgspec.Struct, frozen=True, kw_only=True):
    """Input that an operator should have read and that is lost; the flow continued without it, as configured."""

    operator: OperatorId
    #: A file, or a range: "stream ORDERS: sequences 120 to 340".
    what: Text
    why: Text
    #: Number of files or messages, as far as known.
    parts: Count


class OperatorCode(msgspec.Struct, frozen=True, kw_only=True):
    """The code of one operator."""

    #: Its function, with what that depends on in its file.
    function: CodeHash
    #: Inputs, subtasks, output mode and options, as the code declares them.
    declaration: CodeHash


class FlowCode(msgspec.Struct, frozen=True, kw_only=True):
    """Which code a generation runs; see ``cutline.fingerprint``. No text of it: savepoints and buckets hold copies."""

    #: Of everything below; manifests name it.
    hash: CodeHash = NO_CODE
    python: Version
    pyspark: Version
    cutline: Version
    operators: dict[OperatorId, OperatorCode]
    sinks: dict[SinkId, CodeHash]


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of the flow. Created conditionally: of two starts that use the same number, one fails."""

    generation: Generation
    started_ms: MomentMs
    #: resume, alone, regional, local, remote or fresh.
    path: Text
    #: The epoch the flow was restored to; None when nothing was restored.
    restored_epoch: Epoch | None
    reason: Text
    #: Per channel: which generation's entries are visible where.
    lineage: dict[OperatorId, Spans]
    #: Per operator: the generation whose spark_checkpoint_dir it runs on.
    spark_dirs: dict[OperatorId, Generation]
    #: Per operator: its inputs, in the order in which Spark numbers its sources.
    inputs: dict[OperatorId, list[OperatorId]]
    #: Per operator: the Arrow schema of its rows, as base64 of the IPC message.
    schemas: dict[OperatorId, str]
    #: Each checkpoint covers a single operator; no cut spans the flow.
    is_per_operator: bool = False
    #: Operators whose log continues no log of the same name from before this generation: renamed or new ones.
    begun: dict[OperatorId, Generation] = {}
    #: Channels without a writer, because their operator was dropped or renamed, and their entries that belong to the
    #: history: kept checkpoints may need them.
    left: dict[OperatorId, Spans] = {}
    #: What its sources could not reread.
    lost_input: list[LostInput] = []
    #: Which generation it is, whatever number others give to theirs; empty in records of former versions.
    identity: Identity = ""
    #: The generation that it continues, or whose checkpoint it restores; empty: none, or not known.
    parent: Identity = ""
    #: The host that began it, for messages. No path: savepoints and buckets hold copies of this record.
    host: Text = ""
    #: What it runs; None in records of former versions.
    code: FlowCode | None = None
    #: When the flow first ran this code.
    code_since_ms: MomentMs = 0
    #: The automatic savepoint of the state from which this code continues; empty: the generation before ran the same
    #: code, or none was taken.
    saved: Text = ""
    #: The savepoint that was restored by request; empty: none was.
    restored_savepoint: Text = ""

    def problems(self) -> Iterator[Problem]:
        """What no generation of ours says; see ``cutline.model.validation``."""
        for name, spans in self.lineage.items():
            yield from validation.of_spans(f"lineage.{name}", spans)
        for name, spans in self.left.items():
            yield from validation.of_spans(f"left.{name}", spans)
        for name, encoded in self.schemas.items():
            yield from validation.of_base64(f"schemas.{name}", encoded)
