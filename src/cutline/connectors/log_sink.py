"""What sinks into logs (Kafka, JetStream) share: rows wait in a folder, the driver publishes them, nothing is rewound.

A log shows every message it receives, so the sink sends none before the checkpoint exists.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cutline.connectors.rows import rows_schema, storable_schema
from cutline.connectors.sink_base import OpenedSink
from cutline.connectors.staged_files import pieces_of
from cutline.connectors.staging_folder import StagingFolder, check_message
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.protocol.publish.sink_ledger import EPOCHS_REMEMBERED, SinkLedger

if TYPE_CHECKING:
    import os

    import pyarrow as pa

    from cutline.model.staging import StagedBatch
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit


class LogSink:
    """Exactly-once messages. A subclass opens its log, loads its ledger and publishes an epoch with rows."""

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = False

    def __init__(
        self, opened: OpenedSink, *, kind: str, target: str, staging: str | os.PathLike[str], value: str | None
    ) -> None:
        """``kind`` and ``target``: the sink and its target, as users call them."""
        #: The column that is the message; None: the whole row as JSON.
        self.value = value
        self._log_name = target
        self._opened = opened
        self._staging = StagingFolder(staging, sink=kind)
        self._lock = threading.Lock()
        self._schema_ipc = b""

    def stager(self) -> Stager:
        return self._staging.stager(self._opened.context.sink, self._schema_ipc)

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        self._staging.check(
            staged, hint="find out what deletes files in the staging folder, then take another checkpoint"
        )
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the rows of the epoch that the log lacks. An epoch without rows leaves no trace."""
        self._opened.check_covered(permit, staged)
        with self._lock:
            if pieces_of(staged):
                self._publish(permit, staged)
            self._staging.collect(permit, staged)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        self._opened.require()
        self._staging.abort(staged)

    def published(self) -> Epoch | None:
        return self._newest() or None

    def highest(self) -> Epoch:
        return self._newest()

    def rewind(self, epoch: Epoch) -> None:
        raise SinkError(
            f"{self._log_name} cannot be rewound",
            next_step='choose on_rollback="keep" or "fail" for this sink',
            sink=self._opened.context.sink,
            epoch=epoch,
        )

    def _take_schema(self, context: SinkContext) -> pa.Schema:
        """The schema of the rows as they are staged. Raises SinkError if they cannot be messages."""
        schema = storable_schema(rows_schema(context))
        check_message(schema, self.value)
        self._schema_ipc = schema.serialize().to_pybytes()
        self._staging.enter(context)
        return schema

    def _publish(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        raise NotImplementedError

    def _newest(self) -> Epoch:
        """The newest published epoch, according to the log itself."""
        raise NotImplementedError


def ledger_of(
    flow: FlowName, sink: SinkId, *, claim: str, published: Mapping[str, str], newest: Epoch = NO_EPOCH
) -> SinkLedger:
    """``published``: epochs and digests as in the ledger's message."""
    digests = {Epoch(int(epoch)): digest for epoch, digest in published.items()}
    return SinkLedger(flow=flow, sink=sink, published=newest, digests=digests, claim=claim)


def with_published(published: Mapping[str, str], epoch: Epoch, digest: str) -> dict[str, str]:
    """The same with one more epoch, and without the oldest if there are too many."""
    kept = list(published.items())[-EPOCHS_REMEMBERED + 1 :]
    return dict([*kept, (str(epoch), digest)])
