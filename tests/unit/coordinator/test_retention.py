"""What may go when an epoch is the oldest that is kept."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cutline.coordinator import retention
from cutline.coordinator.retention import Janitor
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.checkpoint.releases import EntryReleases
from cutline.protocol.history.retention import EpochNeeds, needs_of
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.protocol.messages.wire import OperatorStarted
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.detached import DetachedLogs
from tests.support.channels import segment_names
from tests.support.killing import is_killed_at
from tests.support.stored_flow import ORDERS, TOTALS, StoredFlow

pytestmark = pytest.mark.usefixtures("every_file_is_a_blob")


@pytest.fixture
def flow(tmp_path: Path) -> StoredFlow:
    """Three complete epochs, the rows of one batch in flight at each."""
    flow = StoredFlow(tmp_path)
    flow.start()
    flow.run(ORDERS)
    for epoch in (1, 2, 3):
        flow.run(ORDERS)
        flow.run(TOTALS, read=1 if epoch == 1 else 2)
        flow.checkpoint(epoch)
    return flow


TOUCHED_BY = {ORDERS: {ORDERS, TOTALS}, TOTALS: {TOTALS}}


def janitor(flow: StoredFlow) -> Janitor:
    return Janitor(detached=DetachedLogs(flow.layout), checkpoints=flow.store.checkpoints)


def collect(flow: StoredFlow, request: ReleaseEpochs, keeper: Janitor | None = None) -> None:
    """What coordinator and operators do together: the epochs first, then the entries that only they needed."""
    releases = EntryReleases(TOUCHED_BY)
    for name in TOUCHED_BY:
        releases.started(OperatorStarted(operator=name, generation=flow.recovered.generation))
    releases.collected((keeper or janitor(flow)).collect(request))
    for name, below in releases.decide().items():
        flow.recovered.channels[name].truncate(below)


def keep_from(oldest: int, newest: int = 3) -> ReleaseEpochs:
    return ReleaseEpochs(
        drop=tuple(Epoch(epoch) for epoch in range(1, oldest)),
        retained=tuple(Epoch(epoch) for epoch in range(oldest, newest + 1)),
        open_from=Epoch(newest + 1),
    )


def needed(flow: StoredFlow, epoch: int) -> tuple[int, int]:
    manifest = flow.store.checkpoints.load_manifest(Epoch(epoch))
    return needs_of(manifest).channels[ORDERS], needs_of(manifest).channels[TOTALS]


def test_what_is_in_flight_is_needed_and_otherwise_the_barrier(flow: StoredFlow) -> None:
    """orders: b0 b1 |1 b2 |2 b3 |3 – totals has read 1, 3, 5 of it."""
    assert needed(flow, 1) == (1, 1)
    assert needed(flow, 2) == (3, 3)
    assert needed(flow, 3) == (5, 5)


def test_a_channel_without_consumers_is_needed_from_its_barrier(flow: StoredFlow) -> None:
    manifest = flow.store.checkpoints.load_manifest(Epoch(2))
    assert needs_of(manifest).channels[TOTALS] == manifest.channels[TOTALS].barrier


def test_a_consumer_that_has_read_nothing_needs_everything(tmp_path: Path) -> None:
    flow = StoredFlow(tmp_path)
    flow.start()
    for _ in range(3):
        flow.run(ORDERS)
    assert needs_of(flow.checkpoint(1)).channels[ORDERS] == 0


def test_the_slowest_consumer_decides(flow: StoredFlow) -> None:
    manifest = flow.store.checkpoints.load_manifest(Epoch(3))
    slow = replace(manifest.operators[TOTALS], positions={ORDERS: Position(2)})
    both = replace(manifest, operators={**manifest.operators, OperatorId("slow"): slow})
    assert needs_of(both).channels[ORDERS] == 2


def test_collecting_lets_go_of_checkpoints_content_and_entries(flow: StoredFlow) -> None:
    before = len(list(flow.layout.blobs.glob("*/*")))
    collect(flow, keep_from(3))
    assert flow.store.checkpoints.epochs() == [3]
    assert len(list(flow.layout.blobs.glob("*/*"))) < before
    assert (flow.log(ORDERS).start, flow.log(TOTALS).start) == needed(flow, 3)
    assert segment_names(flow.log(ORDERS)) == {f"g1-b{batch}.arrow" for batch in (3,)}


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_every_kept_epoch_can_still_be_restored(flow: StoredFlow, epoch: int) -> None:
    collect(flow, keep_from(epoch))
    for newer in range(epoch + 1, 4):
        flow.layout.manifest(Epoch(newer)).unlink()
    shutil.rmtree(flow.spark_dir(ORDERS))
    recovered = flow.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", epoch)


def test_a_collected_flow_can_still_be_resumed(flow: StoredFlow) -> None:
    collect(flow, keep_from(3))
    positions = flow.log(TOTALS).last_positions
    recovered = flow.start()
    assert recovered.path == "resume"
    assert recovered.channels[TOTALS].last_positions == positions
    assert recovered.channels[ORDERS].last_batch == 3


def test_collecting_twice_changes_nothing_more(flow: StoredFlow) -> None:
    collect(flow, keep_from(2))
    collect(flow, keep_from(2))
    assert flow.store.checkpoints.epochs() == [2, 3]


def test_collecting_for_an_epoch_that_cannot_be_read_deletes_nothing(flow: StoredFlow) -> None:
    flow.layout.manifest(Epoch(2)).write_bytes(b"{")
    with pytest.raises(DamagedRecordError):
        collect(flow, keep_from(2))
    assert flow.log(ORDERS).start == 0
    assert flow.store.checkpoints.epochs() == [1, 2, 3]


@pytest.mark.parametrize("point", ["mid-truncate:orders", "mid-truncate:totals#2", "mid-collect", "mid-collect#2"])
def test_collecting_killed_on_the_way_loses_nothing_that_is_kept(flow: StoredFlow, point: str) -> None:
    assert is_killed_at(point, lambda: collect(flow, keep_from(3)))
    assert flow.start().path == "resume"
    assert flow.recovered.manifests[-1].epoch == 3
    collect(flow, keep_from(3))
    assert flow.store.checkpoints.epochs() == [3]
    shutil.rmtree(flow.spark_dir(TOTALS))
    assert flow.start().restored_epoch == 3


def test_epochs_that_were_given_up_go_with_the_next_collection(flow: StoredFlow) -> None:
    keeper = janitor(flow)
    keeper.start(frozenset({Epoch(2)}))
    keeper.release(keep_from(1))
    keeper.stop()
    assert flow.store.checkpoints.epochs() == [1, 3]


def test_exactly_the_epochs_that_are_named_go_and_the_oldest_kept_holds_the_logs(flow: StoredFlow) -> None:
    """Epoch 1 is pinned."""
    collect(flow, ReleaseEpochs(drop=(Epoch(2),), retained=(Epoch(1), Epoch(3)), open_from=Epoch(4)))
    assert flow.store.checkpoints.epochs() == [1, 3]
    assert (flow.log(ORDERS).start, flow.log(TOTALS).start) == needed(flow, 1)
    flow.layout.manifest(Epoch(3)).unlink()
    shutil.rmtree(flow.spark_dir(TOTALS))
    assert flow.start().restored_epoch == 1


def test_an_epoch_that_is_being_read_stays_with_all_it_needs(flow: StoredFlow) -> None:
    keeper = janitor(flow)
    assert keeper.hold(Epoch(1))
    collect(flow, keep_from(3), keeper)
    assert flow.store.checkpoints.epochs() == [1, 3]
    assert (flow.log(ORDERS).start, flow.log(TOTALS).start) == needed(flow, 1)
    manifest = flow.store.checkpoints.load_manifest(Epoch(1))
    records = [flow.store.checkpoints.load_record(manifest, name) for name in manifest.operators]
    assert [flow.store.checkpoints.damage(record) for record in records] == [[], []]
    # Read twice at the same time, it goes when both have ended.
    assert keeper.hold(Epoch(1))
    keeper.end_hold(Epoch(1))
    collect(flow, keep_from(3), keeper)
    assert flow.store.checkpoints.epochs() == [1, 3]
    keeper.end_hold(Epoch(1))
    collect(flow, ReleaseEpochs(drop=(), retained=(Epoch(3),), open_from=Epoch(4)), keeper)
    assert flow.store.checkpoints.epochs() == [3], "what was released meanwhile goes, though it is not named again"
    assert (flow.log(ORDERS).start, flow.log(TOTALS).start) == needed(flow, 3)
    assert not keeper.hold(Epoch(1))


def test_an_epoch_that_completes_while_old_ones_go_stays(flow: StoredFlow) -> None:
    """Between looking for what to drop and dropping it, another one may complete."""

    class Overtaken(LocalCheckpointStore):
        def epochs(self) -> list[Epoch]:
            found = super().epochs()
            if not overtaken:
                overtaken.append(True)
                flow.run_all()
                flow.checkpoint(4)
            return found

    overtaken: list[bool] = []
    Janitor(detached=DetachedLogs(flow.layout), checkpoints=Overtaken(flow.layout)).collect(keep_from(3))
    assert LocalCheckpointStore(flow.layout).epochs() == [3, 4]


def test_a_janitor_that_fails_goes_on_with_the_next_request(flow: StoredFlow) -> None:
    class FailingOnce(LocalCheckpointStore):
        def load_manifest(self, epoch: Epoch) -> Manifest:
            if not failed.is_set():
                failed.set()
                raise OSError(5, "Input/output error")
            return super().load_manifest(epoch)

    failed = threading.Event()
    keeper = Janitor(detached=DetachedLogs(flow.layout), checkpoints=FailingOnce(flow.layout))
    keeper.start()
    keeper.release(keep_from(2))
    assert failed.wait(10)
    keeper.release(keep_from(3))
    keeper.stop()  # no pass has succeeded yet: this one is performed
    assert flow.store.checkpoints.epochs() == [3]


def test_releases_that_wait_are_performed_in_one_pass(flow: StoredFlow) -> None:
    entered, go = threading.Event(), threading.Event()
    passes: list[set[Epoch]] = []

    class Slow(LocalCheckpointStore):
        def collect(self, epochs: Collection[Epoch], *rest: Any) -> Sequence[Epoch]:
            passes.append(set(epochs))
            entered.set()
            assert go.wait(10)
            return super().collect(epochs, *rest)

    keeper = Janitor(detached=DetachedLogs(flow.layout), checkpoints=Slow(flow.layout))
    needs: list[list[EpochNeeds]] = []

    answered = threading.Semaphore(0)

    def collected(remaining: Iterable[EpochNeeds]) -> None:
        needs.append(list(remaining))
        answered.release()

    keeper.start()
    keeper.release(ReleaseEpochs(drop=(), retained=(Epoch(1), Epoch(2), Epoch(3)), open_from=Epoch(4)), collected)
    assert entered.wait(10)
    keeper.release(keep_from(2), collected)
    keeper.release(ReleaseEpochs(drop=(Epoch(2),), retained=(Epoch(3),), open_from=Epoch(4)), collected)
    go.set()
    assert answered.acquire(timeout=10) and answered.acquire(timeout=10)
    keeper.stop()
    assert passes == [set(), {1, 2}]
    assert [len(one) for one in needs] == [3, 1]
    assert flow.store.checkpoints.epochs() == [3]


class Counting(LocalCheckpointStore):
    """Counts what costs time: every manifest that is read, and every pass over all blobs."""

    def __init__(self, flow: StoredFlow) -> None:
        super().__init__(flow.layout)
        self.loads = self.passes = 0
        self.entered, self.go = threading.Event(), threading.Event()

    def load_manifest(self, epoch: Epoch) -> Manifest:
        self.loads += 1
        return super().load_manifest(epoch)

    def collect(self, *arguments: Any) -> Sequence[Epoch]:
        self.passes += 1
        self.entered.set()
        assert self.go.wait(10)
        return super().collect(*arguments)


@pytest.mark.parametrize("has_passed", [False, True], ids=["first pass", "later pass"])
def test_a_stop_drops_what_is_queued_and_the_rest_of_a_pass(
    flow: StoredFlow, monkeypatch: pytest.MonkeyPatch, has_passed: bool
) -> None:
    monkeypatch.setattr(retention, "_STOP_SECONDS", 0.0)
    store = Counting(flow)
    keeper = Janitor(detached=DetachedLogs(flow.layout), checkpoints=store)
    keeper._has_passed = has_passed
    keeper.start()
    keeper.release(keep_from(2))
    assert store.entered.wait(10)
    for _ in range(50):
        keeper.release(keep_from(3))
    loads = store.loads
    stopping = threading.Thread(target=keeper.stop)
    stopping.start()
    assert keeper._is_stopping.wait(10)
    store.go.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert store.passes == 1, "none of the queued releases is begun"
    assert store.loads - loads <= (5 if not has_passed else 0), "at most the pass under way is finished"
    assert store.epochs() == ([2, 3] if not has_passed else [1, 2, 3])
    again = janitor(flow)  # what the next start releases
    again.start()
    again.release(keep_from(3))
    again.stop()
    assert store.epochs() == [3]


def test_entries_are_released_though_left_logs_cannot_be_collected(flow: StoredFlow) -> None:
    def fail() -> None:
        raise PermissionError(13, "Permission denied")

    needs: list[EpochNeeds] = []
    keeper = Janitor(detached=DetachedLogs(flow.layout), checkpoints=flow.store.checkpoints, collect_left_logs=fail)
    keeper.start()
    keeper.release(keep_from(3), needs.extend)
    keeper.stop()
    assert flow.store.checkpoints.epochs() == [3]
    assert [one.channels[ORDERS] for one in needs] == [needed(flow, 3)[0]]


def test_a_janitor_that_never_started_stops(flow: StoredFlow) -> None:
    janitor(flow).stop()
