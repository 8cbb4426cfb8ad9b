"""The coordinator's process: the real core, the records it keeps, and what it says to the operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

from cutline.coordinator.manifests import build_manifest, found_manifest, why_not_stored
from cutline.model.checkpoint import Manifest, Tombstone
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId
from cutline.protocol.checkpoint.per_operator import FlowCoordinator
from cutline.protocol.checkpoint.setup import StoredPending
from cutline.protocol.history.epochs import is_resumable
from cutline.protocol.history.histories import identity_of
from cutline.protocol.history.known_checkpoints import is_of_history
from cutline.protocol.history.lineage import lineage_of
from cutline.protocol.link import Endpoint, Envelope
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    PendingStored,
    PinChanged,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    StoreAborted,
    StoreManifest,
    StorePending,
)
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import AckRequested, BarrierRequested, EpochClosed, OperatorAcked, SinkCommitted
from cutline.testing.simulator.processes.collector import Collector
from cutline.testing.simulator.processes.core import coordinator_core
from cutline.testing.simulator.processes.region import RegionRestores
from cutline.testing.simulator.storage import checks
from cutline.testing.simulator.storage.sinks import FLOW
from cutline.testing.simulator.world import COORDINATOR, Crash, Steps, Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow


@dataclass(frozen=True, slots=True)
class Brought:
    """The remote tier has a checkpoint that must be there before it counts; without a manifest: it has not."""

    epoch: Epoch
    manifest: Manifest | None
    problem: str


class CoordinatorProcess:
    """One process of the coordinator. It takes events one at a time and acts on each before it takes the next."""

    def __init__(self, flow: SimulatedFlow, session: int) -> None:
        self.is_alive = True
        self.is_zombie = False
        self.flow = flow
        self.world = flow.world
        self.disk = flow.disk
        self._book = flow.book
        #: Of the same process: if that is thought dead and goes on, it does not talk to the next one's.
        self._uploader = flow.uploader
        self.clock_offset_ms = flow.clock_offset()
        self.generation: Generation = flow.disk.next_generation()
        self.core: FlowCoordinator = coordinator_core(flow, self.generation, self.now())
        self._links: dict[str, Endpoint[Any]] = {
            name: Endpoint(session, retry_ms=40, retry_limit=6, window=16) for name in flow.graph.operators
        }
        self._links_armed = False
        self._events: deque[CoordinatorEvent | Brought] = deque()
        self._actions: deque[CoordinatorAction] = deque()
        self._is_working = False
        self._armed_ms: int | None = None
        current = flow.current_generation()
        self._history = identity_of(current)
        self.lineage = {name: lineage_of(spans) for name, spans in current.lineage.items()}
        self.answers: dict[str, AnswerRequest] = {}
        self.collector = Collector(self)
        self.regions = RegionRestores(self)

    # ------------------------------------------------------------------ life and death

    def start(self) -> None:
        self.world.tell(COORDINATOR, "starts", generation=self.generation)
        self.disk.sync_found()
        generation_starts = self.flow.generation_starts()
        pending = [
            StoredPending(epoch=epoch, terms=terms, is_resumable=is_resumable(begun_in, generation_starts))
            for epoch, (begun_in, terms) in sorted(self.disk.pending.items())
        ]
        complete = {item.epoch for item in self.core.complete}
        for stored in pending:
            if stored.epoch in complete:
                self.disk.store_outcome(self.generation, stored.epoch, "completed")
        self._actions.extend(self.core.start([one for one in pending if one.epoch not in complete], now_ms=self.now()))
        self._work()

    def die(self, why: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self.world.tell(COORDINATOR, "dies", why=why)
            if not self.is_zombie:
                self.flow.coordinator_died(self)

    def is_fenced(self) -> bool:
        return self.generation < self.disk.generation

    def is_in_charge(self) -> bool:
        return self.is_alive and not self.is_fenced()

    def now(self) -> int:
        return self.world.now_ms + self.clock_offset_ms

    def clock_jumped(self) -> None:
        self.post(TimePassed())

    def slow(self, delay_ms: int) -> int:
        return delay_ms + (self.world.between(50, 400) if self.world.strikes("slow_disk") else 0)

    # ------------------------------------------------------------------ messages

    def _say(self, operator: OperatorId, payload: Any) -> None:
        for envelope in self._links[operator].send(payload, now_ms=self.now()):
            self.flow.network.send(self._book, COORDINATOR, operator, envelope)
        self._arm_links()

    def _arm_links(self) -> None:
        if self._links_armed:
            return
        deadlines = [at for link in self._links.values() if (at := link.next_deadline_ms()) is not None]
        if deadlines:
            self._links_armed = True
            self.world.after(min(deadlines) - self.now(), self._link_tick, self)

    def _link_tick(self) -> None:
        self._links_armed = False
        for name, link in self._links.items():
            for envelope in link.time_passed(now_ms=self.now()):
                self.flow.network.send(self._book, COORDINATOR, name, envelope)
        self._arm_links()

    def receive(self, sender: str, envelope: Envelope[Any]) -> None:
        received = self._links[sender].receive(envelope, now_ms=self.now())
        for reply in received.replies:
            self.flow.network.send(self._book, COORDINATOR, sender, reply)
        self._arm_links()
        for payload in received.payloads:
            self.post(payload)

    # ------------------------------------------------------------------ the loop

    def post(self, event: CoordinatorEvent | Brought) -> None:
        self._events.append(event)
        self._work()

    def is_busy(self) -> bool:
        return bool(self._events or self._actions)

    def _work(self) -> None:
        if not self._is_working:
            self._is_working = True
            self.world.spawn(self._loop(), self)

    def _loop(self) -> Steps:
        while self._events or self._actions:
            try:
                if not self._actions:
                    self._take(self._events.popleft())
                    continue
                action = self._actions.popleft()
                if isinstance(action, StorePending | StoreManifest | StoreAborted):
                    yield self.slow(self.world.between(1, 4))
                answer = self._perform(action)
            except Crash as crash:
                self.die(str(crash))
                return
            if answer is not None:
                # What performing it reports is taken in before the next event.
                self._actions.extend(self.core.handle(answer, now_ms=self.now()))
        self._is_working = False
        self._arm()

    def _take(self, event: CoordinatorEvent | Brought) -> None:
        if isinstance(event, Brought):
            event = self._brought(event)
        if isinstance(event, SinkCommitted) and self.generation == self.disk.generation:
            self.disk.published[event.sink] = max(self.disk.published.get(event.sink, NO_EPOCH), event.epoch)
            if event.has_rows:
                self.disk.seen[event.sink] = event.epoch
        if isinstance(event, OperatorAcked) and event.ack.generation < self.lineage[event.ack.operator].generation:
            self._take_stale(event)
            return
        self._actions.extend(self.core.handle(event, now_ms=self.now()))

    def _take_stale(self, event: OperatorAcked) -> None:
        """An acknowledgement of an older generation changes nothing."""
        pending = self.core.pending.get(event.ack.epoch)
        before = dict(pending.missing()) if pending is not None else {}
        actions = self.core.handle(event, now_ms=self.now())
        after = dict(pending.missing()) if pending is not None else {}
        if before != after or any(isinstance(action, StoreManifest) for action in actions):
            raise Violation(f"epoch {event.ack.epoch} counts what an older generation of {event.ack.operator} says")
        self.world.counts["stale_acks"] += 1
        self._actions.extend(actions)

    def _arm(self) -> None:
        deadline = self.core.next_deadline_ms(now_ms=self.now())
        if deadline is not None and deadline != self._armed_ms:
            self._armed_ms = deadline
            self.world.after(max(deadline - self.now(), 1), self._tick, self)

    def _tick(self) -> None:
        self._armed_ms = None
        self.post(TimePassed())

    # ------------------------------------------------------------------ actions

    def _perform(self, action: CoordinatorAction) -> CoordinatorEvent | None:
        match action:
            case StorePending():
                self._stored(lambda: self.disk.store_pending(self.generation, action.epoch, action.terms))
                self.world.tell(COORDINATOR, "begins", epoch=action.epoch)
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
                self.collector.release(action)
            case ReportHealth():
                self.world.counts["health"] += 1
            case AnswerRequest():
                self.answers[action.request] = action
            case _:
                assert_never(action)
        return None

    def _stored(self, store: Callable[[], bool]) -> None:
        """Store something; a coordinator that does not know whether it did does not go on."""
        if self.world.strikes("store_refused"):
            raise Crash("its records could not be written")
        done = store()
        if self.world.strikes("store_unknown"):
            raise Crash("its records may have been written")
        if not done:
            raise Crash("fenced: another coordinator has taken over")

    def _announce(self, action: AnnounceClosed) -> None:
        if not action.completed and not action.is_reminder:
            self.flow.discard(action.epoch)
        for operator in [action.operator] if action.operator else self.flow.graph.operators:
            self._say(operator, EpochClosed(epoch=action.epoch, completed=action.completed))

    # ------------------------------------------------------------------ manifests

    def _store_manifest(self, action: StoreManifest) -> CoordinatorEvent | None:
        problem = why_not_stored(action, self.lineage)
        if problem and "past the barrier" in problem:
            raise Violation(f"epoch {action.epoch}: {problem}")
        if problem:
            # A power cut took a barrier that others had seen, and its operator has cut elsewhere since.
            self.world.counts["manifests_refused"] += 1
            return ManifestRefused(epoch=action.epoch, reason=problem)
        before = next((item for item in self.core.complete if item.epoch == action.previous_epoch), None)
        manifest = build_manifest(
            FLOW,
            self.generation,
            action,
            self.lineage,
            before=before,
            completed_ms=self.now(),
            history=self._history,
        )
        if self.flow.settings.is_remote_first and self._uploader is not None:
            self._uploader.first(
                manifest, lambda there, why: self.post(Brought(action.epoch, there, why)), self.is_in_charge
            )
            return None
        return self._create_manifest(manifest)

    def _brought(self, brought: Brought) -> CoordinatorEvent:
        if brought.manifest is None:
            return ManifestRefused(epoch=brought.epoch, reason=brought.problem)
        return self._create_manifest(brought.manifest)

    def _create_manifest(self, manifest: Manifest) -> CoordinatorEvent:
        epoch, disk = manifest.epoch, self.disk
        if self.world.strikes("store_refused"):
            raise Crash("the manifest could not be written")
        if not disk.create_manifest(manifest, is_synced=False):
            there = disk.manifests[epoch]
            if isinstance(there, Tombstone) or there.generation > self.generation:
                raise Crash("fenced: another coordinator has decided about this epoch")
            if not self._is_ours(there):
                return ManifestRefused(epoch=epoch, reason="an old process has completed it in its own history")
            return self._completed(there)
        checkpoint = disk.checkpoint(epoch)
        if checkpoint is not None:
            checks.check_completed(disk, checkpoint)
        self.world.tell(COORDINATOR, "completes", epoch=epoch)
        self.world.counts["checkpoints"] += 1
        if self.world.strikes("store_unknown"):
            raise Crash("the manifest may have been written")
        return self._completed(manifest)

    def _is_ours(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is there that belongs to the history that this coordinator goes on with."""
        return is_of_history(manifest, self.lineage)

    def _completed(self, manifest: Manifest) -> ManifestStored:
        """The checkpoint exists, possibly stored by an earlier coordinator."""
        self.disk.sync_checkpoint(manifest.epoch)
        self._stored(lambda: self.disk.store_outcome(self.generation, manifest.epoch, "completed"))
        is_own = manifest.generation == self.generation
        if not is_own:
            self.world.tell(COORDINATOR, "finds complete", epoch=manifest.epoch)
            self.world.counts["found"] += 1
        if self._uploader is not None:
            self._uploader.completed(manifest.epoch)
        return ManifestStored(
            epoch=manifest.epoch,
            completed_ms=manifest.completed_ms,
            flow_ms=manifest.flow_ms,
            found=None if is_own else found_manifest(manifest),
        )

    def _store_aborted(self, action: StoreAborted) -> CoordinatorEvent:
        if action.is_inherited:
            if self.world.strikes("store_refused"):
                raise Crash("the tombstone could not be written")
            tombstone = Tombstone(epoch=action.epoch, generation=self.generation, reason=action.reason)
            if not self.disk.create_manifest(tombstone):
                there = self.disk.manifests[action.epoch]
                if isinstance(there, Manifest) and self._is_ours(there):
                    return self._completed(there)
            if self.world.strikes("store_unknown"):
                raise Crash("the tombstone may have been written")
        self._stored(lambda: self.disk.store_outcome(self.generation, action.epoch, "aborted"))
        self.world.tell(COORDINATOR, "aborts", epoch=action.epoch, why=action.reason)
        self.world.counts["aborts"] += 1
        return AbortStored(epoch=action.epoch)

    # ------------------------------------------------------------------ requests

    def pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        """At once, not in its turn: a person is told that the epoch is pinned only when it is."""
        (self.disk.pins.add if is_pinned else self.disk.pins.discard)(epoch)
        self._actions.extend(self.core.handle(PinChanged(epoch=epoch, is_pinned=is_pinned), now_ms=self.now()))
        self._work()

    def is_pending(self, region: frozenset[OperatorId]) -> bool:
        """Whether an epoch is pending that one of these operators takes part in."""
        pending = [one.terms.alone for one in self.core.pending.values()]
        return any(alone is None or alone in region for alone in pending)
