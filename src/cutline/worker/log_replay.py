"""An operator whose state is behind its own log: it runs the batches in the log again, exactly as they were planned.

Their output is in the log already, so the new output is discarded; running them to the end rebuilds the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import DamagedRecordError, InvariantViolation
from cutline.model.ids import START, BatchId, OperatorId, Position
from cutline.ports.engine import StreamingBatch
from cutline.protocol.history.retention import EpochNeeds
from cutline.protocol.messages.wire import CaughtUp
from cutline.worker.backpressure import StopAtBoundary
from cutline.worker.operator_spec import OperatorPorts, OperatorSpec, OperatorStart
from cutline.worker.outbox import Outbox

log = get_logger(__name__)


def needs_behind_log(channel: ChannelLog, committed: BatchId) -> EpochNeeds | None:
    """What an operator needs to catch up with its log after batch ``committed``; None if it is not behind."""
    following = channel.find_batch(BatchId(committed + 1))
    if committed >= channel.last_batch or following is None:
        return None
    read = channel.positions_after(committed)
    inputs = {name: read.get(name, START) for name in following.positions}
    # The entry of the committed batch stays too: it says where the next one begins to read.
    finished = channel.find_batch(committed) or following
    # Without operators: it says what must stay, not that an operator could begin from there.
    return EpochNeeds(operators=(), channels={channel.operator: finished.seq, **inputs})


class LogReplay:
    """Runs the batches in one operator's log again."""

    def __init__(self, spec: OperatorSpec, start: OperatorStart, ports: OperatorPorts, outbox: Outbox) -> None:
        self._flow = spec.flow
        self._operator = spec.operator
        self._generation = start.generation
        self._channel = start.channel
        self._outbox = outbox
        self._engine = ports.engine
        self._query_dirs = ports.query_dirs
        self._spark_checkpoint_dir: Path = ports.spark_checkpoint_dir
        #: Per-operator mode: the log says how each batch was planned.
        self.keeps_plans = spec.options.is_per_operator
        #: Spark has planned a batch that is in the log, and differently from the logged plan.
        self._is_plan_wrong = False
        #: The operator is behind its own log; its query is restarted for each batch of the log.
        self._is_repeating = False
        #: Batches that were in the log and ran again to rebuild the state.
        self.repeated_total = 0
        #: The last batch of the log has run again.
        self.has_caught_up = False
        #: Per channel, the lowest entry that catching up needs; empty if the state is not behind the log.
        self.needs = self._needs_at_start()

    def _needs_at_start(self) -> Mapping[OperatorId, Position]:
        """Outside per-operator mode no operator is ever behind the newest checkpoint."""
        if not self.keeps_plans:
            return {}
        needs = needs_behind_log(self._channel, self._query_dirs.last_committed(self._spark_checkpoint_dir))
        return needs.channels if needs is not None else {}

    def committed(self, batch: BatchId) -> None:
        """Spark has committed this batch. Without new input no later batch says that the operator has caught up."""
        if batch >= self._channel.last_batch:
            self._report_caught_up()

    def _report_caught_up(self) -> None:
        """Any thread may call it; a second report changes nothing."""
        if self.needs:
            self.needs = {}
            self._outbox.tell(CaughtUp(operator=self._operator, generation=self._generation))

    def repeat(self, batch: StreamingBatch) -> None:
        """Run a batch whose entry is in the log to its end: that rebuilds the state."""
        if self.keeps_plans and self._logged_plan(batch.batch) != self._planned(batch.batch):
            # Other input, or another time of day, would produce another state, and the log already has the output.
            self._is_plan_wrong = True
            raise StopAtBoundary
        batch.run_to_end()
        self.repeated_total += 1
        self.has_caught_up = batch.batch == self._channel.last_batch

    def prepare_query(self) -> None:
        """Call it before the query starts: gives Spark the logged plan of the next batch, so it runs exactly that."""
        self._is_plan_wrong = False
        if not self.keeps_plans:
            return
        # A query first runs the batch after the last committed one, and exactly as planned if it finds a plan.
        batch = BatchId(self._query_dirs.last_committed(self._spark_checkpoint_dir) + 1)
        self._set_repeating(batch < self._channel.last_batch)
        if batch <= self._channel.last_batch and self._logged_plan(batch) != self._planned(batch):
            self._query_dirs.put_plan(self._spark_checkpoint_dir, batch, self._logged_plan(batch))

    def end(self) -> None:
        """A batch runs that is not in the log: everything before it is committed."""
        self._set_repeating(False)
        self._report_caught_up()

    def is_repeating(self) -> bool:
        """Whether the operator runs batches of its log again to rebuild its state."""
        return self._is_repeating

    def is_plan_wrong(self) -> bool:
        """Whether the query has ended only because it must be prepared for the next batch in the log."""
        return self._is_plan_wrong

    def _set_repeating(self, is_repeating: bool) -> None:
        if is_repeating != self._is_repeating:
            self._is_repeating = is_repeating
            self._engine.expect_restarts(self._operator, is_repeating)
            left = self._channel.last_batch - self._query_dirs.last_committed(self._spark_checkpoint_dir)
            event = "log_replay_started" if is_repeating else "log_replay_finished"
            log.info(event, flow=self._flow, operator=self._operator, batches=left)

    def _logged_plan(self, batch: BatchId) -> Mapping[str, bytes]:
        entry = self._channel.find_batch(batch)
        if entry is None or not entry.plan:
            raise InvariantViolation(f"the log does not say how batch {batch} was planned", operator=self._operator)
        return entry.plan

    def _planned(self, batch: BatchId) -> Mapping[str, bytes]:
        try:
            return self._query_dirs.plan_of(self._spark_checkpoint_dir, batch)
        except DamagedRecordError:
            return {}
