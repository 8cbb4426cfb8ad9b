"""Two storages of one flow: failover, failback, copied folders and restored backups lose and double nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutline.errors import FencedError, NotDone, OtherHistoryError, RecoveryError
from cutline.model.ids import Generation
from cutline.recovery.sinks import settle_sinks
from cutline.runtime import assembly
from cutline.storage.metadata.sqlite import SqliteMetadata
from tests.support.killing import is_killed_at
from tests.support.remote import Faults, copied, remote
from tests.support.running import assert_each_once, running
from tests.support.sparkless import FolderSink, SparklessFlow


def beside(tmp_path: Path, name: str) -> Path:
    """The folder of another host that publishes to the same table."""
    host = tmp_path / name
    host.mkdir()
    (tmp_path / "table").mkdir(exist_ok=True)
    (host / "table").symlink_to(tmp_path / "table")
    return host


def publish(flow: SparklessFlow, count: int) -> int:
    flow.emit(count)
    return flow.checkpoint()


@contextlib.contextmanager
def closing_metadata(host: Path) -> Iterator[SqliteMetadata]:
    with contextlib.closing(SqliteMetadata(host / "storage" / "counting" / "coordinator.sqlite")) as metadata:
        yield metadata


def copy_running(source: Path, target: Path) -> None:
    """As a backup of a running flow does: files that are collected meanwhile are left out."""
    with contextlib.suppress(shutil.Error):
        shutil.copytree(source, target)


def test_a_host_that_was_replaced_is_refused_and_rejoins(tmp_path: Path) -> None:
    settings = remote(tmp_path)
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a, **{**settings, "replicate_interval": "1h"}) as flow:
        copied(flow, publish(flow, 3))
        publish(flow, 7)  # never uploaded
        assert len(flow.sink.rows()) == 10
    with running(b, **settings) as flow:
        assert flow.recovered.path == "remote"
        assert len(flow.sink.rows()) == 3
        copied(flow, publish(flow, 9))
        assert_each_once(flow.sink.rows())
        before = flow.sink.rows()
    with pytest.raises(OtherHistoryError, match="taken this flow over") as caught, running(a, **settings):
        pass
    assert caught.value.can_rejoin
    assert "--rejoin" in caught.value.next_step
    assert table(tmp_path) == before
    for point in ("aside-saved", "aside-moved", "remote-told"):
        assert is_killed_at(point, lambda: SparklessFlow(a, rejoin=True, **settings))
        assert table(tmp_path) == before
    with running(a, rejoin=True, **settings) as flow:
        assert flow.recovered.restored_epoch == 1_002  # of b; it was downloaded before the last kill
        publish(flow, 2)
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 14
        kept = flow.run._parts.stores.savepoints.list()
    assert {one.epoch for one in kept} == {2}
    assert all(one.name.startswith("before-rejoin-") for one in kept)
    assert not list(flow.layout.root.glob("aside/*"))
    with pytest.raises(OtherHistoryError, match="taken this flow over"), running(b, **settings):
        pass


def test_a_person_may_give_up_what_the_other_host_did(tmp_path: Path) -> None:
    settings = remote(tmp_path)
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a, **settings) as flow:
        copied(flow, publish(flow, 3))
    with running(b, **settings) as flow:
        copied(flow, publish(flow, 2))
    with pytest.raises(OtherHistoryError) as caught, running(a, **settings):
        pass
    with running(a, restore_to=caught.value.restorable, **settings) as flow:
        assert len(flow.sink.rows()) == 3
        copied(flow, publish(flow, 4))  # the remote tier has the generation of b, and does not mind
        assert_each_once(flow.sink.rows())
    with running(a, **settings) as flow:
        assert flow.recovered.path == "resume"
    with pytest.raises(OtherHistoryError), running(b, **settings):
        pass


def test_a_storage_that_is_the_newest_has_nothing_to_rejoin(tmp_path: Path) -> None:
    settings = remote(tmp_path)
    with running(tmp_path, **settings) as flow:
        publish(flow, 3)
    with running(tmp_path, rejoin=True, **settings) as flow:
        assert flow.recovered.path == "resume"
        assert not flow.run._parts.stores.savepoints.list()


def test_without_a_remote_tier_there_is_nothing_to_rejoin(tmp_path: Path) -> None:
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a) as flow:
        publish(flow, 3)
    shutil.copytree(a / "storage", b / "storage")
    with running(b) as flow:
        publish(flow, 1)
    with pytest.raises(OtherHistoryError) as caught, running(a, rejoin=True):
        pass
    assert not caught.value.can_rejoin
    # A person may decide otherwise: what the other one published is given up.
    with running(a, restore_to=caught.value.restorable) as flow:
        assert len(flow.sink.rows()) == 3
        publish(flow, 2)
        assert_each_once(flow.sink.rows())
    with pytest.raises(OtherHistoryError), running(b):
        pass


def test_of_two_storages_that_are_started_at_once_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have found the sink as it was before; the other one is faster."""
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a) as flow:
        publish(flow, 3)
    shutil.copytree(a / "storage", b / "storage")
    others: list[SparklessFlow] = []

    def after_the_other(*given: Any) -> Any:
        if not others:
            others.append(None)  # type: ignore[arg-type]
            others[0] = SparklessFlow(b)
        return settle_sinks(*given)

    monkeypatch.setattr(assembly, "settle_sinks", after_the_other)
    with pytest.raises(FencedError, match="meanwhile"), running(a):
        pass
    try:
        publish(others[0], 2)
        assert_each_once(others[0].sink.rows())
    finally:
        others[0].stop()


