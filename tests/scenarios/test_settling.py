"""Epochs that an earlier incarnation left open."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from cutline.connectors.replay_guard import ReplayGuard
from cutline.model.ids import Epoch
from cutline.ports.metadata import EpochOutcome
from cutline.protocol.checkpoint.setup import StoredPending
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.pending import settle_pending
from cutline.recovery.start import Recovery
from cutline.storage.local import LocalStore
from cutline.storage.metadata.sqlite import SqliteMetadata
from tests.support.stored_flow import TOTALS, StoredFlow, plans_of


@pytest.fixture
def flow(tmp_path: Path) -> StoredFlow:
    """Epoch 1 is complete and known to be; epoch 2 is complete, and nobody came to write it down."""
    flow = StoredFlow(tmp_path)
    flow.start()
    flow.run_all()
    flow.checkpoint(1)
    flow.run_all()
    flow.checkpoint(2, is_known=False)
    return flow


def settled(flow: StoredFlow) -> tuple[list[StoredPending], list[EpochOutcome]]:
    """Start, settle; returns what is still pending, and the history."""
    with closing(SqliteMetadata(flow.layout.metadata)) as metadata:
        store = LocalStore.open(flow.layout, ReplayGuard())
        recovered = Recovery(
            FlowAtRest(
                graph=flow.graph,
                plans=plans_of(flow.graph),
                layout=flow.layout,
                query_dirs=store.query_dirs,
                checkpoints=store.checkpoints,
                generations=store.generations,
                metadata=metadata,
            )
        ).recover()
        return settle_pending(recovered, metadata, store.checkpoints), metadata.history(10)


def test_an_epoch_whose_manifest_is_there_is_complete(flow: StoredFlow) -> None:
    pending, history = settled(flow)
    assert pending == []
    assert [(one.epoch, one.outcome) for one in history] == [(2, "completed"), (1, "completed")]
    assert set(history[0].details["operators"]) == {"orders", "totals"}


def test_an_epoch_without_manifest_is_taken_up_again(flow: StoredFlow) -> None:
    flow.begin(3)
    pending, _ = settled(flow)
    assert [(one.epoch, one.is_resumable) for one in pending] == [(3, True)]


def test_an_epoch_that_the_flow_went_back_behind_is_not_resumable(flow: StoredFlow) -> None:
    flow.begin(3)
    shutil.rmtree(flow.spark_dir(TOTALS))
    pending, _ = settled(flow)
    assert [(one.epoch, one.is_resumable) for one in pending] == [(3, False)]


def test_a_complete_epoch_that_cannot_be_used_is_not_taken_up_again(flow: StoredFlow) -> None:
    """Its manifest is there: the coordinator would find it and take it for one of the present history."""
    record = flow.store.checkpoints.load_record(flow.store.checkpoints.load_manifest(Epoch(2)), TOTALS)
    flow.layout.blob(next(file.sha256 for file in record.shared if file.path == f"commits/{record.batch}")).unlink()
    shutil.rmtree(flow.spark_dir(TOTALS))
    pending, history = settled(flow)
    assert pending == []
    assert (history[0].epoch, history[0].outcome) == (2, "aborted")
    assert "given up by a restore" in history[0].reason
