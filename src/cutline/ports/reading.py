"""The readers' side of a sink: what it shows as of one epoch, and what is new since an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.publish.flow_epochs import Standing

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """What a reader asks for."""

    #: Only rows of later epochs.
    after: Epoch = NO_EPOCH
    #: As it was when this epoch was newest; None: as it is now.
    as_of: Epoch | None = None
    #: Whose epochs count, if several sinks write to the target.
    flow: str | None = None
    sink: str | None = None

    def reaches(self, epoch: Epoch) -> bool:
        """Whether the epoch is not too new."""
        return self.as_of is None or epoch <= self.as_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """Rows of whole epochs. Later epochs do not change it."""

    flow: str
    sink: str
    #: The newest epoch whose rows are among these. Keep it with what you make of them: next time read ``after`` it.
    epoch: Epoch
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]]

    def to_arrow(self) -> pa.Table:
        import pyarrow as pa

        return pa.Table.from_batches(self.batches(), self.schema)

    def to_spark(self, spark: Any) -> Any:
        """A DataFrame of the rows, which go through the driver: for what fits into its memory."""
        return spark.createDataFrame(self.to_arrow())


@runtime_checkable
class Readable(Protocol):
    """A sink whose target can be asked for whole epochs. It need not be opened: readers run beside the flow."""

    def read(self, request: ReadRequest) -> ReadResult: ...


@runtime_checkable
class TellsStanding(Protocol):
    """A readable sink whose target can be compared with those of the flow's other sinks."""

    def standing(self, request: ReadRequest) -> Standing:
        """What the target says about itself; only ``flow`` and ``sink`` of the request count. Reads no rows."""
        ...


@dataclass(frozen=True, slots=True)
class FlowRead(Mapping[str, ReadResult]):
    """All tables of a flow at one epoch: the result of each sink, by the sink's name."""

    flow: str
    #: Every table is as it was when this epoch was newest. ``epoch`` of a single result may be lower: its newest rows.
    epoch: Epoch
    results: Mapping[str, ReadResult]

    def __getitem__(self, name: str) -> ReadResult:
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)