def test_a_host_that_returns_while_the_remote_tier_is_away_uploads_nothing(tmp_path: Path) -> None:
    """No sink is there to tell that another host took over, and the generation number of this one is higher."""
    settings = remote(tmp_path)
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a, **settings) as flow:
        copied(flow, publish(flow, 3))
    shutil.copytree(tmp_path / "table", tmp_path / "table-before")
    with running(b, **settings) as flow:
        copied(flow, publish(flow, 2))
        taken = flow.recovered.generation
    there = {path: path.read_bytes() for path in (tmp_path / "remote").rglob("*.json")}
    shutil.rmtree(tmp_path / "table")
    shutil.copytree(tmp_path / "table-before", tmp_path / "table")  # from a backup: it does not know of b
    faults = Faults()
    faults.failing = lambda operation, path: NotDone("away")
    with faults.injected("cutline.objects.open_store"):
        with closing_metadata(a) as metadata:
            metadata.next_generation(Generation(taken + 10))
        flow = SparklessFlow(a, **settings)
        try:
            faults.failing = None
            flow.request()
            with pytest.raises(FencedError):
                flow.run.await_termination(20)
        finally:
            flow.stop()
    assert {path: path.read_bytes() for path in there} == there


def table(tmp_path: Path) -> list[list[int]]:
    return FolderSink(tmp_path / "table").rows()


@pytest.mark.parametrize("more", [{}, {"publish": "at_once"}, {"mode": "per-operator"}])
def test_the_original_of_a_copy_that_went_on_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a, **more) as flow:
        publish(flow, 3)
        copy_running(a / "storage", b / "storage")
        for _ in range(5):
            flow.checkpoint()  # idle
    with running(b, **more) as flow:
        publish(flow, 4)
        assert_each_once(flow.sink.rows())
    before = table(tmp_path)
    with pytest.raises(OtherHistoryError, match="taken this flow over"), running(a, **more):
        pass
    assert table(tmp_path) == before
    with running(b, **more) as flow:  # which the refused start has not disturbed
        publish(flow, 1)
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize("more", [{}, {"publish": "at_once"}, {"on_rollback": "keep"}, {"mode": "per-operator"}])
def test_a_copy_that_is_behind_takes_nothing_back(tmp_path: Path, more: dict[str, Any]) -> None:
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    flow = SparklessFlow(a, **more)
    try:
        publish(flow, 3)
        copy_running(a / "storage", b / "storage")
        publish(flow, 4)
    finally:
        flow.stop()
    before = table(tmp_path)
    with pytest.raises(OtherHistoryError, match="older than the flow"), running(b, **more):
        pass
    assert table(tmp_path) == before
    with running(a, **more) as flow:
        publish(flow, 1)
        assert_each_once(flow.sink.rows())


# ---------------------------------------------------------------------- what a refusal must not do, and interruptions


