"""The names and numbers that all other modules use. An id is a type, never a bare ``int`` or ``str``.

The limits are those of stored records: msgspec checks them when it decodes one. Names become names of files.
"""

from __future__ import annotations

from typing import Annotated, NewType

from msgspec import Meta

#: Names become folder names, metric labels and parts of URLs.
NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,62}\Z"
#: Numbers have room to grow before they leave the 64 bits that files, databases and Spark have for them.
MOST = 1 << 62

_Name = Annotated[str, Meta(pattern=NAME)]
_Number = Annotated[int, Meta(ge=0, le=MOST)]

FlowName = NewType("FlowName", _Name)
#: Also the id of the operator's output channel: an operator writes exactly one log.
OperatorId = NewType("OperatorId", _Name)
SinkId = NewType("SinkId", _Name)
#: One state partition of an operator; a stateless operator has the single subtask 0.
Subtask = NewType("Subtask", _Number)

#: Number of a checkpoint. Only grows; never used twice, not even after a rollback.
Epoch = NewType("Epoch", _Number)
#: Number of a generation of the flow: one run, or one restore of a region. A higher number fences all lower ones.
Generation = NewType("Generation", _Number)
#: Spark's micro-batch id. ``NO_BATCH`` stands for "before the first batch".
BatchId = NewType("BatchId", Annotated[int, Meta(ge=-1, le=MOST)])
#: A position between two entries of a channel's log: everything below it has been read.
Position = NewType("Position", _Number)

#: Identifies code: the beginning of a SHA-256 hash. Empty: not known.
CodeHash = NewType("CodeHash", Annotated[str, Meta(pattern=r"^([0-9a-f]{12})?\Z")])

NO_EPOCH = Epoch(0)
NO_BATCH = BatchId(-1)
START = Position(0)
#: Of records of former versions.
NO_CODE = CodeHash("")

#: How many of something, and how many bytes.
Count = Annotated[int, Meta(ge=0, le=MOST)]
SizeBytes = Annotated[int, Meta(ge=0, le=MOST)]
#: A moment up to the year 9999, so that every calendar can show it.
MomentMs = Annotated[int, Meta(ge=0, le=253_402_300_799_999)]
Crc32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
#: The version of a program, as it is shown in messages. Empty: not known.
Version = Annotated[str, Meta(pattern=r"^[A-Za-z0-9.+_-]{0,64}\Z")]
#: One name in a folder that Cutline made.
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
#: A sentence that a person wrote or reads.
Text = Annotated[str, Meta(max_length=100_000)]
