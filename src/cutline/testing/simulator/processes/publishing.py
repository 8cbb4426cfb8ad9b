"""The commits of one operator's sinks: by permits of the coordinator, or batch by batch by the product's own code."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cutline.channels.log import ChannelLog
from cutline.errors import FencedError, NotDone, OutcomeUnknown, SinkError
from cutline.model.graph import SinkNode
from cutline.model.ids import NO_EPOCH, Epoch, SinkId
from cutline.model.staging import StagedBatch
from cutline.ports.sinks import SinkContext, Stager
from cutline.protocol.messages.wire import SinkCommitFailed, SinkCommitted
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.sink_ledger import RewindVerdict, Verdict, refusal
from cutline.testing.simulator.storage.log import Data, Entry, Log, View
from cutline.testing.simulator.storage.sinks import FLOW, SinkTarget
from cutline.testing.simulator.world import Steps, Violation, World
from cutline.worker.immediate_publishing import ImmediateSink

if TYPE_CHECKING:
    from cutline.protocol.history.lineage import Lineage
    from cutline.testing.simulator.processes.flow import SimulatedFlow
    from cutline.testing.simulator.processes.operator import OperatorProcess


class SimulatedSink:
    """The port of a sink over a simulated target, for the process that has this claim."""

    output_modes = frozenset({"append"})
    can_rewind = True

    def __init__(self, target: SinkTarget, world: World, token: str) -> None:
        self.target = target
        self._world = world
        self._token = token

    def open(self, context: SinkContext) -> None:
        """It is open."""

    def claimed(self) -> str:
        return self.target.claimed()

    def claim(self, history: str, *, expected: str) -> None:
        self.target.claim(self._token, history, expected=expected)

    def stager(self) -> Stager:
        raise AssertionError("rows are staged by the simulated query")

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Visible, then synced; a process may die in between, or never hear of it."""
        if self.target.is_away or self._world.strikes("sink_refused"):
            raise NotDone("the target does not answer")
        verdict = self.target.commit(permit, staged, self._token)
        if verdict not in (Verdict.PUBLISH, Verdict.ALREADY):
            raise refusal(verdict, self.target.ledger, permit)
        if self._world.strikes("sink_unknown"):
            raise OutcomeUnknown("no answer")
        self.target.sync()

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Nothing of it is to be seen."""

    def published(self) -> Epoch | None:
        return self.target.ledger.published or None

    def highest(self) -> Epoch:
        return self.target.ledger.highest

    def rewind(self, epoch: Epoch) -> None:
        if self.target.rewind(epoch, self._token) is RewindVerdict.FENCED:
            raise FencedError("another process has taken the sink over", sink=self.target.sink)


class ReadLog:
    """A log as the product's own code reads it."""

    def __init__(self, log: Log, lineage: Lineage) -> None:
        self._log = log
        self._view: View = log.view(lineage)

    def entries(self) -> list[Entry]:
        return list(self._view.entries)

    def data_entries(self) -> list[Data]:
        return [entry for entry in self._view.entries if isinstance(entry, Data)]

    def invisible_entries(self) -> list[Entry]:
        return self._log.invisible(self._view.lineage)


def begin_immediate(flow: SimulatedFlow, target: SinkTarget, token: str, *, rewinds: bool = True) -> ImmediateSink:
    """The product's own wrapper of a sink that publishes every batch; rewinds what is no part of the history.

    FencedError: another process has claimed the sink, and it must be rewound.
    """
    disk, operator = flow.disk, target.operator
    sink = SimulatedSink(target, flow.world, token)
    node = SinkNode(
        sink=target.sink, operator=operator, output_mode=None, supported_modes=sink.output_modes, publish="at_once"
    )
    immediate = ImmediateSink(sink, node, FLOW)

    def note_seen(seen: Epoch) -> None:
        disk.seen[target.sink] = seen

    target.sync()  # opening a target syncs what is visible there
    immediate.remember(disk.seen.get(target.sink, NO_EPOCH), note_seen)
    if rewinds:
        immediate.rewind_given_up(cast("ChannelLog", ReadLog(disk.logs[operator], flow.lineage(operator))))
    newest = flow.newest_epoch(operator)
    immediate.begin(behind=newest if disk.published.get(target.sink, NO_EPOCH) < newest else NO_EPOCH)
    return immediate


