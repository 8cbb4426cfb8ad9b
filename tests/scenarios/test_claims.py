"""Taking a sink over while a process that was thought dead is in the middle of something."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable

import cutline
from cutline.connectors import shared_epochs
from cutline.connectors.delta import log as delta_log
from cutline.errors import FencedError, FlowFailedError
from cutline.model.ids import BatchId, Epoch, Generation, SinkId
from cutline.sinks import Delta, Parquet, SQLite
from cutline.testing.conformance.sinks import SIMPLE, Case, SinkConformance, rows
from tests.support.sink_targets import iceberg, iceberg_table
from tests.support.torture_flow import EVENTS, ROWS_PER_BATCH, TortureFlow, all_rows


def case_of(sink: Any, name: str = "totals-out") -> Case:
    context = msgspec.structs.replace(SinkConformance().context(SIMPLE), sink=SinkId(name))
    sink.open(context)
    return Case(sink=sink, context=context)


@pytest.mark.parametrize("mode", [{}, {"mode": "upsert", "key": ["id"]}])
def test_a_delta_commit_that_is_under_way_conflicts_with_a_claim(tmp_path: Path, mode: dict[str, Any]) -> None:
    old = Delta(tmp_path / "t", **mode)
    case = case_of(old)
    old.claim("", expected=old.claimed())
    case.publish(1, 1, rows(1))
    late = case.stage(2, rows(2))
    permit = case.permit(2, [late])
    new = Delta(tmp_path / "t", **mode)
    case_of(new)
    new.claim("", expected=new.claimed())
    # It has looked before the claim and goes on from there: this is the very next thing that it does.
    assert old._publication(permit, [late]).attempt() is not None
    assert new.published() == 1
    assert DeltaTable(str(tmp_path / "t")).to_pyarrow_table()["id"].to_pylist() == [1]


@pytest.mark.parametrize("mode", [{}, {"mode": "upsert", "key": ["id"]}])
def test_an_iceberg_commit_that_is_under_way_conflicts_with_a_claim(tmp_path: Path, mode: dict[str, Any]) -> None:
    old = iceberg(tmp_path, **mode)
    case = case_of(old)
    old.claim("", expected=old.claimed())
    case.publish(1, 1, rows(1))
    late = case.stage(2, rows(2))
    publication = old._publication(case.permit(2, [late]), [late])
    judged = publication.due()
    assert judged is not None
    new = iceberg(tmp_path, **mode)
    case_of(new)
    new.claim("", expected=new.claimed())
    # It has looked before the claim and goes on from there: this is the very next thing that it does.
    assert publication.attempt(judged)[1] is not None
    assert new.published() == 1
    assert iceberg_table(tmp_path).scan().to_arrow()["id"].to_pylist() == [1]


def test_a_parquet_epoch_that_is_prepared_before_a_claim_cannot_be_published_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Parquet(tmp_path / "t"), Parquet(tmp_path / "t")
    case = case_of(old)
    old.claim("", expected=old.claimed())
    late = case.stage(2, rows(2))
    publish = old._publish

    def taken_over_first(*given: Any) -> None:
        case_of(new)
        new.claim("", expected=new.claimed())
        publish(*given)

    monkeypatch.setattr(old, "_publish", taken_over_first)
    with pytest.raises((FencedError, OSError)):
        case.commit(2, late)
    assert new.published() is None


def test_while_two_tables_are_taken_over_one_by_one_neither_is_published_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables() -> dict[str, Case]:
        return {name: case_of(SQLite(tmp_path / "d.sqlite", name), name) for name in ("a", "b")}

    old = tables()
    tokens, permits, staged = {}, {}, {}
    for name, case in old.items():
        assert isinstance(case.sink, SQLite)
        case.sink.claim("", expected=case.sink.claimed())
        staged[name] = [case.stage(1, rows(1))]
        tokens[name] = case.sink.prepare(Epoch(1), staged[name])
        permits[name] = case.permit(1, staged[name])
    lives = shared_epochs._processes
    monkeypatch.setattr(shared_epochs, "_processes", {os.getpid(): "another"})
    new = tables()
    assert isinstance(new["a"].sink, SQLite)
    new["a"].sink.claim("", expected=new["a"].sink.claimed())
    monkeypatch.setattr(shared_epochs, "_processes", lives)
    old["b"].sink.commit(permits["b"], staged["b"], tokens["b"])
    assert (new["a"].sink.published(), new["b"].sink.published()) == (None, 1)
    with pytest.raises(FencedError):
        old["a"].sink.commit(permits["a"], staged["a"], tokens["a"])


def test_every_start_may_claim_again(tmp_path: Path) -> None:
    for life, sink in enumerate([Delta(tmp_path / "t") for _ in range(3)]):
        case = case_of(sink)
        sink.claim("", expected=sink.claimed())
        case.previous, case.through, case.generation = Epoch(life), BatchId(life), Generation(life + 1)
        case.publish(life + 1, life + 1, rows(life))
    assert sink.published() == 3


def test_every_start_takes_its_sinks_over(tmp_path: Path) -> None:
    """The flow of a host that was thought lost has a checkpoint to publish when it comes back."""
    sinks = [{name: Delta(tmp_path / name) for name in ("events", "latest")} for _ in range(2)]
    old = TortureFlow(tmp_path / "flow", sinks[0], only_newest=False)
    old.step(EVENTS)
    old.drain()
    shutil.copytree(tmp_path / "flow", tmp_path / "elsewhere")
    new = TortureFlow(tmp_path / "elsewhere", sinks[1], only_newest=False)
    old.step(EVENTS)
    with contextlib.suppress(FencedError, FlowFailedError, CancelledError):
        old.drain()
    deadline = time.monotonic() + 30
    while old.run._lifecycle.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(old.run._lifecycle.failure, FencedError)
    new.step(EVENTS)
    new.drain()
    found = cutline.read(Delta(tmp_path / "events")).to_arrow().to_pylist()
    assert sorted((row["id"], row["key"], row["value"]) for row in found) == all_rows(2 * ROWS_PER_BATCH)
    new.stop()
    old.stop()


def test_a_claim_in_a_delta_table_is_synced_before_anything_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(delta_log, "fsync_file", lambda path: synced.append(path.name))
    sink = Delta(tmp_path / "t")
    case_of(sink)
    sink.claim("", expected=sink.claimed())
    assert f"{DeltaTable(str(tmp_path / 't')).version():020}.json" in synced


def test_a_power_cut_while_a_delta_table_is_claimed_leaves_the_claim_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Delta(tmp_path / "t"), Delta(tmp_path / "t")
    case_of(first)
    first.claim("first", expected="")
    before = first.claimed()
    case_of(second)
    log = set((tmp_path / "t/_delta_log").iterdir())

    def cut(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(delta_log.DeltaLog, "make_durable", cut)
        with pytest.raises(InterruptedError):
            second.claim("second", expected=before)
    for path in set((tmp_path / "t/_delta_log").iterdir()) - log:
        path.unlink()  # not synced yet
    third = Delta(tmp_path / "t")
    case_of(third)
    assert third.claimed() == before
