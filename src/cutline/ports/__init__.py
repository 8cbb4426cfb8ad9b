"""What the service needs from the world. Each port is small, has a real adapter, and a conformance suite.

Adapters import this package and what lies below it, never one another.
"""

from cutline.ports.engine import (
    BatchHandler,
    Engine,
    LiveDirs,
    OperatorPlan,
    Query,
    Segment,
    SegmentPlace,
    StagedTask,
    StageJob,
    StreamingBatch,
)
from cutline.ports.executors import Executors
from cutline.ports.metadata import EpochOutcome, MetadataStore, PendingRecord
from cutline.ports.objects import ObjectInfo, ObjectStore
from cutline.ports.sinks import Piece, Sink, SinkContext, StageAttempt, StagedBatch, Stager, StageWriter
from cutline.ports.snapshots import (
    ChannelCut,
    FileSet,
    GenerationRecord,
    InFlight,
    LostInput,
    Manifest,
    OperatorCut,
    OperatorRecord,
    Pin,
    SinkRecord,
    SnapshotFile,
    SnapshotStore,
    Spans,
    StoredRecord,
    SubtaskCut,
    SubtaskRecord,
    Tombstone,
)

__all__ = [
    "BatchHandler",
    "ChannelCut",
    "Engine",
    "EpochOutcome",
    "Executors",
    "FileSet",
    "GenerationRecord",
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
    "Pin",
    "Query",
    "Segment",
    "SegmentPlace",
    "Sink",
    "SinkContext",
    "SinkRecord",
    "SnapshotFile",
    "SnapshotStore",
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
    "Tombstone",
]
