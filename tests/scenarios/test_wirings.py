"""Worker and coordinator know one another only by messages and channels: wired as between processes, all works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cutline.channels.tailing import FollowedLog, TailedLog
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.link import Envelope
from cutline.protocol.messages.wire import (
    Consumed,
    EntriesReleased,
    OperatorStarted,
    ReleaseEntries,
)
from cutline.runtime import assembly
from cutline.runtime.workers import WorkerFactory
from cutline.transport.in_process import Address, Content, InProcessRouter
from cutline.worker.log_release import LogRelease
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

WIRINGS = ["encoded", "tailed", "encoded and tailed"]


@pytest.fixture(params=WIRINGS)
def wiring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``encoded``: every message becomes bytes and is decoded. ``tailed``: input logs are read from the disk."""
    if "encoded" in request.param:
        monkeypatch.setattr(assembly, "InProcessRouter", partial(InProcessRouter, is_encoding=True))
    tailed: list[TailedLog] = []

    def followed(self: WorkerFactory, operator: OperatorId) -> FollowedLog:
        log = self.channels[operator]
        reader = TailedLog(operator, log.folder, log.lineage, log.start)
        reader.poll()
        reader.start(self.failures.fatal)
        log.on_append(lambda _: reader.hint())
        tailed.append(reader)
        return reader

    if "tailed" in request.param:
        monkeypatch.setattr(WorkerFactory, "followed", followed)
    yield
    for reader in tailed:
        reader.stop()


