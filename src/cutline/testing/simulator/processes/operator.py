"""One operator's process: its agent, a model of its Spark query, its snapshots, and the commits of its sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, assert_never

from cutline.errors import InvariantViolation
from cutline.model.ids import NO_BATCH, START, BatchId, Epoch, Generation, OperatorId, Position, Subtask
from cutline.protocol.cut.agent import Agent, FoundCut
from cutline.protocol.cut.credits import CreditAccount
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.link import Endpoint, Envelope
from cutline.protocol.messages.coordinator import (
    AckRequested,
    AgentAction,
    AgentEvent,
    AppendBarrier,
    BarrierAppeared,
    BarrierRequested,
    BatchAppended,
    CutPoint,
    DataAppeared,
    EpochClosed,
    OperatorAck,
    OperatorAcked,
    OperatorStarted,
    ProgressMade,
    ReportFailure,
    ResendAck,
    SetGate,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
    SubtaskAck,
    TakeSnapshot,
    TimePassed,
)
from cutline.protocol.publish.commit import CommitPermit, StagedOutput
from cutline.testing.simulator.storage.disk import Barrier, Blob, Counts, Data, Entry, Record, Rows, SparkDir
from cutline.testing.simulator.world import Steps, Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow

COORDINATOR = "coordinator"
#: Versions of its state that Spark keeps.
_VERSIONS_KEPT = 20


class Crash(Exception):  # noqa: N818 (not an error of the simulator)
    """The process dies here."""


class OperatorProcess:
    """One life of one operator."""

    def __init__(self, flow: SimulatedFlow, operator: OperatorId, session: int) -> None:
        self.is_alive = True
        self.is_zombie = False
        self.operator = operator
        self._flow = flow
        self._book = flow.book
        self._world = flow.world
        self._disk = flow.disk
        self._graph = flow.graph
        self._log = flow.disk.logs[operator]
        current = flow.current_generation()
        self._lineage = current.lineage[operator]
        self._input_lineage = {name: current.lineage[name] for name in flow.graph.inputs[operator]}
        self.generation: Generation = self._lineage.generation
        self._spark: SparkDir = flow.disk.spark[operator, current.spark_dirs[operator]]
        self.clock_offset_ms = flow.clock_offset()
        self._link: Endpoint[Any] = Endpoint(session, retry_ms=40, retry_limit=6, window=16)
        self._gates: dict[OperatorId, Position] = {}
        self._seen = dict.fromkeys(flow.graph.inputs[operator], START)
        self._acks: dict[Epoch, OperatorAck] = {}
        self._closed: set[Epoch] = set()
        #: Content held for epochs under way, so that no collection takes it.
        self.claims: dict[Epoch, tuple[Blob, ...]] = {}
        self._permits: deque[CommitPermit] = deque()
        self._is_committing = False
        self._is_query_idle = True
        self._armed_ms: int | None = None
        self._link_armed = False
        self._end = Position(self._lineage.spans[-1].start)
        self._unsynced: list[Barrier] = []
        self.last_batch: BatchId = NO_BATCH
        self.positions: dict[OperatorId, Position] = {}
        self._agent, self._open = self._recovered_agent()
        self._staged = StagedOutput(flow.completed_batch(operator))
        self.credits = self._account()

    def _recovered_agent(self) -> tuple[Agent, tuple[Epoch, ...]]:
        """As the real service does it: the operator's own log says where it had cut."""
        entries = self._log.visible(self._lineage)
        if entries:
            self._end = Position(entries[-1].seq + 1)
            self.last_batch = entries[-1].batch
            self.positions = dict(entries[-1].positions)
        barriers = [entry for entry in entries if isinstance(entry, Barrier)]
        self._unsynced = [barrier for barrier in barriers if not barrier.is_synced]
        open_epochs = self._flow.open_epochs(self.operator)
        agent = Agent(
            operator=self.operator,
            inputs=self._graph.inputs[self.operator],
            last_epoch=self._disk.last_epoch,
            open_epochs=open_epochs,
            last_batch=self.last_batch,
            positions=self.positions,
            found_cuts=[
                FoundCut(epoch=one.epoch, batch=one.batch, positions=one.positions, aligned=one.aligned)
                for one in barriers
                if one.epoch in open_epochs
            ],
            own_limit_ms=self._flow.settings.own_limits_ms[self.operator],
            patience_ms=self._flow.settings.patience_ms,
        )
        return agent, tuple(open_epochs)

    def _account(self) -> CreditAccount:
        account = CreditAccount(
            self._graph.consumers[self.operator], entries=self._flow.settings.capacity_entries, size_bytes=1_000_000
        )
        for entry in self._log.visible(self._lineage):
            if isinstance(entry, Data):
                account.appended(entry.seq, entry.count, entry.count)
        for consumer in self._graph.consumers[self.operator]:
            account.consumed(consumer, self._flow.position_of(consumer, self.operator))
        account.is_exempt = self._agent.is_aligning()
        account.is_withheld = self._flow.is_paused and not self._graph.inputs[self.operator]
        return account

    def consumers_went_back(self) -> None:
        """Consumers read again what they had read: the account must know."""
        self.credits = self._account()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._say(OperatorStarted(operator=self.operator, generation=self.generation, open_epochs=self._open))
        self._guarded(self._begin)

    def _begin(self) -> None:
        self._perform(self._agent.start())
        for channel in self._seen:
            self._look(channel)
        self._handle(TimePassed())
        self._flow.consumed(self.operator, self.positions)
        self._poke()

    def die(self, why: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self._world.tell(self.operator, "dies", why=why)
            if not self.is_zombie:
                self._flow.operator_died(self)

    def now(self) -> int:
        return self._world.now_ms + self.clock_offset_ms

    def clock_jumped(self) -> None:
        self._guarded(lambda: self._handle(TimePassed()))

    def _guarded(self, do: Any) -> None:
        """A process that cannot write its log does not go on."""
        try:
            do()
        except Crash as crash:
            self.die(str(crash))
        except InvariantViolation as error:
            if self.is_zombie:
                self.die(str(error))
            else:
                raise

    # ------------------------------------------------------------------ talking

    def _say(self, payload: Any) -> None:
        for envelope in self._link.send(payload, now_ms=self.now()):
            self._flow.network.send(self._book, self.operator, COORDINATOR, envelope)
        self._arm_link()

    def _arm_link(self) -> None:
        deadline = self._link.next_deadline_ms()
        if deadline is not None and not self._link_armed:
            self._link_armed = True
            self._world.after(deadline - self.now(), self._link_tick, self)

    def _link_tick(self) -> None:
        self._link_armed = False
        for envelope in self._link.time_passed(now_ms=self.now()):
            self._flow.network.send(self._book, self.operator, COORDINATOR, envelope)
        self._arm_link()

    def receive(self, sender: str, envelope: Envelope[Any]) -> None:
        received = self._link.receive(envelope, now_ms=self.now())
        for reply in received.replies:
            self._flow.network.send(self._book, self.operator, sender, reply)
        self._arm_link()
        if received.peer_restarted:
            # The new coordinator knows nothing of what we take for open.
            epochs = self._agent.unsettled()
            self._say(OperatorStarted(operator=self.operator, generation=self.generation, open_epochs=epochs))
        for payload in received.payloads:
            if self.is_alive:
                self._guarded(lambda payload=payload: self._heard(payload))

    def _heard(self, payload: Any) -> None:
        match payload:
            case BarrierRequested() | AckRequested():
                self._handle(payload)
            case EpochClosed():
                self._closed.add(payload.epoch)
                self._staged.closed(payload.epoch, completed=payload.completed)
                self.claims.pop(payload.epoch, None)
                self._acks.pop(payload.epoch, None)
                if not payload.completed:
                    self._flow.discard(payload.epoch)
                self._handle(payload)
            case CommitPermit():
                self._permits.append(payload)
                if not self._is_committing:
                    self._is_committing = True
                    self._world.spawn(self._commits(), self)
            case _:
                raise AssertionError(payload)

    # ------------------------------------------------------------------ the agent

    def _handle(self, event: AgentEvent) -> None:
        self._perform(self._agent.handle(event, now_ms=self.now()))
        if self.credits.is_exempt != self._agent.is_aligning():
            self.credits.is_exempt = self._agent.is_aligning()
            self._poke()
        deadline = self._agent.next_deadline_ms()
        if deadline is not None and deadline != self._armed_ms:
            self._armed_ms = deadline
            self._world.after(deadline - self.now(), self._tick, self)

    def _tick(self) -> None:
        self._armed_ms = None
        self._guarded(lambda: self._handle(TimePassed()))

    def _perform(self, actions: list[AgentAction]) -> None:
        for action in actions:
            match action:
                case AppendBarrier():
                    self._append_barrier(action)
                case TakeSnapshot():
                    self._staged.cut(action.epoch, action.batch)
                    self._world.spawn(self._snapshot(action), self)
                case ResendAck():
                    if action.epoch in self._acks:
                        self._say(OperatorAcked(ack=self._acks[action.epoch]))
                case ReportFailure():
                    self._say_failed(action.epoch, action.reason)
                case SetGate():
                    self._gates[action.channel] = action.admit
                    self._poke()
                case _:
                    assert_never(action)

    def look(self, channel: OperatorId) -> None:
        """Something may have been appended to an input."""
        self._guarded(lambda: self._look(channel))

    def _look(self, channel: OperatorId) -> None:
        log, lineage = self._disk.logs[channel], self._input_lineage[channel]
        for entry in log.visible(lineage, self._seen[channel]):
            self._seen[channel] = Position(entry.seq + 1)
            self._handle(_appeared(channel, entry))

    # ------------------------------------------------------------------ the log

    def _create(self, entry: Entry) -> None:
        if self._world.strikes("store_refused"):
            raise Crash("its log could not be written")
        if not self._log.create(entry):
            raise Crash("fenced: somebody else has written to its log")
        self._end = Position(entry.seq + 1)
        if self._world.strikes("store_unknown"):
            raise Crash("its log may have been written")

    def _tell_consumers(self) -> None:
        for consumer in self._graph.consumers[self.operator]:
            self._world.after(self._world.between(1, 6), lambda name=consumer: self._flow.entry_appended(name, self))  # type: ignore[misc]

    def _append_barrier(self, action: AppendBarrier) -> None:
        barrier = Barrier(
            seq=self._end,
            generation=self.generation,
            batch=action.batch,
            epoch=action.epoch,
            positions=action.positions,
            aligned=action.aligned,
            terms=action.terms,
        )
        self._create(barrier)
        self._unsynced.append(barrier)
        self._world.tell(self.operator, "cuts", epoch=action.epoch, batch=action.batch, aligned=action.aligned)
        self._tell_consumers()

    def _sync_barriers(self) -> None:
        for barrier in self._unsynced:
            barrier.is_synced = True
        self._unsynced.clear()

    def _append(self, batch: BatchId, positions: Mapping[OperatorId, Position], rows: Rows) -> None:
        event = BatchAppended(batch=batch, positions=positions)
        self._agent.check(event)
        self._sync_barriers()
        entry = Data(seq=self._end, generation=self.generation, batch=batch, rows=rows, positions=dict(positions))
        self._create(entry)
        self.last_batch, self.positions = batch, dict(positions)
        self.credits.appended(entry.seq, entry.count, entry.count)
        self._handle(event)
        self._tell_consumers()
        self._flow.consumed(self.operator, positions)
        if self._flow.settings.needs_progress:
            self._say(
                ProgressMade(
                    operator=self.operator,
                    is_source=not self._graph.inputs[self.operator],
                    batches=1,
                    rows=entry.count,
                    watermark_ms=sum(count for _, _, count in rows) + batch * 10,
                    is_without_room=not self.credits.has_room(),
                )
            )

    # ------------------------------------------------------------------ the query

    def _poke(self) -> None:
        """There may be something to do."""
        if self._is_query_idle:
            self._is_query_idle = False
            self._world.spawn(self._query(), self)

    def poke(self) -> None:
        self._poke()

    def is_exhausted(self) -> bool:
        """Of a source: whether every row it has is in its log and committed."""
        path = self._graph.paths[self.operator][None, -1]
        done = self._spark.states[self._spark.committed].get(path, 0) >= self._flow.rows_per_source()
        return done and self._spark.committed >= self.last_batch

    def _query(self) -> Steps:
        while True:
            yield self._world.between(*self._flow.settings.batch_ms)
            batch = BatchId(self._spark.committed + 1)
            if batch not in self._spark.planned:
                plan = self._logged_plan(batch) if batch <= self.last_batch else self._plan()
                # An old life finishes what it has begun, but Spark's own log lets it plan nothing more.
                if plan is None or self.is_zombie:
                    self._is_query_idle = True
                    return
                self._spark.planned[batch] = plan
            if batch > self.last_batch and not self.credits.may_run():
                self._is_query_idle = True  # consumers poke it when they have read
                return
            positions, count = self._spark.planned[batch]
            state = self._compute(batch, positions, count)
            if state is None:
                return
            counts, rows = state
            logged = self._logged(batch)
            if logged is not None and logged.rows != rows and not self.is_zombie:
                raise Violation(f"batch {batch} of {self.operator} was run again and put out something else")
            yield self._world.between(*self._flow.settings.batch_ms)
            if self._world.strikes("query_failed"):
                continue  # its supervisor starts it again: the batch is run again
            if batch > self.last_batch:
                self._guarded(lambda b=batch, p=positions, r=rows: self._append(b, p, r))
            if not self.is_alive:
                return
            yield self._slow(self._world.between(1, 4))
            if self.is_zombie:
                return  # the lock on the flow's folder keeps an old life out of Spark's directory
            if self._world.strikes("query_failed"):
                continue
            self._spark.states[batch] = counts
            self._spark.committed = max(self._spark.committed, batch)
            self._spark.states.pop(BatchId(batch - _VERSIONS_KEPT), None)
            self._spark.planned.pop(BatchId(batch - _VERSIONS_KEPT), None)

    def _plan(self) -> tuple[Mapping[OperatorId, Position], int] | None:
        """What the next batch reads: some of what the gates admit; a source, some of what there is."""
        inputs = self._graph.inputs[self.operator]
        if not inputs:
            path = self._graph.paths[self.operator][None, -1]
            left = self._flow.rows_per_source() - self._spark.states[self._spark.committed].get(path, 0)
            if left <= 0:
                return None
            return {}, min(left, self._world.between(0, 3))
        at = self._read_so_far(BatchId(self._spark.committed + 1))
        positions: dict[OperatorId, Position] = {}
        for channel in inputs:
            positions[channel] = at[channel]
            entries = self._disk.logs[channel].visible(
                self._input_lineage[channel], at[channel], self._gates.get(channel, START)
            )
            ends = [Position(entry.seq + 1) for entry in entries if isinstance(entry, Data) and entry.rows]
            if ends and self._world.rng.random() < 0.9:
                positions[channel] = ends[self._world.rng.randrange(min(len(ends), 4))]
        if positions == at and self._world.rng.random() < 0.95:
            if any(self._gates.get(channel, START) > at[channel] for channel in inputs):
                self._world.after(self._world.between(3, 9), self._poke, self)
            return None
        return positions, 0

    def _logged(self, batch: BatchId) -> Data | None:
        entries = self._log.visible(self._lineage) if batch <= self.last_batch else []
        return next((entry for entry in entries if isinstance(entry, Data) and entry.batch == batch), None)

    def _logged_plan(self, batch: BatchId) -> tuple[Mapping[OperatorId, Position], int]:
        """A batch that stands in the log is run again as it was planned then, although its directory was lost."""
        entry = self._logged(batch)
        if entry is None:
            raise Violation(f"batch {batch} of {self.operator} must be run again, and its entry is gone")
        return entry.positions, entry.count if not self._graph.inputs[self.operator] else 0

    def input_went_on(self, channel: OperatorId, lineage: Lineage) -> None:
        """Whoever writes an input has come back alone: what follows stands in another generation."""
        self._input_lineage[channel] = lineage

    def _read_so_far(self, batch: BatchId) -> dict[OperatorId, Position]:
        planned = self._spark.planned.get(BatchId(batch - 1))
        return {
            channel: planned[0].get(channel, START) if planned else START
            for channel in self._graph.inputs[self.operator]
        }

    def _compute(
        self, batch: BatchId, positions: Mapping[OperatorId, Position], count: int
    ) -> tuple[Counts, Rows] | None:
        """The state after the batch and the rows it puts out. None: an old life that finds its ground gone."""
        counts = dict(self._spark.states[BatchId(batch - 1)])
        paths = self._graph.paths[self.operator]
        rows: list[tuple[int, int, int]] = []
        if not positions and not self._graph.inputs[self.operator]:
            path = paths[None, -1]
            first = counts.get(path, 0)
            if count:
                rows.append((path, first, count))
                counts[path] = first + count
            return counts, tuple(rows)
        for channel, first_entry in self._read_so_far(batch).items():
            end = positions.get(channel, START)
            log = self._disk.logs[channel]
            for seq in range(first_entry, end):
                entry = log.at(self._input_lineage[channel], Position(seq))
                if entry is None:
                    self._missing(f"{self.operator} needs entry {seq} of {channel}, which is gone")
                    return None
                for path, first, size in entry.rows if isinstance(entry, Data) else ():
                    own = paths[channel, path]
                    if counts.get(own, 0) != first:
                        self._missing(
                            f"batch {batch} of {self.operator} takes in rows {first}… of path {own}, "
                            f"its state holds {counts.get(own, 0)}"
                        )
                        return None
                    rows.append((own, first, size))
                    counts[own] = first + size
        return counts, tuple(rows)

    def _missing(self, problem: str) -> None:
        if not self.is_zombie:
            raise Violation(problem)
        self.die("an old life, and what it reads is gone")

    # ------------------------------------------------------------------ snapshots

    def _slow(self, delay_ms: int) -> int:
        return delay_ms + (self._world.between(50, 400) if self._world.strikes("slow_disk") else 0)

    def _say_failed(self, epoch: Epoch, reason: str) -> None:
        self._say(SnapshotFailed(operator=self.operator, epoch=epoch, generation=self.generation, reason=reason))

    def _snapshot(self, action: TakeSnapshot) -> Steps:
        while self._spark.committed < action.batch:
            yield 5
            if action.epoch in self._closed:
                return
        yield self._slow(self._world.between(0, 5))
        counts = self._spark.states.get(action.batch)
        if counts is None:
            self._say_failed(action.epoch, "the state is gone")
            return
        blobs = self._blobs_of(counts)
        # Claimed before it is looked for: what is found must still be there when the record names it.
        self.claims[action.epoch] = blobs
        for blob in blobs:
            if blob not in self._disk.blobs:
                yield self._slow(self._world.between(0, 3))
                refused, unknown = self._world.strikes("store_refused"), self._world.strikes("store_unknown")
                if not refused:
                    self._disk.blobs.add(blob)
                if refused or unknown:
                    self._say_failed(action.epoch, "content could not be stored")
                    return
        self._sync_barriers()
        yield self._slow(self._world.between(0, 3))
        if action.epoch in self._closed:
            self.claims.pop(action.epoch, None)
            return
        self._store_record(action, blobs)

    def _blobs_of(self, counts: Counts) -> tuple[Blob, ...]:
        """One per subtask, by content."""
        subtasks = self._graph.subtasks[self.operator]
        split: list[list[tuple[int, int]]] = [[] for _ in range(subtasks)]
        for path, count in sorted(counts.items()):
            split[path % subtasks].append((path, count))
        return tuple((self.operator, Subtask(number), tuple(part)) for number, part in enumerate(split))

    def _store_record(self, action: TakeSnapshot, blobs: tuple[Blob, ...]) -> None:
        barrier = next(
            (
                entry.seq
                for entry in self._log.visible(self._lineage)
                if isinstance(entry, Barrier) and entry.epoch == action.epoch
            ),
            None,
        )
        if barrier is None:
            self._say_failed(action.epoch, "the barrier was truncated away")
            return
        record = Record(
            generation=self.generation,
            batch=action.batch,
            barrier=barrier,
            positions=action.positions,
            blobs=blobs,
            staged={
                entry.batch: entry.rows
                for entry in self._log.visible(self._lineage)
                if isinstance(entry, Data) and entry.rows and self._staged.binds(entry.batch, action.batch)
            },
        )
        if self._world.strikes("store_refused"):
            self._say_failed(action.epoch, "the record could not be stored")
            return
        key = (action.epoch, self.operator, self.generation)
        before = self._disk.records.get(key)
        if before is not None:
            # Of an earlier life: good if what it names is still there, now that it is claimed.
            self.claims[action.epoch] = before.blobs
            if any(blob not in self._disk.blobs for blob in before.blobs):
                self._say_failed(action.epoch, "content of the stored record is gone")
                return
        stored = self._disk.records.setdefault(key, record)
        if self._world.strikes("store_unknown"):
            self._say_failed(action.epoch, "the record may have been stored")
            return
        self._acknowledge(action.epoch, stored, action)

    def _acknowledge(self, epoch: Epoch, record: Record, action: TakeSnapshot) -> None:
        ack = OperatorAck(
            operator=self.operator,
            epoch=epoch,
            generation=self.generation,
            cut=CutPoint(
                batch=record.batch, barrier=record.barrier, positions=record.positions, aligned=action.aligned
            ),
            subtasks=tuple(
                SubtaskAck(subtask=subtask, files=1, size_bytes=len(content), new_bytes=0)
                for _, subtask, content in record.blobs
            ),
            record_sha256=f"{epoch}-{self.operator}-{self.generation}",
        )
        self._acks[epoch] = ack
        self._say(OperatorAcked(ack=ack))

    # ------------------------------------------------------------------ publishing

    def _commits(self) -> Steps:
        while self._permits:
            permit = self._permits.popleft()
            yield self._slow(self._world.between(1, 6))
            refused = self._world.strikes("sink_refused")
            if not refused:
                self._publish(permit)
                if not self.is_alive:
                    return
            answer: SinkCommitFailed | SinkCommitted
            if refused or self._world.strikes("sink_unknown"):
                answer = SinkCommitFailed(
                    operator=self.operator, sink=permit.sink, epoch=permit.epoch, reason="no answer"
                )
            else:
                answer = SinkCommitted(operator=self.operator, sink=permit.sink, epoch=permit.epoch)
            self._say(answer)
        self._is_committing = False

    def _publish(self, permit: CommitPermit) -> None:
        manifest = self._disk.manifests.get(permit.epoch)
        sink = self._disk.sinks[permit.sink]
        if manifest is None or manifest.is_aborted:
            if permit.epoch not in sink.epochs and not sink.is_shut(permit.epoch) and not self.is_zombie:
                raise Violation(f"{permit.sink} is told to publish epoch {permit.epoch}, which has no manifest")
            self.die("the epoch it was told to publish is gone")
            return
        record = self._disk.record_of(manifest, self.operator)
        if record is None:
            raise Violation(f"epoch {permit.epoch} has no record of {self.operator} to publish from")
        rows = tuple(row for batch in sorted(record.staged) if permit.covers(batch) for row in record.staged[batch])
        if not sink.commit(permit, rows):
            self.die("fenced by the sink")


def _appeared(channel: OperatorId, entry: Entry) -> DataAppeared | BarrierAppeared:
    if isinstance(entry, Data):
        return DataAppeared(channel=channel, seq=entry.seq, has_rows=bool(entry.rows))
    return BarrierAppeared(channel=channel, seq=entry.seq, epoch=entry.epoch, terms=entry.terms)
