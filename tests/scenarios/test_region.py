"""A region goes back while the rest of the flow goes on; and the whole flow, when a person asks. Without Spark."""

from __future__ import annotations

import errno
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError, FencedError, FlowFailedError, NotDone, RecoveryError, StorageError
from cutline.model.checkpoint import Manifest, Tombstone
from cutline.model.ids import Epoch, Position
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.protocol.messages.wire import ConsumptionNoted
from cutline.recovery import region
from cutline.recovery.enter import enter
from cutline.transport.in_process import Address, Content, InProcessRouter
from cutline.worker.operator import OperatorService
from tests.support.killing import is_killed_at
from tests.support.running import assert_each_once, running
from tests.support.sparkless import LONG_SECONDS, NUMBERS, TOTALS, SparklessFlow


def lose(flow: SparklessFlow, operator: str) -> None:
    shutil.rmtree(flow.layout.spark_dirs / operator)


def test_a_failed_operator_goes_back_alone_and_upstream_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(4)
        epoch = flow.checkpoint()
        flow.emit(3)
        lose(flow, TOTALS)
        upstream = flow.operators[NUMBERS]
        flow.fail(TOTALS)
        assert flow.operators[NUMBERS] is upstream
        assert flow.operators[TOTALS].channel.last_batch == 3, "back at the checkpoint"
        assert flow.generations.load_all()[-1].restored_epoch == epoch
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 9
        assert flow.run.status().recovery.counts == {"fresh": 1, "regional": 1}
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        flow.drain()
        assert len(flow.sink.rows()) == 10
        assert_each_once(flow.sink.rows())