def test_a_refused_start_does_not_disturb_the_host_that_runs_the_flow(tmp_path: Path) -> None:
    """Not even in the remote tier, where a claim alone would stop it."""
    settings = remote(tmp_path)
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a, **settings) as flow:
        copied(flow, publish(flow, 3))
    with running(b, **settings) as flow:
        copied(flow, publish(flow, 2))
        with pytest.raises(OtherHistoryError), running(a, **settings):
            pass
        copied(flow, publish(flow, 2))
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize(
    "point", ["remote-fetched-records", "restore-dirs-built", "remote-told", "restore-generation", "sink-rewind-half"]
)
@pytest.mark.parametrize("rejoin", [False, True])
def test_a_takeover_that_was_killed_is_completed_by_the_next_start(tmp_path: Path, point: str, *, rejoin: bool) -> None:
    """The sinks are ahead of the remote tier, as is normal when a host is lost."""
    settings = remote(tmp_path)
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    if rejoin:
        with running(b, **settings) as flow:
            publish(flow, 1)
        copy_running(b / "storage", a / "storage")
    with running(a, **{**settings, "replicate_interval": "1h"}) as flow:
        copied(flow, publish(flow, 3))
        publish(flow, 4)
    if not rejoin:
        shutil.rmtree(a)
    assert is_killed_at(point, lambda: SparklessFlow(b, rejoin=rejoin, **settings))
    with running(b, **settings) as flow:
        publish(flow, 2)
        assert_each_once(flow.sink.rows())


def test_what_an_interrupted_takeover_had_downloaded_is_not_used_when_others_went_on(tmp_path: Path) -> None:
    settings = remote(tmp_path)
    a, b, c = (beside(tmp_path, name) for name in "abc")
    with running(a, **settings) as flow:
        copied(flow, publish(flow, 3))
    assert is_killed_at("remote-told", lambda: SparklessFlow(b, **settings))
    with running(c, **settings) as flow:
        copied(flow, publish(flow, 4))
    with running(b, **settings) as flow:
        assert len(flow.sink.rows()) == 7
        publish(flow, 1)
        assert_each_once(flow.sink.rows())


def test_a_copy_rewinds_nothing_that_is_published_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    flow, done = SparklessFlow(a), list[int]()
    try:
        publish(flow, 3)
        copy_running(a / "storage", b / "storage")

        def after_the_owner(*given: Any) -> Any:
            if not done:
                done.append(publish(flow, 4))
            return settle_sinks(*given)

        monkeypatch.setattr(assembly, "settle_sinks", after_the_owner)
        with pytest.raises(OtherHistoryError, match="meanwhile"), running(b):
            pass
        assert len(table(tmp_path)) == 7
    finally:
        flow.stop()
    with running(a) as flow:  # it was fenced, and nothing else
        publish(flow, 1)
        assert_each_once(flow.sink.rows())


def test_a_damaged_generation_in_the_bucket_does_not_end_the_flow_that_has_it(tmp_path: Path) -> None:
    settings = remote(tmp_path)
    for _ in range(2):
        with running(tmp_path, **settings) as flow:
            copied(flow, publish(flow, 3))
    newest = sorted((tmp_path / "remote").rglob("generations/*.json"))[-1]
    whole = newest.read_bytes()
    newest.write_bytes(b"garbage")
    with running(tmp_path, **settings) as flow:
        copied(flow, publish(flow, 2))
    assert newest.read_bytes() == whole


def test_a_folder_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    host = Path(os.fsdecode(os.fsencode(tmp_path) + b"/host-\xff"))
    host.mkdir()
    with running(host) as flow:
        publish(flow, 2)
    with running(host) as flow:
        assert flow.recovered.path == "resume"


@pytest.mark.parametrize("has_remote", [False, True])
@pytest.mark.parametrize("publish_how", ["checkpoint", "at_once"])
def test_a_storage_without_any_record_does_not_disturb_the_one_that_runs_the_flow(
    tmp_path: Path, publish_how: str, *, has_remote: bool
) -> None:
    """A mistyped folder, or a new host before the first upload: it is refused before it claims a sink."""
    settings: dict[str, Any] = {"publish": publish_how, **(remote(tmp_path) if has_remote else {})}
    a, b = beside(tmp_path, "a"), beside(tmp_path, "b")
    with running(a, **settings) as flow:
        publish(flow, 3)
    shutil.rmtree(tmp_path / "remote", ignore_errors=True)
    with pytest.raises(RecoveryError), running(b, **settings):
        pass
    with running(a, **settings) as flow:
        publish(flow, 2)
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5
