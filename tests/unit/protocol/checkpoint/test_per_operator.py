"""A coordinator for each operator, which together look like one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

from cutline.errors import InvariantViolation
from cutline.model.cut import BarrierTerms
from cutline.model.ids import Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.protocol.checkpoint.coordinator import Coordinator
from cutline.protocol.checkpoint.per_operator import PerOperatorCoordinator
from cutline.protocol.checkpoint.setup import EpochNumbers, Settings, StoredPending, Topology
from cutline.protocol.checkpoint.trigger import TriggerPolicy, TriggerSettings
from cutline.protocol.history.retention import RetentionPolicy
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    CheckpointRequested,
    CoordinatorAction,
    CoordinatorEvent,
    InjectBarrier,
    ManifestStored,
    PendingStored,
    RegionLost,
    RegionRestored,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    StoreAborted,
    StoreManifest,
    StorePending,
)
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import OperatorAcked, OperatorStarted, SinkCommitted, SnapshotFailed
from tests.support.driven_coordinator import operator_ack

A = TypeVar("A")
LEFT, TOTALS, TABLE = OperatorId("left"), OperatorId("totals"), SinkId("table")


def part(operator: OperatorId, numbers: EpochNumbers, interval_ms: int, tolerable: int | None) -> Coordinator:
    return Coordinator(
        topology=Topology(
            flow=FlowName("flow"),
            subtasks={operator: 1},
            sources=frozenset({operator}),
            sinks={operator: (TABLE,) if operator == TOTALS else ()},
            alone=operator,
        ),
        generation=Generation(1),
        settings=Settings(
            timeout_ms=1_000,
            alignment_limit_ms=0,
            retention=RetentionPolicy(count=1),
            trigger=TriggerPolicy(TriggerSettings(interval_ms=interval_ms)),
            tolerable_failures=tolerable,
        ),
        numbers=numbers,
    )


class Driven:
    """Stores whatever it is asked to at once, unless told not to."""

    def __init__(self, *, left_ms: int = 0, totals_ms: int = 0, tolerable: int | None = None, last: int = 0) -> None:
        numbers = EpochNumbers(Epoch(last))
        self.core = PerOperatorCoordinator(
            {LEFT: part(LEFT, numbers, left_ms, tolerable), TOTALS: part(TOTALS, numbers, totals_ms, tolerable)},
            numbers,
        )
        self.now_ms = 0
        self.actions: list[CoordinatorAction] = []

    def start(self, pending: Iterable[StoredPending] = ()) -> Driven:
        self._perform(self.core.start(pending, now_ms=0))
        return self

    def tell(self, event: CoordinatorEvent) -> None:
        self._perform(self.core.handle(event, now_ms=self.now_ms))

    def _perform(self, actions: list[CoordinatorAction]) -> None:
        self.actions += actions
        for action in actions:
            match action:
                case StorePending():
                    self.tell(PendingStored(epoch=action.epoch))
                case StoreManifest():
                    self.tell(ManifestStored(epoch=action.epoch))
                case StoreAborted():
                    self.tell(AbortStored(epoch=action.epoch))
                case _:
                    pass

    def ack(self, operator: OperatorId, epoch: int) -> None:
        self.tell(OperatorAcked(ack=operator_ack(operator, epoch, batch=epoch, subtasks=[0], generation=1)))

    def complete(self, operator: OperatorId, epoch: int) -> None:
        self.ack(operator, epoch)
        if operator == TOTALS:
            self.tell(SinkCommitted(operator=TOTALS, sink=TABLE, epoch=Epoch(epoch)))

    def asked(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def injected(self) -> list[tuple[str, int]]:
        return [(action.operator, action.epoch) for action in self.asked(InjectBarrier)]


def test_each_operator_is_asked_at_its_own_interval_and_no_number_is_used_twice() -> None:
    it = Driven(left_ms=100, totals_ms=250).start()
    for _ in range(5):
        it.now_ms += 100
        it.tell(TimePassed())
        for operator, epoch in list(it.injected):
            it.ack(OperatorId(operator), epoch)
    assert it.injected == [("left", 1), ("left", 2), ("left", 3), ("totals", 4), ("left", 5), ("left", 6)]
    assert {action.terms.alone for action in it.asked(InjectBarrier)} == {LEFT, TOTALS}
    assert it.core.next_deadline_ms(now_ms=it.now_ms) == 550, "of the one that is due first"


def test_a_request_is_answered_when_the_last_operator_has_published() -> None:
    it = Driven().start()
    it.tell(CheckpointRequested(request="r"))
    it.complete(LEFT, 1)
    assert it.asked(AnswerRequest) == []
    it.ack(TOTALS, 2)
    assert it.asked(AnswerRequest) == []
    it.tell(SinkCommitted(operator=TOTALS, sink=TABLE, epoch=Epoch(2)))
    assert it.asked(AnswerRequest) == [AnswerRequest(request="r", epoch=Epoch(2), completed=True)]


def test_a_request_that_one_operator_fails_names_it_and_the_other_completes() -> None:
    it = Driven().start()
    it.tell(CheckpointRequested(request="r"))
    it.tell(SnapshotFailed(operator=TOTALS, epoch=Epoch(2), generation=Generation(1), reason="disk full"))
    it.complete(LEFT, 1)
    [answer] = it.asked(AnswerRequest)
    assert (answer.completed, answer.epoch) == (False, 2)
    assert "totals: " in answer.reason and "disk full" in answer.reason
    assert [item.epoch for item in it.core.complete] == [1]
    assert it.asked(AnnounceClosed) == [
        AnnounceClosed(epoch=Epoch(2), completed=False, operator=TOTALS),
        AnnounceClosed(epoch=Epoch(1), completed=True, operator=LEFT),
    ]


def test_what_goes_is_named_with_all_that_the_others_retain_and_have_under_way() -> None:
    it = Driven(left_ms=100).start()
    it.tell(CheckpointRequested(request="r"))
    it.complete(LEFT, 1)
    for epoch in (3, 4):
        it.now_ms += 100
        it.tell(TimePassed())
        it.complete(LEFT, epoch)
    assert it.asked(ReleaseEpochs) == [
        ReleaseEpochs(drop=(Epoch(1),), retained=(Epoch(3),), open_from=Epoch(2)),
        ReleaseEpochs(drop=(Epoch(3),), retained=(Epoch(4),), open_from=Epoch(2)),
    ]
    it.complete(TOTALS, 2)
    assert [item.epoch for item in it.core.complete] == [2, 4]


def test_pending_epochs_go_to_the_operator_they_are_of() -> None:
    def stored(epoch: int, alone: OperatorId | None) -> StoredPending:
        terms = BarrierTerms(alignment_limit_ms=0, alone=alone)
        return StoredPending(epoch=Epoch(epoch), terms=terms, is_resumable=True)

    it = Driven(last=9).start([stored(7, TOTALS), stored(9, LEFT)])
    assert {(ask.operator, ask.epoch) for ask in it.asked(RequestAck)} == {("totals", 7), ("left", 9)}
    with pytest.raises(InvariantViolation, match="belongs to no operator"):
        Driven().start([stored(1, None)])


def test_an_operator_that_starts_hears_nothing_of_what_others_have_under_way() -> None:
    """To hear that it is closed would make it discard what the other has stored."""
    it = Driven().start()
    it.tell(CheckpointRequested(request="r"))
    it.actions.clear()
    started = OperatorStarted(operator=LEFT, generation=Generation(1), open_epochs=(Epoch(1), Epoch(2)))
    it.tell(started)
    assert it.asked(AnnounceClosed) == []
    assert it.injected == [("left", 1)]


def test_only_what_the_failed_operator_has_under_way_is_given_up_and_all_go_on_in_the_new_generation() -> None:
    it = Driven().start()
    it.tell(CheckpointRequested(request="r"))
    it.tell(RegionLost(operators=frozenset({TOTALS}), reason="its host is gone"))
    assert list(it.core.pending) == [1]
    it.tell(RegionRestored(operators=frozenset({TOTALS}), generation=Generation(5)))
    assert it.core.generation == 5
    it.ack(LEFT, 1)
    assert [item.epoch for item in it.core.complete] == [1], "what is said in the old generation by others counts"


def test_the_flow_is_healthy_when_every_operator_is() -> None:
    it = Driven(tolerable=0).start()

    def fail(operator: OperatorId, epoch: int) -> None:
        it.tell(SnapshotFailed(operator=operator, epoch=Epoch(epoch), generation=Generation(1), reason="no"))

    it.tell(CheckpointRequested(request="a"))
    fail(LEFT, 1)
    fail(TOTALS, 2)
    assert [report.is_healthy for report in it.asked(ReportHealth)] == [False]
    it.tell(CheckpointRequested(request="b"))
    it.complete(LEFT, 3)
    assert not it.core.is_healthy
    it.complete(TOTALS, 4)
    assert [report.is_healthy for report in it.asked(ReportHealth)] == [False, True]