def test_what_is_pending_is_given_up_and_checkpoints_go_on_afterwards(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.step(NUMBERS)
        pending = flow.request(aligned=True)  # waits for ``totals``, which does not read
        flow.wait(lambda: flow.coordinator.snapshot().checkpoints.pending != {})
        lose(flow, TOTALS)
        flow.fail(TOTALS)
        with pytest.raises(CutlineError, match="must be restored"):
            pending.result(10)
        flow.checkpoint()
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_the_producer_waits_again_for_a_consumer_that_went_back(tmp_path: Path) -> None:
    with running(tmp_path, channel_capacity_entries=2) as flow:
        flow.emit(1)
        flow.checkpoint()
        flow.emit(2)
        assert flow.operators[NUMBERS].credits.has_room()
        lose(flow, TOTALS)
        flow.fail(TOTALS)
        assert not flow.operators[NUMBERS].credits.has_room()
        flow.wait(lambda: flow.step(TOTALS))
        assert flow.operators[NUMBERS].credits.has_room()


@pytest.mark.parametrize("point", ["restore-dirs-built", "restore-generation"])
def test_killed_while_a_region_goes_back_each_number_is_published_once(tmp_path: Path, point: str) -> None:
    def life() -> None:
        with running(tmp_path) as flow:
            flow.emit(4)
            flow.checkpoint()
            flow.emit(3)
            lose(flow, TOTALS)
            flow.fail(TOTALS)

    assert is_killed_at(f"{point}:{TOTALS}", life)  # a start passes these points too, of no operator
    with running(tmp_path) as flow:
        assert flow.recovered.path == ("regional" if point == "restore-dirs-built" else "resume")
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 8


def test_going_back_that_does_not_help_ends_the_flow(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.checkpoint()
    flow.fail(TOTALS)
    flow.fail(TOTALS)
    with pytest.raises(FlowFailedError, match="it fails"):
        flow.run.await_termination(20)


def test_checkpoints_between_the_failures_do_not_keep_a_failing_operator_alive(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.checkpoint()
    flow.fail(TOTALS)
    flow.step(NUMBERS)
    assert flow.request().result(LONG_SECONDS) == 2, "the failing operator cuts at its last batch: no progress"
    flow.fail(TOTALS)
    with pytest.raises(FlowFailedError, match="it fails"):
        flow.run.await_termination(20)


def test_an_operator_that_finishes_a_batch_between_its_failures_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        for _ in range(4):
            flow.fail(TOTALS)
            flow.emit(1)
            flow.checkpoint()
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 6


def test_without_a_checkpoint_the_flow_ends_with_both_reasons(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.fail(TOTALS)
    with pytest.raises(FlowFailedError, match="there is no checkpoint to restore"):
        flow.run.await_termination(20)


def test_a_region_whose_input_is_gone_is_not_restored_without_it(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.checkpoint()
    flow.emit(3)
    channel = flow.operators[NUMBERS].channel
    (Path(channel.segments.place.url) / channel.data_entries()[-1].segments[0].name).unlink()
    flow.fail(TOTALS)
    failure = flow.run._lifecycle.failure
    assert failure is not None and "Its region could not be restored either" in str(failure)
    assert "g1-b4.arrow" in str(failure), "it names what is missing"
    flow.stop()


def test_a_person_takes_the_whole_flow_back_and_sinks_follow(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
        assert len(flow.sink.rows()) == 6
    with pytest.raises(RecoveryError, match="available checkpoints: 1, 2, 3"):
        SparklessFlow(tmp_path, restore_to=Epoch(9))
    flow = SparklessFlow(tmp_path, restore_to=Epoch(1), retain_checkpoints=5)
    try:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("local", 1)
        assert len(flow.sink.rows()) == 2, "what was published since is taken back"
        flow.emit(1)
        epoch = flow.checkpoint()
        assert epoch == 4, "epochs that were given up are never used again"
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3
    finally:
        flow.stop()


def test_a_sink_that_keeps_what_it_has_published_publishes_again_what_is_done_again(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
    flow = SparklessFlow(tmp_path, restore_to=1, on_rollback="keep", retain_checkpoints=5)
    try:
        assert len(flow.sink.rows()) == 6, "nothing is taken back"
    finally:
        flow.stop()
    with running(tmp_path, on_rollback="keep", retain_checkpoints=5) as flow:
        assert flow.recovered.path == "resume", "a sink that is ahead is no damage then"
        flow.emit(1)
        flow.drain()
        assert flow.sink.rows() == [*([number, number + 1] for number in range(6)), [2, 3]]


def test_a_sink_that_must_not_go_back_keeps_the_flow_from_it(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(2):
            flow.emit(2)
            flow.checkpoint()
    with pytest.raises(RecoveryError, match="must not be rewound"):
        SparklessFlow(tmp_path, restore_to=1, on_rollback="fail")
    with running(tmp_path, on_rollback="fail") as flow:
        assert flow.recovered.path == "resume"
        assert len(flow.sink.rows()) == 4


# ------------------------------------------------------------------------------------------- what may come between


class Held:
    """A region that waits inside its restore, after everything old is stopped, until the test lets it go on."""

    def __init__(self, flow: SparklessFlow) -> None:
        regions = flow.run._parts.regions
        self._build = regions._built
        self._is_inside, self._may_go = threading.Event(), threading.Event()
        regions._built = self._wait  # type: ignore[method-assign, assignment]
        self.old = flow.operators[TOTALS]
        error = FlowFailedError("it fails", flow="counting", operator=TOTALS)
        flow.run._parts.regions.operator_failed(self.old, error)
        assert self._is_inside.wait(LONG_SECONDS)

    def _wait(self, *arguments: Any) -> Any:
        self._is_inside.set()
        assert self._may_go.wait(LONG_SECONDS)
        return self._build(*arguments)

    def let_go(self) -> None:
        self._may_go.set()


def worked(tmp_path: Path) -> SparklessFlow:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.checkpoint()
    flow.emit(3)
    lose(flow, TOTALS)
    return flow


@pytest.mark.parametrize("how", ["stop", "fail"])
def test_a_flow_that_ends_while_a_region_goes_back_leaves_nothing_running(tmp_path: Path, how: str) -> None:
    flow = worked(tmp_path)
    region = Held(flow)
    end = flow.run.stop if how == "stop" else partial(flow.run.fail, FlowFailedError("elsewhere", flow="counting"))
    ending = threading.Thread(target=end)
    ending.start()
    flow.run._parts.regions._is_stopped.wait(LONG_SECONDS)
    region.let_go()
    ending.join(LONG_SECONDS)
    assert flow.run._lifecycle.ended.wait(LONG_SECONDS)
    service, supervisor = flow.operators[TOTALS], flow.run._parts.workers.supervisors[TOTALS]
    assert service.has_ended()
    assert supervisor.query is None or not supervisor.query.is_active()
    with running(tmp_path) as again:
        again.emit(1)
        again.drain()
        assert_each_once(again.sink.rows())
        assert len(again.sink.rows()) == 6


@pytest.mark.parametrize("how", ["deleted", "stopped"])
def test_a_region_waits_as_long_as_released_entries_are_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Rows in an object store may take long: that is no reason to fail."""
    monkeypatch.setattr(region, "_SETTLE_SECONDS", 0.05)
    is_deleting, may_end = threading.Event(), threading.Event()
    truncate = ChannelLog.truncate

    def slowly(log: ChannelLog, below: Position) -> None:
        is_deleting.set()
        may_end.wait(LONG_SECONDS)
        truncate(log, below)

    monkeypatch.setattr(ChannelLog, "truncate", slowly)
    with running(tmp_path) as flow:
        for _ in range(2):
            flow.emit(2)
            flow.checkpoint()
        assert is_deleting.wait(LONG_SECONDS)
        old = flow.operators[TOTALS]
        lose(flow, TOTALS)
        error = FlowFailedError("it fails", flow="counting", operator=TOTALS)
        regions = flow.run._parts.regions
        regions.operator_failed(old, error)
        assert not flow.run._lifecycle.ended.wait(0.3)
        assert flow.operators[TOTALS] is old
        if how == "stopped":
            threading.Timer(0.3, may_end.set).start()
            return
        may_end.set()
        flow.wait(lambda: not regions.is_busy())
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_region_whose_checkpoints_are_not_aborted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "_SETTLE_SECONDS", 0.05)
    flow = worked(tmp_path)
    monkeypatch.setattr(flow.coordinator, "newest_complete", lambda _: None)
    flow.fail(TOTALS)
    said = str(flow.run._lifecycle.failure)
    assert "its pending checkpoints were not aborted within 0.05 s" in said
    assert "operator=totals). Next: see the log" in said
    flow.stop()


def test_a_start_that_fails_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def perform(*_: object) -> None:
        raise OSError(5, "Input/output error")

    before = set(threading.enumerate())
    monkeypatch.setattr(OperatorService, "_perform", perform)
    with pytest.raises(StorageError, match="the disk reports an error"):
        SparklessFlow(tmp_path)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("cutline")}


def test_an_abandoned_service_whose_reports_nobody_answers_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, turns = InProcessRouter.deliver, list[object]()

    def lossy(router: InProcessRouter, sender: Address, to: Address, content: Content) -> None:
        if not isinstance(content, ConsumptionNoted):
            deliver(router, sender, to, content)

    monkeypatch.setattr(InProcessRouter, "deliver", lossy)
    with running(tmp_path, message_retry="1ms") as flow:
        flow.emit(1)
        service = flow.operators[TOTALS]
        take = service._take

        def counted(event: Any) -> None:
            turns.append(event)
            take(event)

        monkeypatch.setattr(service, "_take", counted)
        service.abandon()
        threading.Event().wait(0.3)
    assert len(turns) < 20


def test_a_flow_is_not_drained_while_a_region_goes_back(tmp_path: Path) -> None:
    flow = worked(tmp_path)
    region = Held(flow)
    assert not flow.run.pause(timeout="100ms")
    region.let_go()
    flow.wait(lambda: not flow.run._parts.regions.is_busy())
    flow.wait(lambda: flow.step(TOTALS))
    assert flow.run.pause(timeout="10s")
    flow.stop()


def test_a_paused_source_that_comes_back_is_paused(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        flow.checkpoint()
        assert flow.run.pause(timeout="10s")
        lose(flow, NUMBERS)
        flow.fail(NUMBERS)
        assert flow.run.status().state == "paused"
        assert not flow.operators[NUMBERS].credits._account.may_run()
        flow.run.resume()
        assert flow.operators[NUMBERS].credits._account.may_run()


def test_a_batch_that_always_fails_does_not_send_its_region_back_for_ever(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(3)
    flow.checkpoint()
    flow.emit(1)
    flow.step(NUMBERS)
    for _ in range(2):
        flow.fail(TOTALS)
        if flow.run._lifecycle.failure is None:
            flow.wait(lambda: flow.step(TOTALS))  # the batch before it works every time
    with pytest.raises(FlowFailedError, match="it fails"):
        flow.run.await_termination(LONG_SECONDS)


def test_a_process_that_was_replaced_takes_no_region_back(tmp_path: Path) -> None:
    """It would fence the one that runs the flow now, and sweep its log."""
    old = SparklessFlow(tmp_path, retain_checkpoints=9)
    old.emit(3)
    old.checkpoint()
    with running(tmp_path, retain_checkpoints=9) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(2)
        entries = sorted(flow.operators[TOTALS].channel.folder.glob("g*/*"))
        service = old.operators[TOTALS]
        old.run._parts.regions.operator_failed(service, FlowFailedError("it fails", flow="counting", operator=TOTALS))
        with pytest.raises(FlowFailedError, match="has taken over"):
            old.run.await_termination(LONG_SECONDS)
        assert all(path.exists() for path in entries)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 9


def test_a_process_that_was_replaced_collects_nothing(tmp_path: Path) -> None:
    """What its successor has stored and not yet bound to an epoch is reached by nothing that it can see."""
    old = SparklessFlow(tmp_path)
    old.emit(2)
    old.checkpoint()
    with running(tmp_path) as flow:
        flow.emit(2)
        store = flow.checkpoints.store_manifest

        def late(manifest: Manifest) -> Manifest | Tombstone:
            with pytest.raises(FencedError):
                old.run._parts.background.janitor.collect(
                    ReleaseEpochs(drop=(), retained=(Epoch(1),), open_from=Epoch(2))
                )
            return store(manifest)

        flow.checkpoints.store_manifest = late  # type: ignore[method-assign]
        manifest = flow.checkpoints.load_manifest(flow.checkpoint())
        for operator in manifest.operators:
            assert flow.checkpoints.damage(flow.checkpoints.load_record(manifest, operator)) == []
    old.stop()


def test_tries_to_restore_a_region_on_a_full_disk_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.emit(1)
        folder, left = flow.layout.spark_dirs / TOTALS, list[int]()

        def full(*_: Any, **__: Any) -> Any:
            left.append(len(list(folder.iterdir())))
            if len(left) == 3:
                monkeypatch.setattr(region, "enter", enter)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(region, "enter", full)
        flow.fail(TOTALS)
        assert left == [2, 2, 2], "the one it ran in, and the one of this try"
        assert len(list(folder.iterdir())) == 1
        assert flow.run._lifecycle.failure is None


def test_a_region_that_is_restored_goes_on_although_that_cannot_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise NotDone("no room", store="coordinator.sqlite")

    def unreadable(*_: Any) -> None:
        raise PermissionError("spark")

    with running(tmp_path) as flow:
        flow.emit(2)
        flow.checkpoint()
        monkeypatch.setattr(flow.metadata, "count_recovery", full)
        monkeypatch.setattr(region, "collect_spark_dirs", unreadable)
        flow.fail(TOTALS)
        assert flow.run._lifecycle.failure is None
