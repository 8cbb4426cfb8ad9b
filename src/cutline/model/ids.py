"""The names and numbers that all other modules use. An id is a type, never a bare ``int`` or ``str``."""

from __future__ import annotations

from typing import NewType

FlowName = NewType("FlowName", str)
#: Also the id of the operator's output channel: an operator writes exactly one log.
OperatorId = NewType("OperatorId", str)
SinkId = NewType("SinkId", str)
#: One state partition of an operator; a stateless operator has the single subtask 0.
Subtask = NewType("Subtask", int)

#: Number of a checkpoint. Only grows; never used twice, not even after a rollback.
Epoch = NewType("Epoch", int)
#: Number of a generation of the flow: one run, or one restore of a region. A higher number fences all lower ones.
Generation = NewType("Generation", int)
#: Spark's micro-batch id. ``NO_BATCH`` stands for "before the first batch".
BatchId = NewType("BatchId", int)
#: A position between two entries of a channel's log: everything below it has been read.
Position = NewType("Position", int)

NO_EPOCH = Epoch(0)
NO_BATCH = BatchId(-1)
START = Position(0)
