"""A running flow and what one may ask of it, on real storage without Spark."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cutline.errors import CheckpointFailedError, ConfigError, FencedError, UnknownEpochError
from cutline.model.checkpoint import Tombstone
from cutline.model.ids import Epoch, OperatorId
from cutline.model.status import HealthStatus
from cutline.protocol.checkpoint.coordinator import Coordinator
from cutline.protocol.checkpoint.per_operator import FlowCoordinator
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.detached import DetachedLogs
from cutline.transport.in_process import Address, Content, InProcessRouter
from tests.support.changing import ChangingFlow, changing
from tests.support.killing import is_killed_at
from tests.support.running import assert_each_once, running
from tests.support.sparkless import LONG_SECONDS, NUMBERS, TOTALS, SparklessFlow


def whole(core: FlowCoordinator) -> Coordinator:
    assert isinstance(core, Coordinator)
    return core


def metric(flow: SparklessFlow, name: str, **labels: str) -> float | None:
    return flow.run.metrics.registry.get_sample_value(name, {"flow": "counting", **labels})


def finished(flow: SparklessFlow, ask: Callable[[], Any]) -> Future[Any]:
    """Ask on a thread of its own; ``totals`` goes on reading until there is an answer."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask)
        flow.wait(lambda: future.done() or (not flow.step(TOTALS) and future.done()))
    return future


# ------------------------------------------------------------------------------------------------- triggers


def test_a_checkpoint_begins_after_so_many_batches_of_the_sources(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_every_batches=3) as flow:
        flow.emit(2)
        assert flow.coordinator.snapshot().checkpoints.last_epoch == 0
        flow.emit(1)
        flow.wait(lambda: flow.checkpoints.epochs() == [1])
        flow.emit(3)
        flow.wait(lambda: flow.checkpoints.epochs() == [2])


def test_a_checkpoint_begins_after_so_many_rows_of_the_sources(tmp_path: Path) -> None:
    """One row a batch, and those of ``totals`` do not count."""
    with running(tmp_path, checkpoint_every_rows=4) as flow:
        flow.emit(3)
        assert flow.coordinator.snapshot().checkpoints.last_epoch == 0
        flow.emit(1)
        flow.wait(lambda: flow.checkpoints.epochs() == [1])


def test_a_checkpoint_begins_when_all_watermarks_have_passed_a_boundary(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_event_time="1m") as flow:
        flow.watermark_ms = 30_000
        flow.emit(2)
        flow.watermark_ms = 61_000
        flow.step(NUMBERS)
        trigger = whole(flow.coordinator._core)._settings.trigger
        flow.wait(lambda: trigger._watermarks == {NUMBERS: 61_000, TOTALS: 30_000})
        assert flow.coordinator.snapshot().checkpoints.last_epoch == 0
        flow.wait(lambda: flow.step(TOTALS))
        flow.wait(lambda: flow.checkpoints.epochs() == [1])


def test_a_full_channel_is_reported_and_so_is_room_in_it(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_interval_backlog="1h", channel_capacity_entries=2) as flow:
        trigger = whole(flow.coordinator._core)._settings.trigger
        flow.step(NUMBERS)
        flow.step(NUMBERS)
        flow.wait(lambda: trigger._without_room == {NUMBERS})
        flow.wait(lambda: flow.step(TOTALS))
        flow.wait(lambda: trigger._without_room == set())


def test_the_first_checkpoint_of_a_new_flow_does_not_wait_for_the_timer(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_interval="1h") as flow:
        flow.step(NUMBERS)
        assert flow.coordinator.snapshot().checkpoints.last_epoch == 0
        flow.wait(lambda: flow.step(TOTALS))
        flow.wait(lambda: flow.sink.rows() == [[0, 1]])
        flow.emit(2)
        assert flow.coordinator.snapshot().checkpoints.last_epoch == 1
    with running(tmp_path, checkpoint_interval="1h") as flow:
        flow.emit(2)
        assert flow.coordinator.snapshot().checkpoints.last_epoch == 1, "a flow that has one waits for its timer"