@pytest.mark.usefixtures("wiring")
def test_a_flow_runs_and_resumes(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        for expected in range(1, 4):
            flow.emit(2)
            assert flow.checkpoint(aligned=expected == 2) == expected
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(2)
        flow.checkpoint()
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.usefixtures("wiring")
def test_a_region_is_restored(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(2)
        flow.fail(TOTALS)
        flow.drain()
        flow.fail(NUMBERS)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.usefixtures("wiring")
def test_an_operator_is_restored_alone_and_its_consumer_follows_its_log_on(tmp_path: Path) -> None:
    with running(tmp_path, mode="per-operator") as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(2)
        for operator in (NUMBERS, TOTALS):
            flow.fail(operator)
            while (
                flow.query_dirs.last_committed(flow.spark_dir(operator)) < flow.operators[operator].channel.last_batch
            ):
                assert flow.step(operator)
            flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.usefixtures("wiring")
def test_what_is_in_flight_is_counted(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        for _ in range(3):
            flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        manifest = flow.checkpoints.load_manifest(future.result())
        flight = manifest.channels[NUMBERS].in_flight[TOTALS]
        assert (flight.first, flight.entries, flight.rows) == (1, 3, 3)
        assert flight.size_bytes
        assert flow.checkpoints.load_record(manifest, TOTALS).in_flight == {NUMBERS: flight}


# ------------------------------------------------------------------------------------------------- faults


class Wire:
    """Stands between the router and its receivers; a test says which messages it keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keeps: Callable[[object], bool] = lambda _: False
        self.kept: list[Callable[[], None]] = []
        self.seen: list[object] = []
        self._lock = threading.Lock()
        deliver = InProcessRouter.deliver

        def carry(router: InProcessRouter, sender: Address, receiver: Address, content: Content) -> None:
            message = content.payload if isinstance(content, Envelope) else content
            with self._lock:
                self.seen.append(message)
                is_kept = self.keeps(message)
                if is_kept:
                    self.kept.append(lambda: deliver(router, sender, receiver, content))
            if not is_kept:
                deliver(router, sender, receiver, content)

        monkeypatch.setattr(InProcessRouter, "deliver", carry)

    def keep(self, *kinds: type) -> None:
        self.keeps = lambda message: isinstance(message, kinds)

    def let_through(self, times: int = 1) -> None:
        """Deliver what was kept, so often each, and keep nothing more."""
        with self._lock:
            self.keeps = lambda _: False
            kept, self.kept = self.kept, []
        for deliver in kept * times:
            deliver()

    def lose(self) -> None:
        with self._lock:
            self.keeps = lambda _: False
            self.kept = []

    def of(self, kind: type) -> list[object]:
        with self._lock:
            return [message for message in self.seen if isinstance(message, kind)]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def starts(flow: SparklessFlow) -> tuple[int, int]:
    """Where the logs begin."""
    return flow.operators[NUMBERS].channel.start, flow.operators[TOTALS].channel.start


def needed(flow: SparklessFlow, epoch: int) -> tuple[int, int]:
    """Up to where the logs may be truncated when nothing older than this epoch is kept."""
    cuts = flow.checkpoints.load_manifest(Epoch(epoch)).operators
    return min(cuts[NUMBERS].barrier, cuts[TOTALS].positions[NUMBERS]), cuts[TOTALS].barrier


def checkpoints(flow: SparklessFlow, count: int) -> Epoch:
    epoch = Epoch(0)
    for _ in range(count):
        flow.emit(2)
        epoch = flow.checkpoint()
    return epoch


def test_entries_are_released_by_the_operator_that_writes_them(tmp_path: Path, wire: Wire) -> None:
    with running(tmp_path, retain_checkpoints=1) as flow:
        epoch = checkpoints(flow, 3)
        flow.wait(lambda: starts(flow) == needed(flow, epoch))
        flow.wait(lambda: len(wire.of(EntriesReleased)) >= len(wire.of(ReleaseEntries)) > 0)


class HeldReleases:
    """Releases that have reached their operators, which have not acted on them yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_holding = True
        self.held: list[Callable[[], None]] = []
        request = LogRelease.request

        def hold(release: LogRelease, below: Position) -> None:
            if self.is_holding:
                self.held.append(lambda: request(release, below))
            else:
                request(release, below)

        monkeypatch.setattr(LogRelease, "request", hold)

    def let_through(self, times: int = 1) -> None:
        self.is_holding = False
        for perform in self.held * times:
            perform()


def test_a_release_that_is_lost_is_covered_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, retain_checkpoints=1) as flow:
        held = HeldReleases(monkeypatch)
        checkpoints(flow, 3)
        flow.wait(lambda: len(held.held) >= 2)
        assert starts(flow) == (0, 0)
        held.is_holding = False
        epoch = checkpoints(flow, 1)
        flow.wait(lambda: starts(flow) == needed(flow, epoch))


def test_a_release_that_comes_late_and_twice_deletes_nothing_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, retain_checkpoints=1) as flow:
        held = HeldReleases(monkeypatch)
        epoch = checkpoints(flow, 3)
        flow.wait(lambda: len(held.held) >= 4)
        flow.emit(3)
        held.let_through(times=2)
        flow.wait(lambda: starts(flow) == needed(flow, epoch))
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize("mode", ["unaligned", "per-operator"])
def test_a_restore_begins_only_when_deletions_decided_before_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A deletion that came after the restore had looked at the logs could take what it is about to read."""
    with running(tmp_path, mode=mode, retain_checkpoints=1) as flow:
        held = HeldReleases(monkeypatch)
        checkpoints(flow, 2)
        flow.wait(lambda: len(held.held) >= 2)
        service = flow.operators[TOTALS]
        failing = threading.Thread(target=flow.fail, args=(TOTALS,))
        failing.start()
        flow.wait(flow.run._parts.regions.is_busy)
        assert not threading.Event().wait(0.2) and flow.operators[TOTALS] is service, "it waits for them"
        held.let_through()
        failing.join()
        assert flow.operators[TOTALS] is not service
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_while_a_region_has_not_reported_nothing_that_it_reads_is_released(tmp_path: Path, wire: Wire) -> None:
    with running(tmp_path, mode="per-operator", retain_checkpoints=1, message_retry="20ms") as flow:
        checkpoints(flow, 2)
        wire.keep(OperatorStarted)
        flow.fail(TOTALS)
        begins = starts(flow)
        flow.step(NUMBERS)
        told = len(wire.of(ReleaseEntries))
        for _ in range(2):  # numbers goes on by itself; its old checkpoints go, the entries stay
            flow.step(NUMBERS)
            flow.coordinator.request_checkpoint(None)
            flow.wait(lambda: not flow.coordinator.snapshot().checkpoints.pending or bool(wire.kept))
        assert (starts(flow), len(wire.of(ReleaseEntries))) == (begins, told)
        wire.let_through()
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_credit_that_is_lost_is_given_again(tmp_path: Path, wire: Wire) -> None:
    with running(tmp_path, channel_capacity_entries=2, message_retry="20ms") as flow:
        wire.keep(Consumed)
        flow.emit(2)
        assert not flow.operators[NUMBERS].credits.has_room()
        wire.lose()
        flow.wait(flow.operators[NUMBERS].credits.has_room)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_credit_of_a_former_self_does_not_count(tmp_path: Path, wire: Wire) -> None:
    with running(tmp_path, message_retry="1h") as flow:
        flow.emit(2)
        flow.checkpoint()
        wire.keep(Consumed)
        flow.emit(3)
        wire.keeps = lambda _: False
        flow.fail(TOTALS)
        flow.wait(lambda: flow.operators[NUMBERS].credits.backlog() == {TOTALS: 3})
        wire.let_through(times=2)
        assert flow.operators[NUMBERS].credits.backlog() == {TOTALS: 3}, "it will read them again"
        flow.drain()
        assert_each_once(flow.sink.rows())
