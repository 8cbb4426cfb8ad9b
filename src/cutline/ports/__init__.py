"""What the service needs from outside. Each port is small, has a real adapter and a conformance suite.

Adapters import this package and what lies below it, never one another.
"""

from cutline.model.checkpoint import (
    ChannelCut,
    Manifest,
    OperatorCut,
    OperatorRecord,
    SinkRecord,
    SnapshotFile,
    SubtaskCut,
    SubtaskRecord,
    Tombstone,
)
from cutline.model.cut import InFlight
from cutline.model.entries import Segment
from cutline.model.generation import GenerationRecord, LostInput, Spans
from cutline.model.plan import OperatorPlan, PlannedSource
from cutline.model.staging import Piece, StagedBatch
from cutline.ports.checkpoint_store import CheckpointStore, HeldFiles, StoredRecord
from cutline.ports.engine import (
    BatchHandler,
    Engine,
    LiveDirs,
    Query,
    SegmentPlace,
    StagedTask,
    StageJob,
    StreamingBatch,
)
from cutline.ports.executors import Executors
from cutline.ports.generation_store import GenerationStore
from cutline.ports.metadata import EpochOutcome, MetadataStore, PendingRecord
from cutline.ports.objects import ObjectInfo, ObjectStore
from cutline.ports.query_dir import FileSet, QueryDir
from cutline.ports.reading import FlowRead, Readable, ReadRequest, ReadResult, TellsStanding
from cutline.ports.sinks import (
    Claimable,
    RecordsReach,
    RewindsSoFar,
    RewindsTogether,
    Sink,
    SinkContext,
    StageAttempt,
    Stager,
    StageWriter,
)

__all__ = [
    "BatchHandler",
    "ChannelCut",
    "CheckpointStore",
    "Claimable",
    "Engine",
    "EpochOutcome",
    "Executors",
    "FileSet",
    "FlowRead",
    "GenerationRecord",
    "GenerationStore",
    "HeldFiles",
    "InFlight",
    "LiveDirs",
    "LostInput",
    "Manifest",
    "MetadataStore",
    "ObjectInfo",
    "ObjectStore",
    "OperatorCut",
    "OperatorPlan",
    "OperatorRecord",
    "PendingRecord",
    "Piece",
    "PlannedSource",
    "Query",
    "QueryDir",
    "ReadRequest",
    "ReadResult",
    "Readable",
    "RecordsReach",
    "RewindsSoFar",
    "RewindsTogether",
    "Segment",
    "SegmentPlace",
    "Sink",
    "SinkContext",
    "SinkRecord",
    "SnapshotFile",
    "Spans",
    "StageAttempt",
    "StageJob",
    "StageWriter",
    "StagedBatch",
    "StagedTask",
    "Stager",
    "StoredRecord",
    "StreamingBatch",
    "SubtaskCut",
    "SubtaskRecord",
    "TellsStanding",
    "Tombstone",
]