def test_nobody_reports_progress_that_nobody_asks_for(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        assert whole(flow.coordinator._core)._settings.trigger._batches == 0


# ------------------------------------------------------------------------------------------------- operators' own


def test_an_operator_may_have_a_mode_of_its_own(tmp_path: Path) -> None:
    with running(tmp_path, mode="aligned", own={TOTALS: {"mode": "unaligned"}}) as flow:
        flow.step(NUMBERS)
        future = flow.coordinator.request_checkpoint(None)
        flow.wait(future.done)
        assert flow.checkpoints.load_manifest(Epoch(1)).operators[TOTALS].mode == "unaligned"


def test_a_mode_asked_for_by_name_binds_every_operator(tmp_path: Path) -> None:
    with running(tmp_path, own={TOTALS: {"mode": "unaligned"}}) as flow:
        flow.step(NUMBERS)
        asked = finished(flow, lambda: flow.run.trigger_checkpoint(mode="aligned"))
        assert flow.checkpoints.load_manifest(asked.result()).operators[TOTALS].mode == "aligned"


def test_configuration_wins_over_code(tmp_path: Path) -> None:
    operators = {"totals": {"mode": "unaligned"}}
    own = {TOTALS: {"mode": "aligned", "checkpoint_timeout": "50ms"}}
    with running(tmp_path, mode="aligned", own=own, operators=operators) as flow:
        flow.step(NUMBERS)
        flow.wait(flow.coordinator.request_checkpoint(None).done)
        assert flow.checkpoints.load_manifest(Epoch(1)).operators[TOTALS].mode == "unaligned"
        assert whole(flow.coordinator._core)._settings.operator_timeouts_ms == {TOTALS: 50}, (
            "what it does not set stays"
        )


@pytest.mark.parametrize("settings", [{"own": {TOTALS: {"checkpoint_timeout": "50ms"}}}, {"operator_timeout": "50ms"}])
def test_an_operator_that_takes_too_long_fails_the_checkpoint_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    with running(tmp_path, **settings) as flow:
        flow.emit(1)
        flow.step(NUMBERS)
        flow.wait(lambda: flow.step(TOTALS, commit=False))
        future = flow.request()
        flow.wait(future.done)
        with pytest.raises(CheckpointFailedError, match="waiting for totals"):
            future.result(0)


#: ``both`` reads ``a`` directly, and through ``slow``, which aligns.
TWO_WAYS: dict[str, tuple[str, ...]] = {"a": (), "slow": ("a",), "both": ("a", "slow")}
SLOW_ALIGNS = {"slow": {"mode": "aligned"}}


def behind(flow: ChangingFlow) -> None:
    """``slow`` has one entry to read before it reaches the barriers of the epochs to come."""
    flow.emit(1)
    flow.read_all()
    flow.emit(1)


def test_an_operator_is_not_late_for_the_delay_of_another(tmp_path: Path) -> None:
    """``both`` cuts at once. Only its own acknowledgement has a short limit."""
    own = {**SLOW_ALIGNS, "both": {"checkpoint_timeout": "200ms"}}
    with changing(tmp_path, TWO_WAYS, {"table": "both"}, operators=own) as flow:
        behind(flow)
        future = flow.coordinator.request_checkpoint(None)
        flow.wait(lambda: missing(flow, 1) == {"slow"})
        threading.Event().wait(0.3)
        assert flow.step("slow")
        assert future.result(LONG_SECONDS) == 1
        flight = flow.checkpoints.load_manifest(Epoch(1)).channels
        assert flight[OperatorId("a")].in_flight[OperatorId("both")].entries == 1
        late = flight[OperatorId("slow")].in_flight[OperatorId("both")]
        assert late.end == flow.operators[OperatorId("slow")].channel.end - 1
        assert (late.entries, late.rows, late.size_bytes) == (None, None, None), "its barrier had not appeared"


def test_the_files_of_a_second_cut_are_held_while_the_first_epoch_is_pending(tmp_path: Path) -> None:
    """Spark goes on and purges: what is not held at once may be gone."""
    settings: dict[str, Any] = {"operators": SLOW_ALIGNS, "max_concurrent_checkpoints": 2}
    with changing(tmp_path, TWO_WAYS, {"table": "both"}, **settings) as flow:
        behind(flow)
        first = flow.coordinator.request_checkpoint(None)
        flow.wait(lambda: missing(flow, 1) == {"slow"})
        flow.step("both")
        second = flow.coordinator.request_checkpoint(None)
        flow.wait(lambda: missing(flow, 2) == {"slow"})
        flow.read_all()
        assert (first.result(LONG_SECONDS), second.result(LONG_SECONDS)) == (1, 2)


def missing(flow: ChangingFlow, epoch: int) -> set[str]:
    """The operators that have not acknowledged a pending epoch."""
    pending = flow.coordinator.snapshot().checkpoints.pending.get(Epoch(epoch))
    return set() if pending is None else set(pending.missing)


def test_options_of_an_operator_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"operators\.total: the flow has no such operator") as caught:
        SparklessFlow(tmp_path, operators={"total": {"mode": "aligned"}})
    assert "numbers, totals" in caught.value.next_step


