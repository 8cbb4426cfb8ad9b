"""A coordinator under random orders, failures and crashes: every batch is published once, and only what is complete."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cutline.model.ids import NO_BATCH, BatchId, Epoch, Generation, OperatorId
from cutline.protocol.messages.coordinator import (
    AnnounceClosed,
    AnswerRequest,
    CommitSink,
    CoordinatorAction,
    FoundManifest,
    InjectBarrier,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    StoreAborted,
    StoreManifest,
    StorePending,
)
from cutline.protocol.publish.publishing import CompleteEpoch
from tests.support.driven_coordinator import SINKS, SUBTASKS, DrivenCoordinator, stored_pending

RETAIN = 2
TIMEOUT_MS = 1_000
OWNER = {sink: operator for operator, sinks in SINKS.items() for sink in sinks}


@dataclass(frozen=True)
class Manifest:
    """What is stored of a complete epoch: the cuts, and the batches each operator had bound to it."""

    generation: int
    previous: int
    cuts: dict[str, int]
    bound: dict[str, range]


class Checkpoints(RuleBasedStateMachine):
    """The stores are durable; ``it``, ``todo`` and ``injected`` die with the process."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0
        self.now_ms = 0
        self.batch = dict.fromkeys(SUBTASKS, int(NO_BATCH))
        # durable
        self.pending: dict[int, int] = {}
        self.epochs_used: set[int] = set()
        self.manifests: dict[int, Manifest] = {}
        self.recorded: dict[str, int] = {}
        self.cut: dict[str, dict[int, int]] = {operator: {} for operator in SUBTASKS}
        self.pins: set[int] = set()
        #: Epochs that nobody can complete any more: something else stands in the place of their manifest.
        self.barred: set[int] = set()
        #: Manifests that earlier coordinators were about to store when they were given up for dead.
        self.zombies: dict[int, Manifest] = {}
        #: What readers of each sink see: (epoch, batches).
        self.visible: dict[str, list[tuple[int, range]]] = {sink: [] for sink in OWNER}

    @rule()
    def crash(self) -> None:
        """It is not dead, perhaps: what it was about to store may be stored later."""
        for action in self.todo:
            if isinstance(action, StoreManifest):
                self.zombies.setdefault(action.epoch, self.manifest_of(action))
        self.start()

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def a_zombie_stores_its_manifest(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.zombies)))
        manifest = self.zombies.pop(epoch)
        if epoch not in self.manifests and epoch not in self.barred:
            self.manifests[epoch] = manifest

    @initialize()
    def start(self) -> None:
        """A new incarnation goes on with the same logs."""
        self.generation += 1
        newest = max(self.manifests, default=0)
        for epoch in [epoch for epoch in self.pending if epoch in self.manifests]:
            del self.pending[epoch]
        for sink in OWNER:
            seen = self.visible[sink][-1][0] if self.visible[sink] else 0
            self.recorded[sink] = min(max(seen, self.recorded.get(sink, 0)), newest)
        self.it = DrivenCoordinator(
            max_concurrent=2,
            timeout_ms=TIMEOUT_MS,
            retain=RETAIN,
            last_epoch=max(self.epochs_used, default=0),
            complete=[
                CompleteEpoch(
                    epoch=Epoch(epoch),
                    generation=Generation(manifest.generation),
                    previous_epoch=Epoch(manifest.previous),
                    batches=_typed(manifest.cuts),
                )
                for epoch, manifest in sorted(self.manifests.items())
            ],
            published=self.recorded,
            generation=self.generation,
            pins=self.pins,
            now_ms=self.now_ms,
            started=False,
        )
        self.todo: list[CoordinatorAction] = []
        self.injected: set[int] = set()
        self.prepared: dict[int, dict[str, range]] = {}
        self.completed_batch = {
            operator: self.manifests[newest].cuts[operator] if newest else int(NO_BATCH) for operator in SUBTASKS
        }
        stored = [stored_pending(epoch, started_ms=started) for epoch, started in sorted(self.pending.items())]
        self.take(self.it.core.start(stored, now_ms=self.now_ms))

    # ------------------------------------------------------------------ what can happen

    @rule(operator=st.sampled_from(list(SUBTASKS)))
    def run_a_batch(self, operator: str) -> None:
        self.batch[operator] += 1

    @rule()
    def request(self) -> None:
        self.take(self.it.request("r"))

    @rule(ms=st.sampled_from([100, 600]))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.it.now_ms = self.now_ms
        self.take(self.it.pass_ms(0))

    @precondition(lambda self: self.todo)
    @rule(data=st.data())
    def perform(self, data: st.DataObject) -> None:
        """Something the coordinator asked for takes place; the oldest of each epoch first."""
        first = {getattr(action, "epoch", None) or action: action for action in reversed(self.todo)}
        action = data.draw(st.sampled_from(list(first.values())))
        refused = isinstance(action, StoreManifest) and data.draw(st.integers(0, 9)) == 0
        outcomes = ["done", "done", "not done", "unknown"]
        self.do(action, refused=refused, outcome=data.draw(st.sampled_from(outcomes)))

    def do(self, action: CoordinatorAction, *, refused: bool = False, outcome: str = "done") -> None:
        self.todo.remove(action)
        match action:
            case StorePending():
                assert action.epoch not in self.epochs_used, "an epoch is never used twice"
                self.epochs_used.add(action.epoch)
                self.pending[action.epoch] = action.terms.started_ms
                self.take(self.it.pending_stored(action.epoch))
            case StoreManifest():
                self.store_manifest(action, refused=refused)
            case StoreAborted():
                self.store_abort(action)
            case CommitSink():
                self.commit(action, outcome=outcome)
            case _:
                raise AssertionError(f"nothing is to be done about {action}")

    def store_abort(self, action: StoreAborted) -> None:
        if action.epoch in self.manifests:
            assert action.is_inherited, "nobody else could have completed it"
            self.pending.pop(action.epoch, None)
            self.found(action.epoch)
            return
        self.barred.add(action.epoch)
        self.pending.pop(action.epoch, None)
        self.take(self.it.abort_stored(action.epoch))

    def found(self, epoch: int) -> None:
        manifest = self.manifests[epoch]
        found = FoundManifest(
            generation=Generation(manifest.generation),
            previous_epoch=Epoch(manifest.previous),
            batches=_typed(manifest.cuts),
        )
        self.take(self.it.manifest_stored(epoch, found=found))

    @rule(operator=st.sampled_from(list(SUBTASKS)))
    def an_operator_begins_a_new_life(self, operator: str) -> None:
        self.take(self.it.operator_started(operator))

    @rule(epoch=st.integers(1, 12), is_pinned=st.booleans())
    def pin(self, epoch: int, is_pinned: bool) -> None:
        (self.pins.add if is_pinned else self.pins.discard)(epoch)
        self.take(self.it.pin(epoch) if is_pinned else self.it.unpin(epoch))

    @precondition(lambda self: self.injected)
    @rule(operator=st.sampled_from(list(SUBTASKS)), data=st.data(), again=st.booleans())
    def acknowledge(self, operator: str, data: st.DataObject, again: bool) -> None:
        """An operator cuts for an epoch (in order, once, in its log) and acknowledges, perhaps twice."""
        epoch = data.draw(st.sampled_from(sorted(self.injected)))
        for _ in range(2 if again else 1):
            self.cut_and_acknowledge(operator, epoch)

    def cut_and_acknowledge(self, operator: str, epoch: int) -> None:
        if self.cut_for(operator, epoch):
            self.take(self.it.ack(operator, epoch, batch=self.cut[operator][epoch]))

    def cut_for(self, operator: str, epoch: int) -> bool:
        cuts = self.cut[operator]
        if epoch not in cuts and epoch < max(cuts, default=0):
            return False
        cuts.setdefault(epoch, self.batch[operator])
        bound = range(self.completed_batch[operator] + 1, cuts[epoch] + 1)
        self.prepared.setdefault(epoch, {}).setdefault(operator, bound)
        return True

    @rule()
    def cut_everywhere(self) -> None:
        """All operators cut for what is pending; their acknowledgements are under way."""
        for epoch in sorted(self.injected):
            for operator in SUBTASKS:
                self.cut_for(operator, epoch)

    @precondition(lambda self: self.injected)
    @rule(data=st.data())
    def acknowledge_everywhere(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.injected)))
        for operator in SUBTASKS:
            self.cut_and_acknowledge(operator, epoch)

    @rule()
    def perform_everything(self) -> None:
        """The usual case: whatever is asked for is done at once, in order, without a fault."""
        while self.todo:
            self.do(self.todo[0])

    @rule(operator=st.sampled_from(list(SUBTASKS)), data=st.data())
    def fail_a_snapshot(self, operator: str, data: st.DataObject) -> None:
        if self.injected and data.draw(st.integers(0, 4)) == 0:
            self.take(self.it.snapshot_failed(operator, data.draw(st.sampled_from(sorted(self.injected)))))

    # ------------------------------------------------------------------ what the coordinator asks for

    def take(self, actions: list[CoordinatorAction]) -> None:
        for action in actions:
            match action:
                case InjectBarrier():
                    assert action.epoch in self.pending, "durable first"
                    self.injected.add(action.epoch)
                case AnnounceClosed():
                    self.announce(action.epoch, completed=action.completed)
                case ReleaseEpochs():
                    self.release(action)
                case StorePending() | StoreManifest() | StoreAborted() | CommitSink():
                    self.todo.append(action)
                case RequestAck():
                    assert action.epoch in self.pending, "nobody is asked about what is over"
                case AnswerRequest() | ReportHealth():
                    pass

    def store_manifest(self, action: StoreManifest, *, refused: bool) -> None:
        assert set(action.acks) == set(SUBTASKS)
        assert {name: len(ack.subtasks) for name, ack in action.acks.items()} == SUBTASKS
        assert all(ack.generation == self.generation for ack in action.acks.values())
        if action.epoch in self.manifests:
            self.pending.pop(action.epoch, None)
            self.found(action.epoch)
            return
        if refused:
            self.take(self.it.manifest_refused(action.epoch))
            return
        assert action.epoch not in self.barred, "what was given up is not completed"
        assert action.epoch > max(self.manifests, default=0), "complete epochs ascend"
        assert action.previous_epoch == max(self.manifests, default=0)
        self.manifests[action.epoch] = self.manifest_of(action)
        self.pending.pop(action.epoch, None)
        self.take(self.it.manifest_stored(action.epoch))

    def manifest_of(self, action: StoreManifest) -> Manifest:
        cuts = {str(name): int(ack.cut.batch) for name, ack in action.acks.items()}
        return Manifest(self.generation, action.previous_epoch, cuts, dict(self.prepared[action.epoch]))

    def announce(self, epoch: int, *, completed: bool) -> None:
        assert completed == (epoch in self.manifests)
        assert epoch not in self.pending, "operators hear of it when it is durable"
        self.injected.discard(epoch)
        if completed:
            for operator in SUBTASKS:
                self.completed_batch[operator] = max(self.completed_batch[operator], self.cut[operator][epoch])

    def release(self, action: ReleaseEpochs) -> None:
        for epoch in action.drop:
            for sink in OWNER:
                seen = self.visible[sink][-1][0] if self.visible[sink] else 0
                assert seen > epoch or self.recorded.get(sink, 0) > epoch, "unpublished epochs are kept"
            assert epoch not in self.pins
            del self.manifests[epoch]
        retained = [int(epoch) for epoch in action.retained]
        # A zombie may have stored one that the coordinator has not met yet.
        assert set(retained) <= set(self.manifests) <= {*retained, *self.pending}
        assert len(retained) >= RETAIN

    def commit(self, action: CommitSink, *, outcome: str) -> None:
        permit, sink = action.permit, str(action.permit.sink)
        manifest = self.manifests[permit.epoch]
        assert permit.generation == manifest.generation
        published = self.visible[sink]
        if outcome != "not done" and permit.epoch not in [epoch for epoch, _ in published]:
            batches = range(permit.after_batch + 1, permit.through_batch + 1)
            through = published[-1][1].stop - 1 if published else NO_BATCH
            assert permit.epoch > (published[-1][0] if published else 0), "in the order of epochs"
            assert permit.after_batch == through, "no batch left out, none twice"
            bound = manifest.bound[OWNER[sink]]
            assert all(batch in bound for batch in batches), "what is published was bound to the epoch"
            published.append((permit.epoch, batches))
        if outcome == "done":
            self.recorded[sink] = permit.epoch
            self.take(self.it.sink_committed(sink, permit.epoch))
        else:
            self.take(self.it.sink_failed(sink, permit.epoch))

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def sinks_show_complete_epochs_only(self) -> None:
        for published in self.visible.values():
            assert all(epoch in self.manifests or epoch < max(self.manifests) for epoch, _ in published)

    @invariant()
    def the_timer_is_not_in_the_past(self) -> None:
        if self.generation and self.it.next_deadline_ms() is not None:
            self.take(self.it.pass_ms(0))
            deadline = self.it.next_deadline_ms()
            assert deadline is None or deadline > self.now_ms, "the coordinator would spin"

    def teardown(self) -> None:
        """When everything gets through, one more checkpoint publishes every batch there is."""
        if not self.generation:
            return
        for _ in range(3):
            self.request()
            for _ in range(2 * TIMEOUT_MS // 100):
                self.settle()
            assert not self.it.core.pending
            self.pass_time(TIMEOUT_MS)
        for sink, operator in OWNER.items():
            batches = [batch for _, published in self.visible[sink] for batch in published]
            assert batches == list(range(self.batch[operator] + 1))
        assert self.it.core.is_settled()

    def settle(self) -> None:
        self.perform_everything()
        for epoch in sorted(self.injected):
            for operator in SUBTASKS:
                self.cut_and_acknowledge(operator, epoch)
        self.pass_time(100)


def _typed(cuts: dict[str, int]) -> dict[OperatorId, BatchId]:
    return {OperatorId(name): BatchId(batch) for name, batch in cuts.items()}


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(stateful_step_count=60)