class Publishing:
    """In the order in which it is asked for, one after the other."""

    def __init__(self, process: OperatorProcess) -> None:
        self._process = process
        self._world = process.world
        self._disk = process.disk
        self._todo: deque[CommitPermit | tuple[ImmediateSink, StagedBatch]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._sinks: dict[SinkId, SimulatedSink] = {
            name: SimulatedSink(process.flow.sinks[name], process.world, process.token)
            for name in process.flow.graph.sinks_of(process.operator)
        }
        self._immediate: dict[SinkId, ImmediateSink] = {}
        for name, sink in self._sinks.items():
            if sink.target.is_immediate:
                # A start, or a restore of the region, has rewound it. That its claim is lost, its first commit finds.
                is_held = sink.target.ledger.claim == process.token
                self._immediate[name] = begin_immediate(process.flow, sink.target, process.token, rewinds=is_held)
        for entry in process.view().entries if self._immediate else ():
            if isinstance(entry, Data):
                self.happened(entry)  # what is published already is not published again

    # ------------------------------------------------------------------ what is to be published

    def permitted(self, permit: CommitPermit) -> None:
        self._todo.append(permit)
        self._work()

    def happened(self, entry: Data) -> None:
        """A batch stands in the log: some sinks do not wait for a checkpoint."""
        for name, immediate in self._immediate.items():
            self._todo.append((immediate, entry.staged[name]))
            self._work()

    def close(self) -> None:
        """Its sinks belong to the next process of the operator."""
        self._is_closed = True
        self._todo.clear()

    def _work(self) -> None:
        if not self._is_busy and not self._is_closed:
            self._is_busy = True
            self._world.spawn(self._run(), self._process)

    def _run(self) -> Steps:
        process = self._process
        while self._todo:
            work = self._todo.popleft()
            yield process.slow(self._world.between(1, 6))
            if self._is_closed:
                return
            try:
                if isinstance(work, CommitPermit):
                    self._answer(work)
                else:
                    self._publish_batch(*work)
            except FencedError as error:
                self._fenced(work, error)
            if not process.is_alive:
                return
        self._is_busy = False

    def _publish_batch(self, immediate: ImmediateSink, batch: StagedBatch) -> None:
        with contextlib.suppress(NotDone, OutcomeUnknown):  # it comes with the next one, or with its checkpoint
            immediate.publish(batch)

    def _fenced(self, work: object, error: FencedError) -> None:
        """Only a process that was replaced may be refused."""
        process = self._process
        if process.is_current_holder():
            raise Violation(f"{process.operator} holds the claim and is refused: {error} ({work})")
        process.fenced(str(error.what))

    # ------------------------------------------------------------------ permits

    def _answer(self, permit: CommitPermit) -> None:
        process = self._process
        answer: SinkCommitFailed | SinkCommitted
        try:
            has_rows = self._commit(permit)
        except (NotDone, OutcomeUnknown) as error:
            answer = SinkCommitFailed(
                operator=process.operator, sink=permit.sink, epoch=permit.epoch, reason=error.what
            )
        except SinkError as error:
            if process.is_current_holder():
                raise Violation(f"{permit.sink} is of another history: {error}") from error
            process.fenced(error.what)
            return
        else:
            if has_rows is None:
                return
            answer = SinkCommitted(operator=process.operator, sink=permit.sink, epoch=permit.epoch, has_rows=has_rows)
        process.say(answer)

    def _commit(self, permit: CommitPermit) -> bool | None:
        """Whether there were rows; None: this process is over."""
        process, target = self._process, self._sinks[permit.sink].target
        checkpoint = self._disk.checkpoint(permit.epoch)
        if checkpoint is None:
            is_done = permit.epoch <= max(target.ledger.highest, self._disk.published.get(permit.sink, NO_EPOCH))
            if not is_done and process.is_current_holder() and not process.is_zombie:
                raise Violation(f"{permit.sink} is told to publish epoch {permit.epoch}, which has no manifest")
            process.die("the epoch it was told to publish is gone")
            return None
        record = self._disk.record_of(checkpoint, process.operator)
        if record is None:
            raise Violation(f"epoch {permit.epoch} has no record of {process.operator} to publish from")
        staged = [batch for batch in record.staged if permit.covers(batch.batch)]
        immediate = self._immediate.get(permit.sink)
        (immediate or self._sinks[permit.sink]).commit(permit, staged, {})
        return bool(staged) and immediate is None