# ------------------------------------------------------------------------------------------------- health


def test_a_flow_is_unhealthy_when_more_checkpoints_fail_than_are_tolerated(tmp_path: Path) -> None:
    with running(tmp_path, tolerable_failures=1) as flow:
        flow.emit(1)
        for state in ("running", "unhealthy", "unhealthy"):
            flow.sink.prepare_failures.append(ValueError("disk full"))
            with pytest.raises(CheckpointFailedError):
                flow.checkpoint()
            assert flow.run.status().state == state
        health = flow.run.status().health
        assert (health.healthy, health.failures) == (False, 3)
        assert "disk full" in health.reason
        # It is told with the status, which is written now and then.
        flow.wait(lambda: metric(flow, "cutline_healthy") == 0)
        flow.checkpoint()
        assert flow.run.status().health == HealthStatus(healthy=True, failures=0, reason="")
        assert flow.run.status().state == "running"
        flow.wait(lambda: metric(flow, "cutline_healthy") == 1)


def test_any_number_of_failures_is_tolerated_unless_said_otherwise(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        for _ in range(4):
            flow.sink.prepare_failures.append(ValueError("disk full"))
            with pytest.raises(CheckpointFailedError):
                flow.checkpoint()
        assert flow.run.status().health.healthy
        assert flow.run.status().health.failures == 4


# ------------------------------------------------------------------------------------------------- quiesce


def test_a_quiesced_checkpoint_has_nothing_in_flight_and_the_flow_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        for _ in range(3):
            flow.step(NUMBERS)
        epoch = finished(flow, lambda: flow.run.trigger_checkpoint(quiesce=True)).result()
        manifest = flow.checkpoints.load_manifest(epoch)
        assert manifest.channels[NUMBERS].in_flight[TOTALS].entries == 0
        assert {cut.mode for cut in manifest.operators.values()} == {"aligned"}
        assert flow.sink.rows() == [[number, number + 1] for number in range(4)]
        assert flow.run.status().state == "running"
        assert flow.step(NUMBERS), "the source has its credit back"


def test_a_quiesced_checkpoint_lets_no_new_batch_of_a_source_begin(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.step(NUMBERS)
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(flow.run.trigger_checkpoint, quiesce=True)
            flow.wait(lambda: flow.run.status().state == "paused")
            held = pool.submit(flow.step, NUMBERS)
            flow.wait(flow.operators[NUMBERS].credits.is_waiting)
            flow.wait(lambda: asked.done() or (not flow.step(TOTALS) and asked.done()))
            flow.wait(held.done)
        assert flow.checkpoints.load_manifest(asked.result()).operators[NUMBERS].batch == 0
        assert held.result()


def test_a_flow_that_was_paused_stays_paused(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        assert flow.run.pause()
        assert finished(flow, lambda: flow.run.trigger_checkpoint(quiesce=True)).result() == 1
        assert flow.run.status().state == "paused"
        flow.run.resume()


def test_a_flow_that_does_not_come_to_rest_in_time_goes_on_without_a_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.step(NUMBERS)
        with pytest.raises(CheckpointFailedError, match="not processed in time"):
            flow.run.trigger_checkpoint(quiesce=True, timeout="50ms")
        assert flow.run.status().state == "running"
        assert flow.checkpoints.epochs() == []
        flow.step(NUMBERS)


def test_a_quiesced_checkpoint_cannot_be_unaligned(tmp_path: Path) -> None:
    with running(tmp_path) as flow, pytest.raises(ConfigError, match="quiesce"):
        flow.run.trigger_checkpoint(quiesce=True, mode="unaligned")


# ------------------------------------------------------------------------------------------------- pins


def test_a_pinned_checkpoint_stays_over_restarts_until_it_is_unpinned(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.run.pin(1)
        for _ in range(2):
            flow.emit(2)
            flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [1, 3])
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [1, 4])
        view = flow.run.status().checkpoints
        assert (view.last_epoch, view.min_epoch, view.pins) == (4, 1, [1])
        detached = DetachedLogs(flow.layout)
        flow.wait(lambda: detached.has(Epoch(1)))
        flow.run.unpin(1)
        flow.wait(lambda: flow.checkpoints.epochs() == [4])
        flow.wait(lambda: not detached.has(Epoch(1)))
        assert flow.run.status().checkpoints.min_epoch == 4
        assert flow.metadata.pins() == frozenset()


def test_an_epoch_that_is_not_there_cannot_be_pinned(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        flow.checkpoint()
        with pytest.raises(UnknownEpochError, match="epoch 9 is not a complete checkpoint") as caught:
            flow.run.pin(9)
        assert caught.value.next_step == "available checkpoints: 1"
        with pytest.raises(UnknownEpochError, match="epoch 1 is not pinned"):
            flow.run.unpin(1)


def test_young_checkpoints_are_kept_beyond_their_number(tmp_path: Path) -> None:
    with running(tmp_path, retain_age="1h") as flow:
        for _ in range(4):
            flow.emit(1)
            flow.checkpoint()
        assert flow.checkpoints.epochs() == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------- figures


def test_the_history_has_the_figures_of_every_operator(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        (outcome,) = flow.run.checkpoints()
        figures = outcome.details["operators"]
        assert set(figures) == {NUMBERS, TOTALS}
        assert figures[TOTALS]["batch"] == 1
        phases = ("start_delay_ms", "alignment_ms", "sync_ms", "async_ms")
        assert figures[TOTALS]["total_ms"] == pytest.approx(sum(figures[TOTALS][phase] for phase in phases))
        (subtask,) = flow.checkpoints.load_manifest(Epoch(1)).operators[TOTALS].subtasks
        assert subtask.files > 0 and subtask.async_ms > 0


def test_the_history_says_who_had_acknowledged_an_aborted_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_timeout="300ms") as flow:
        flow.emit(1)
        flow.step(NUMBERS)
        flow.wait(lambda: flow.step(TOTALS, commit=False))
        flow.wait(flow.request().done)
        (outcome,) = flow.run.checkpoints()
        assert "waiting for totals" in outcome.reason
        assert outcome.details["missing"] == {"totals": [0]}
        assert set(outcome.details["operators"]) == {"numbers"}
        assert outcome.details["operators"]["numbers"]["batch"] == 1


# ------------------------------------------------------------------------------------------------- the post


class BadWire:
    """Loses, repeats and swaps letters on their way to any thread's queue."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._held: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def carry(self, deliver: Callable[[], None]) -> None:
        with self._lock:
            fate = self._chance.choice(["lost", "twice", "later", "fine", "fine"])
            held = self._held
            self._held = [deliver] if fate == "later" else []
        for late in [deliver] * {"lost": 0, "twice": 2, "later": 0, "fine": 1}[fate] + held:
            late()


@pytest.mark.parametrize("seed", range(4))
def test_over_a_bad_wire_every_checkpoint_completes_and_every_number_is_published_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    wire = BadWire(seed)
    deliver = InProcessRouter.deliver

    def deliver_badly(self: InProcessRouter, sender: Address, receiver: Address, content: Content) -> None:
        wire.carry(lambda: deliver(self, sender, receiver, content))

    monkeypatch.setattr(InProcessRouter, "deliver", deliver_badly)
    with running(tmp_path, message_retry="2ms", message_retry_limit=12) as flow:
        for expected in range(1, 5):
            flow.emit(2)
            assert flow.checkpoint() == expected
        assert_each_once(flow.sink.rows())
        links = flow.run.status().messages.links
        assert links["retried"] > 0
        assert links["duplicate"] > 0
        assert (metric(flow, "cutline_messages_total", kind="retried") or 0) >= links["retried"]


def test_messages_and_acknowledgements_are_counted(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        flow.checkpoint()
        messages = flow.run.status().messages
        assert messages.acknowledgements["accepted"] == 2
        assert not messages.links, "inside one process nothing goes astray"
        assert metric(flow, "cutline_acknowledgements_total", outcome="accepted") == 2


# ------------------------------------------------------------------------------------------------- zombies


def test_an_epoch_that_was_given_up_after_a_restore_is_barred(tmp_path: Path) -> None:
    def be_killed() -> None:
        with running(tmp_path) as flow:
            flow.emit(1)
            flow.checkpoint()

    assert is_killed_at("before-manifest", be_killed)
    with running(tmp_path, checkpoint_timeout="1ms") as flow:
        flow.wait(lambda: flow.layout.manifest(Epoch(1)).exists())
        flow.wait(lambda: not flow.metadata.pending())
        assert flow.checkpoints.epochs() == []
        (outcome,) = flow.run.checkpoints()
        assert (outcome.outcome, outcome.reason) == ("aborted", "timed out while the coordinator was down")
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_coordinator_whose_epoch_was_barred_by_another_ends_the_flow(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.step(NUMBERS)
        flow.request(aligned=True)
        flow.wait(lambda: bool(flow.operators[TOTALS].aligning()))
        # Another process removes pins that it finds when it begins, and this is about what it does after that.
        flow.wait(lambda: NUMBERS in flow.checkpoints.recorded(Epoch(1)))
        newer = LocalCheckpointStore(flow.layout)
        newer.store_tombstone(Tombstone(epoch=Epoch(1), generation=flow.recovered.generation, reason="taken over"))
        flow.wait(lambda: flow.step(TOTALS))
        with pytest.raises(FencedError, match="has decided about this epoch"):
            flow.wait(lambda: False)
        assert flow.checkpoints.epochs() == []


def overtaken_by(aside: Path, place: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """An earlier process stores its manifest just before ours, or our tombstone, would be."""
    original = getattr(LocalCheckpointStore, method)

    def be_overtaken(self: LocalCheckpointStore, record: Any) -> Any:
        if aside.exists():
            aside.rename(place)
        return original(self, record)

    monkeypatch.setattr(LocalCheckpointStore, method, be_overtaken)


def leave_a_manifest_aside(tmp_path: Path) -> tuple[Path, Path]:
    """Epoch 1 is pending by all records, and somebody holds its manifest in the hand."""

    def be_killed() -> None:
        with running(tmp_path) as flow:
            flow.emit(2)
            flow.checkpoint()

    assert is_killed_at("after-manifest", be_killed)
    place = tmp_path / "storage/counting/checkpoints/000000000001/manifest.json"
    aside = tmp_path / "manifest-in-the-hand"
    place.rename(aside)
    return aside, place


def test_an_epoch_that_an_earlier_coordinator_completes_after_all_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken_by(*leave_a_manifest_aside(tmp_path), monkeypatch, "store_manifest")
    with running(tmp_path) as flow:
        flow.wait(lambda: flow.checkpoints.epochs() == [1])
        flow.wait(flow.coordinator.is_settled)
        assert flow.checkpoints.load_manifest(Epoch(1)).generation == 1
        flow.emit(2)
        assert flow.checkpoint() == 2
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 4


def test_an_epoch_that_is_to_be_given_up_and_turns_out_complete_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken_by(*leave_a_manifest_aside(tmp_path), monkeypatch, "store_tombstone")
    with running(tmp_path, checkpoint_timeout="1ms") as flow:
        flow.wait(lambda: flow.checkpoints.epochs() == [1] and not flow.metadata.pending())
        flow.wait(flow.coordinator.is_settled)
        assert flow.metadata.history(1)[0].outcome == "completed"
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 2


def test_a_manifest_of_a_history_that_was_left_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow began anew; what an earlier process still completes must not be published beside it."""
    overtaken_by(*leave_a_manifest_aside(tmp_path), monkeypatch, "store_tombstone")
    shutil.rmtree(tmp_path / "storage/counting/spark/totals")
    with running(tmp_path) as flow:
        assert flow.recovered.path == "fresh"
        flow.wait(lambda: not flow.metadata.pending())
        assert flow.metadata.history(1)[0].outcome == "aborted"
        flow.emit(3)
        assert flow.checkpoint() == 2
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3
    with running(tmp_path) as flow:
        assert [manifest.epoch for manifest in flow.recovered.manifests] == [2]
