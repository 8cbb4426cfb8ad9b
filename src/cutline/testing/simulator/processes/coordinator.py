"""The coordinator's process: the real core, the records it keeps, the collector, and the way back of a region."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, assert_never

from cutline.model.ids import Epoch, Generation, OperatorId, Position
from cutline.protocol.checkpoint.coordinator import StoredPending
from cutline.protocol.checkpoint.per_operator import FlowCoordinator
from cutline.protocol.history.epochs import is_of_history, is_resumable, region_of
from cutline.protocol.history.retention import EpochNeeds, truncation_points, unreachable
from cutline.protocol.link import Endpoint, Envelope
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AckRequested,
    AnnounceClosed,
    AnswerRequest,
    BarrierRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    EpochClosed,
    FoundManifest,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    PendingStored,
    PinChanged,
    RegionLost,
    RegionRestored,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    SinkCommitted,
    StoreAborted,
    StoreManifest,
    StorePending,
    TimePassed,
)
from cutline.testing.simulator.processes.operator import COORDINATOR, Crash
from cutline.testing.simulator.storage.disk import Data, GenerationModel, ManifestModel
from cutline.testing.simulator.world import Steps

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow


class CoordinatorProcess:
    """One life of the coordinator. It takes events one at a time and acts on each before it takes the next."""

    def __init__(self, flow: SimulatedFlow, session: int) -> None:
        self.is_alive = True
        self.is_zombie = False
        self._flow = flow
        self._book = flow.book
        self._world = flow.world
        self._disk = flow.disk
        self._session = session
        self.clock_offset_ms = flow.clock_offset()
        self.generation: Generation = flow.disk.next_generation()
        self.core: FlowCoordinator = flow.coordinator_core(self.generation, self.now())
        self._links: dict[str, Endpoint[Any]] = {
            name: Endpoint(session, retry_ms=40, retry_limit=6, window=16) for name in flow.graph.operators
        }
        self._links_armed = False
        self._events: deque[CoordinatorEvent] = deque()
        self._actions: deque[CoordinatorAction] = deque()
        self._releases: deque[ReleaseEpochs] = deque()
        self._is_collecting = False
        self._is_working = False
        self._armed_ms: int | None = None
        self._restoring: set[OperatorId] = set()
        self._is_restoring = False
        self._lineage = dict(flow.current_generation().lineage)
        self._requests = 0
        self.answers: dict[str, AnswerRequest] = {}

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._world.tell(COORDINATOR, "starts", generation=self.generation)
        incarnations = self._flow.incarnations()
        pending = [
            StoredPending(epoch=epoch, terms=terms, is_resumable=is_resumable(begun_in, incarnations))
            for epoch, (begun_in, terms) in sorted(self._disk.pending.items())
        ]
        complete = {item.epoch for item in self.core.complete}
        for stored in pending:
            if stored.epoch in complete:
                self._disk.store_outcome(self.generation, stored.epoch, "completed")
        self._actions.extend(self.core.start([one for one in pending if one.epoch not in complete], now_ms=self.now()))
        self._work()

    def die(self, why: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self._world.tell(COORDINATOR, "dies", why=why)
            if not self.is_zombie:
                self._flow.coordinator_died(self)

    def now(self) -> int:
        return self._world.now_ms + self.clock_offset_ms

    def clock_jumped(self) -> None:
        self.post(TimePassed())

    # ------------------------------------------------------------------ talking

    def _say(self, operator: OperatorId, payload: Any) -> None:
        for envelope in self._links[operator].send(payload, now_ms=self.now()):
            self._flow.network.send(self._book, COORDINATOR, operator, envelope)
        self._arm_links()

    def _arm_links(self) -> None:
        deadlines = [at for link in self._links.values() if (at := link.next_deadline_ms()) is not None]
        if deadlines and not self._links_armed:
            self._links_armed = True
            self._world.after(min(deadlines) - self.now(), self._link_tick, self)

    def _link_tick(self) -> None:
        self._links_armed = False
        for name, link in self._links.items():
            for envelope in link.time_passed(now_ms=self.now()):
                self._flow.network.send(self._book, COORDINATOR, name, envelope)
        self._arm_links()

    def receive(self, sender: str, envelope: Envelope[Any]) -> None:
        received = self._links[sender].receive(envelope, now_ms=self.now())
        for reply in received.replies:
            self._flow.network.send(self._book, COORDINATOR, sender, reply)
        self._arm_links()
        for payload in received.payloads:
            self.post(payload)

    # ------------------------------------------------------------------ working

    def post(self, event: CoordinatorEvent) -> None:
        self._events.append(event)
        self._work()

    def _work(self) -> None:
        if not self._is_working:
            self._is_working = True
            self._world.spawn(self._loop(), self)

    def _loop(self) -> Steps:
        while self._events or self._actions:
            if not self._actions:
                self._take(self._events.popleft())
                continue
            action = self._actions.popleft()
            if isinstance(action, StorePending | StoreManifest | StoreAborted):
                yield self._slow(self._world.between(1, 4))
            try:
                answer = self._perform(action)
            except Crash as crash:
                self.die(str(crash))
                return
            if answer is not None:
                # What performing it reports is taken in before the next event.
                self._actions.extend(self.core.handle(answer, now_ms=self.now()))
        self._is_working = False
        self._arm()

    def _take(self, event: CoordinatorEvent) -> None:
        if isinstance(event, SinkCommitted) and self.generation == self._disk.generation:
            self._disk.published[event.sink] = max(self._disk.published[event.sink], event.epoch)
        self._actions.extend(self.core.handle(event, now_ms=self.now()))

    def _arm(self) -> None:
        deadline = self.core.next_deadline_ms(now_ms=self.now())
        if deadline is not None and deadline != self._armed_ms:
            self._armed_ms = deadline
            self._world.after(max(deadline - self.now(), 1), self._tick, self)

    def _tick(self) -> None:
        self._armed_ms = None
        self.post(TimePassed())

    def _slow(self, delay_ms: int) -> int:
        return delay_ms + (self._world.between(50, 400) if self._world.strikes("slow_disk") else 0)

    # ------------------------------------------------------------------ actions

    def _perform(self, action: CoordinatorAction) -> CoordinatorEvent | None:
        match action:
            case StorePending():
                self._stored(self._disk.store_pending, self.generation, action.epoch, action.terms)
                self._world.tell(COORDINATOR, "begins", epoch=action.epoch)
                return PendingStored(epoch=action.epoch)
            case InjectBarrier():
                self._say(action.operator, BarrierRequested(epoch=action.epoch, terms=action.terms))
            case RequestAck():
                self._say(action.operator, AckRequested(epoch=action.epoch))
            case StoreManifest():
                return self._store_manifest(action)
            case StoreAborted():
                return self._store_aborted(action)
            case AnnounceClosed():
                self._announce(action)
            case CommitSink():
                self._say(action.permit.operator, action.permit)
            case ReleaseEpochs():
                self._release(action)
            case ReportHealth():
                self._world.counts["health"] += 1
            case AnswerRequest():
                self.answers[action.request] = action
            case _:
                assert_never(action)
        return None

    def _stored(self, store: Any, *values: Any) -> bool:
        """Store something; a coordinator that does not know whether it did does not go on."""
        if self._world.strikes("store_refused"):
            raise Crash("its records could not be written")
        done = bool(store(*values))
        if self._world.strikes("store_unknown"):
            raise Crash("its records may have been written")
        if not done:
            raise Crash("fenced: another coordinator has taken over")
        return done

    def _announce(self, action: AnnounceClosed) -> None:
        if not action.completed and not action.is_reminder:
            self._flow.discard(action.epoch)
        for operator in [action.operator] if action.operator else self._flow.graph.operators:
            self._say(operator, EpochClosed(epoch=action.epoch, completed=action.completed))

    def _store_manifest(self, action: StoreManifest) -> CoordinatorEvent:
        before = next((item for item in self.core.complete if item.epoch == action.previous_epoch), None)
        manifest = ManifestModel(
            epoch=action.epoch,
            generation=self.generation,
            previous_epoch=action.previous_epoch,
            is_inherited=action.is_inherited,
            completed_ms=self.now(),
            batches={name: ack.cut.batch for name, ack in action.acks.items()},
            after_batches=dict(before.batches) if before else {},
            records={name: ack.generation for name, ack in action.acks.items()},
            lineage=dict(self._lineage),
            barriers={name: ack.cut.barrier for name, ack in action.acks.items()},
            read={
                name: {
                    consumer: ack.cut.positions[name]
                    for consumer, ack in action.acks.items()
                    if name in ack.cut.positions
                }
                for name in [*action.acks, *(channel for ack in action.acks.values() for channel in ack.cut.positions)]
            },
            alone=self._flow.settings.alone(action.acks),
        )
        if self._world.strikes("store_refused"):
            raise Crash("the manifest could not be written")
        if not self._disk.store_manifest(manifest):
            if not self._is_ours(action.epoch):
                return ManifestRefused(epoch=action.epoch, reason="an old life has completed it in its own history")
            return self._found(action.epoch)
        self._world.tell(COORDINATOR, "completes", epoch=action.epoch)
        self._world.counts["checkpoints"] += 1
        if self._world.strikes("store_unknown"):
            raise Crash("the manifest may have been written")
        self._stored(self._disk.store_outcome, self.generation, action.epoch, "completed")
        return ManifestStored(epoch=action.epoch, completed_ms=manifest.completed_ms)

    def _is_ours(self, epoch: Epoch) -> bool:
        """Whether a checkpoint is there that belongs to the history that this coordinator goes on with."""
        holder = self._disk.manifests[epoch]
        return holder.is_aborted is False and is_of_history(holder.barriers, holder.lineage, self._lineage)

    def _found(self, epoch: Epoch) -> CoordinatorEvent:
        """Somebody was here before."""
        holder = self._disk.manifests[epoch]
        if holder.is_aborted or holder.generation > self.generation:
            raise Crash("fenced: another coordinator has decided about this epoch")
        self._stored(self._disk.store_outcome, self.generation, epoch, "completed")
        self._world.tell(COORDINATOR, "finds complete", epoch=epoch)
        self._world.counts["found"] += 1
        found = FoundManifest(
            generation=holder.generation, previous_epoch=holder.previous_epoch, batches=holder.batches
        )
        return ManifestStored(epoch=epoch, completed_ms=holder.completed_ms, found=found)

    def _store_aborted(self, action: StoreAborted) -> CoordinatorEvent:
        if action.is_inherited:
            if self._world.strikes("store_refused"):
                raise Crash("the tombstone could not be written")
            tombstone = ManifestModel(epoch=action.epoch, generation=self.generation, is_aborted=True)
            if not self._disk.store_manifest(tombstone) and self._is_ours(action.epoch):
                return self._found(action.epoch)
            if self._world.strikes("store_unknown"):
                raise Crash("the tombstone may have been written")
        self._stored(self._disk.store_outcome, self.generation, action.epoch, "aborted")
        self._world.tell(COORDINATOR, "aborts", epoch=action.epoch, why=action.reason)
        self._world.counts["aborts"] += 1
        return AbortStored(epoch=action.epoch)

    # ------------------------------------------------------------------ letting go

    def _is_fenced(self) -> bool:
        return self.generation < self._disk.generation

    def _release(self, action: ReleaseEpochs) -> None:
        self._releases.append(action)
        if not self._is_collecting:
            self._is_collecting = True
            self._world.spawn(self._collector(), self)

    def _collector(self) -> Steps:
        """One collection after the other."""
        while self._releases:
            release = self._releases.popleft()
            yield from self._collect(release)
        self._is_collecting = False

    def _collect(self, release: ReleaseEpochs) -> Steps:
        """Step by step, so that it can be killed anywhere."""
        disk = self._disk
        kept = [disk.manifests[epoch] for epoch in release.retained if epoch in disk.manifests]
        if len(kept) < len(release.retained) or not kept:
            return
        # Manifests first: killed half-way, an epoch is either whole or not there.
        abandoned = tuple(one.epoch for one in disk.complete() if not disk.is_live(one))
        for epoch in (*release.drop, *abandoned):
            yield self._world.between(0, 2)
            if self._is_fenced():
                return
            if epoch in disk.manifests:
                disk.drop_manifest(epoch)
            if self._world.strikes("gc_killed"):
                self.die("killed while it collects")
                return
        needs = [
            EpochNeeds.of(
                one.barriers,
                [{channel: at} for channel, readers in one.read.items() for at in readers.values()],
            )
            for one in kept
        ]
        lineage = self._lineage
        for name, below in truncation_points(needs, disk.graph.touched_by()).items():
            log = disk.logs[name]
            entries = log.visible(lineage[name])
            # One entry always stays, so that the log knows its own end and the last batch.
            for entry in entries[:-1]:
                if entry.seq >= below or self._is_fenced():
                    break
                if self._world.strikes("gc_killed"):
                    self.die("killed while it truncates")
                    return
                disk.check_truncation(name, entry.seq)
                if isinstance(entry, Data):
                    self._flow.check_read_by_all(name, entry)
                log.delete(lineage[name], entry.seq)
            yield 1
        complete = {one.epoch for one in disk.complete()}
        for key in [key for key in disk.records if key[0] not in complete and key[0] < release.open_from]:
            del disk.records[key]
        self._sweep_blobs()

    def _sweep_blobs(self) -> None:
        disk = self._disk
        # A record of a pending epoch may have been acknowledged: what it names is needed, whoever claims it.
        reached = [record.blobs for record in disk.records.values()]
        for blob in sorted(unreachable(disk.blobs, reached, self._flow.claims())):  # type: ignore[arg-type]
            disk.drop_blob(blob)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ a region goes back

    def is_restoring(self, operator: OperatorId) -> bool:
        return operator in self._restoring

    def region_failed(self, failed: OperatorId) -> None:
        """An operator cannot go on where it was: its directory is gone."""
        if failed not in self._restoring:
            is_alone = self._flow.settings.is_per_operator
            region = frozenset({failed}) if is_alone else region_of([failed], self._flow.graph.consumers)
            self._restoring |= region
            self._world.spawn(self._restore_region(failed, region), self)

    def _restore_region(self, failed: OperatorId, region: frozenset[OperatorId]) -> Steps:
        disk, flow = self._disk, self._flow
        self.post(RegionLost(operators=region, reason=f"{failed} has lost its directory"))
        yield 1
        # One region at a time: each takes the generation that it restores in.
        while self._is_restoring or self._is_pending(region) or self._events or self._actions:
            yield 5
        self._is_restoring = True
        manifest = flow.newest_manifest(failed)
        if manifest is None and not flow.settings.is_per_operator:
            flow.restart_all("a region failed before the first checkpoint")
            return
        for operator in sorted(region):
            flow.kill(operator, "its region goes back")
        yield self._slow(2)
        if self._is_fenced():
            self.die("fenced while a region went back")
            return
        self.generation = disk.next_generation()
        current = flow.current_generation()
        for operator in sorted(region):
            flow.restore_dir(manifest, operator, self.generation)
        yield self._slow(2)
        lineage = dict(current.lineage)
        for operator in sorted(region):
            if flow.settings.is_per_operator or manifest is None:
                lineage[operator] = flow.gone_on(operator, current, self.generation)
            else:
                barrier = manifest.barriers[operator]
                lineage[operator] = manifest.lineage[operator].fork(self.generation, Position(barrier + 1))
        if self.generation < disk.generation:
            self.die("fenced while a region went back")
            return
        disk.generations[self.generation] = GenerationModel(
            generation=self.generation,
            restored_epoch=None if flow.settings.is_per_operator or manifest is None else manifest.epoch,
            is_fresh=False,
            lineage=lineage,
            spark_dirs={**current.spark_dirs, **dict.fromkeys(sorted(region), self.generation)},
        )
        self._lineage = lineage
        disk.settled = self.generation  # it went back to the newest epoch: nothing was published after it
        self._world.tell(
            COORDINATOR, "region goes back", to=manifest.epoch if manifest else None, region=sorted(region)
        )
        self._world.counts["restores"] += 1
        self._world.counts["alone" if flow.settings.is_per_operator else "regional"] += 1
        yield self._world.between(0, 3)
        self._restoring -= region
        self._is_restoring = False
        flow.start_region(region)
        self.post(RegionRestored(operators=region, generation=self.generation))

    def _is_pending(self, region: frozenset[OperatorId]) -> bool:
        pending = [one.terms.alone for one in self.core.pending.values()]
        return any(alone is None or alone in region for alone in pending)

    # ------------------------------------------------------------------ people

    def core_pin(self, event: PinChanged) -> None:
        """At once, not in its turn: a person is told that the epoch is pinned only when it is."""
        self._actions.extend(self.core.handle(event, now_ms=self.now()))
        self._work()

    def collect_now(self) -> None:
        retained = tuple(item.epoch for item in self.core.complete)
        open_from = min(self.core.pending, default=Epoch(self.core.last_epoch + 1))
        self._release(ReleaseEpochs(drop=(), retained=retained, open_from=open_from))
