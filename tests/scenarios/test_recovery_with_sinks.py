"""How far sinks have published decides which ways back there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.errors import OtherHistoryError, RecoveryError
from cutline.model.ids import Epoch, OperatorId, SinkId
from cutline.ports.sinks import Sink
from cutline.testing.twins.sink import MemorySink
from tests.support.running import assert_each_once
from tests.support.running import running as run_flow
from tests.support.sparkless import FolderSink, SparklessFlow
from tests.support.stored_flow import StoredFlow

TABLE = SinkId("table")
TOTALS = OperatorId("totals")


def sink_at(epoch: int, *, can_rewind: bool = True) -> dict[SinkId, Sink]:
    sink = MemorySink()
    sink.can_rewind = can_rewind
    sink.visible = {number: [] for number in range(1, epoch + 1)}
    return {TABLE: sink}


@pytest.fixture
def running(tmp_path: Path) -> StoredFlow:
    flow = StoredFlow(tmp_path)
    flow.start()
    for epoch in (1, 2):
        flow.run_all()
        flow.checkpoint(epoch)
    flow.run_all()
    return flow


def test_a_sink_that_has_published_the_newest_epoch_lets_the_flow_resume(running: StoredFlow) -> None:
    assert running.start(sinks=sink_at(2)).path == "resume"


def test_a_storage_that_was_put_back_from_a_backup_rewinds_no_sink_unasked(running: StoredFlow) -> None:
    with pytest.raises(OtherHistoryError, match="has published epoch 9"):
        running.start(sinks=sink_at(9))
    recovered = running.start(sinks=sink_at(9), restore_to=Epoch(2))
    assert (recovered.path, recovered.restored_epoch) == ("local", 2)


def test_a_sink_that_cannot_take_rows_back_stops_a_restore_before_anything_is_given_up(running: StoredFlow) -> None:
    before = running.generations()
    with pytest.raises(RecoveryError, match="cannot be rewound"):
        running.start(sinks=sink_at(9, can_rewind=False), restore_to=Epoch(2))
    assert running.generations() == before, "no generation was entered"


def test_an_empty_storage_folder_never_empties_a_table(tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="no readable checkpoint"):
        StoredFlow(tmp_path / "mistyped").start(sinks=sink_at(3))


def test_epochs_let_go_of_behind_a_pinned_one_are_not_missed(running: StoredFlow) -> None:
    """Epoch 3 had no rows and left no trace in the sink, and the coordinator's records are lost."""
    running.checkpoint(3)
    running.store.checkpoints.collect([Epoch(2)], Epoch(1))
    running.layout.metadata.unlink()
    recovered = running.start(sinks=sink_at(2))
    assert (recovered.path, [manifest.epoch for manifest in recovered.manifests]) == ("resume", [1, 3])


def test_an_epoch_that_is_missing_and_was_not_published_is_missed(running: StoredFlow) -> None:
    running.checkpoint(3)
    running.store.checkpoints.collect([Epoch(2)], Epoch(1))
    running.layout.metadata.unlink()
    assert running.start(sinks=sink_at(1)).restored_epoch == 1


@pytest.mark.parametrize("dies", ["before the rewind", "in the rewind", "after the rewind"])
def test_a_start_that_dies_around_a_rewind_is_taken_up_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """The sink is where the flow was, or where it is restored to, and must not look as if another had rewound it."""
    with run_flow(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.drain()
        first = flow.checkpoints.epochs()[0]
    rewind = FolderSink.rewind

    def dying(sink: FolderSink, epoch: Epoch) -> None:
        if dies == "in the rewind":
            max(sink.folder.glob("*.json")).unlink()
        elif dies == "after the rewind":
            rewind(sink, epoch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FolderSink, "rewind", dying)
        with pytest.raises(KeyboardInterrupt):
            SparklessFlow(tmp_path, restore_to=first, retain_checkpoints=5)
    with run_flow(tmp_path, retain_checkpoints=5) as flow:
        assert flow.sink.published() == first
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3
