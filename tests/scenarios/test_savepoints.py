"""Savepoints: taken, listed, moved, restored, cloned. On real storage without Spark."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.errors import ConfigError, DamagedRecordError, RequestFailedError, UnknownSavepointError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.model.staging import StagedBatch
from cutline.ports.sinks import Sink
from cutline.protocol.publish.commit import CommitPermit
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoint, Savepoints
from cutline.storage.local import LocalStore
from cutline.tiers.checkpoint_files import names_in
from cutline.transport.request_files import ask
from tests.support.killing import is_killed_at
from tests.support.running import assert_each_once, drained, running
from tests.support.sparkless import NUMBERS, FolderSink, SparklessFlow


def test_a_savepoint_is_drained_self_contained_and_stays(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        savepoint = drained(flow, "before-deploy", note="version 7")
        assert (savepoint.epoch, savepoint.is_drained, savepoint.note) == (1, True, "version 7")
        for _ in range(3):
            flow.emit(1)
            flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [4])
        assert [one.name for one in flow.run.savepoints()] == ["before-deploy"]
    store = Savepoints(flow.layout, store_at).tier("before-deploy")
    assert store.checkpoints.epochs() == [1]
    needed = set(names_in(store.store, store.checkpoints.load_manifest(Epoch(1)), flow.layout))
    there = {info.path.removesuffix(".zst") for info in store.store.walk()}
    assert needed <= there, "it needs nothing of the flow's folder"


def test_a_flow_goes_back_to_a_savepoint_whose_checkpoint_was_collected(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        drained(flow, "good")
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
        assert len(flow.sink.rows()) == 9
    flow = SparklessFlow(tmp_path, restore_to="good")
    try:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("local", 1)
        assert len(flow.sink.rows()) == 3
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5
    finally:
        flow.stop()


class AttentiveSink(FolderSink):
    """Notes the epochs that each permit wants it to be able to show again."""

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        self.points = permit.rewind_points
        super().commit(permit, staged, token)


class AttentiveFlow(SparklessFlow):
    def sinks(self, storage: Path) -> dict[str, Sink]:
        self.sink = AttentiveSink(storage / "table")
        return {"table": self.sink}


def test_sinks_are_told_to_stay_rewindable_to_savepoints(tmp_path: Path) -> None:
    flow = AttentiveFlow(tmp_path)
    sink = flow.sink
    assert isinstance(sink, AttentiveSink)
    try:
        flow.emit(3)
        drained(flow, "good")
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [4])
        flow.emit(1)
        flow.checkpoint()
        assert list(sink.points or ()) == [1, 4, 5], "the savepoint, and the checkpoints"
        Savepoints(flow.layout, store_at).delete("good")
        flow.emit(1)
        flow.checkpoint()
        assert list(sink.points or ()) == [5, 6]
    finally:
        flow.stop()


def test_a_flow_goes_back_to_a_savepoint_whose_checkpoint_is_still_there(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=9) as flow:
        flow.emit(3)
        drained(flow, "good")
        flow.emit(2)
        flow.drain()
    with running(tmp_path, restore_to="good") as flow:
        assert flow.recovered.restored_epoch == 1
        assert len(flow.sink.rows()) == 3
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_clone_runs_beside_the_first_and_shares_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        drained(flow, "branch")
        flow.emit(2)
        flow.drain()
        Savepoints(flow.layout, store_at).clone(
            "branch", Layout(tmp_path / "second" / "storage", "counting"), FlowName("counting")
        )
        second = SparklessFlow(tmp_path / "second")
        try:
            assert (second.recovered.path, second.recovered.restored_epoch) == ("local", 1)
            second.emit(4)
            second.drain()
            # Its sink begins after the savepoint, its state at it.
            assert second.sink.rows() == [[3, 4], [4, 5], [5, 6], [6, 7]]
        finally:
            second.stop()
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 6


def test_a_fresh_clone_is_told_from_a_damaged_flow(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        drained(flow, "branch")
    where = ["--storage", str(tmp_path / "trial")]
    line = ["clone", "counting", "branch", "trial", "--into", where[1], "--storage", str(tmp_path / "storage")]
    told = CliRunner().invoke(app, line)
    assert told.exit_code == 0
    first, second = told.stdout.splitlines()
    assert first.startswith('flow trial begins at epoch 1 of counting; run it with Flow("trial")')
    assert second == "operators with their state: numbers, totals"
    held = ["checkpoints", "--storage", str(tmp_path / "storage")]
    assert "savepoints: branch of epoch 1" in CliRunner().invoke(app, held).stdout
    epochs = json.loads(CliRunner().invoke(app, [*held, "--json"]).stdout)["epochs"]
    assert [one["savepoints"] for one in epochs] == [["branch"]]
    said = 'cloned from counting, epoch 1; run it with Flow("trial")'
    for command in (["status", *where], ["status", "trial", *where], ["checkpoints", *where]):
        told = CliRunner().invoke(app, command)
        assert told.exit_code == 0, told.output
        shown = " ".join(told.output.split())
        assert said in shown and "not started yet" in shown
        assert "flow.json" not in shown and "missing" not in shown
    status = json.loads(CliRunner().invoke(app, ["status", *where, "--json"]).output)
    assert (status["state"], status["cloned_from"]) == ("new", {"flow": "counting", "epoch": 1})
    (one,) = json.loads(CliRunner().invoke(app, ["flows", *where, "--json"]).output)["flows"]
    assert (one["state"], one["problems"]) == ("new", [])
    (tmp_path / "trial/trial/flow.json").unlink()
    told = CliRunner().invoke(app, ["status", *where])
    assert f"cutline verify trial --storage {where[1]}" in str(told.exception)


def test_operators_may_be_renamed_and_dropped_on_the_way(tmp_path: Path) -> None:
    """The clone is looked at as it lies there: this harness knows only one flow."""
    with running(tmp_path) as flow:
        flow.emit(2)
        for _ in range(2):
            flow.step(NUMBERS)  # in flight
        flow.run.savepoint("branch", drain=False)
        savepoints = Savepoints(flow.layout, store_at)
    target = Layout(tmp_path / "storage", "renamed")
    manifest, renaming = savepoints.clone(
        "branch", target, FlowName("renamed"), rename={"numbers": "digits", "totals": "sums"}
    )
    assert renaming.new_names == {"numbers": "digits", "totals": "sums"}
    assert set(manifest.operators) == set(manifest.channels) == {"digits", "sums"}
    assert manifest.operators[OperatorId("sums")].positions.keys() == {"digits"}
    assert manifest.channels[OperatorId("digits")].in_flight.keys() == {"sums"}
    store = LocalStore.reading(target)
    record = store.checkpoints.load_record(store.checkpoints.load_manifest(manifest.epoch), OperatorId("sums"))
    offsets = next(file for file in record.shared if file.path == f"offsets/{record.batch}")
    assert b'"channel": "digits"' in (offsets.content or b"")
    where = ["--flow", "renamed", "--storage", str(tmp_path / "storage")]
    assert CliRunner().invoke(app, ["verify", "--deep", *where]).exit_code in (0, 1)  # it has no database yet
    only = Layout(tmp_path / "storage", "only")
    manifest, _ = savepoints.clone("branch", only, FlowName("only"), drop=["totals"])
    assert set(manifest.operators) == {"numbers"}
    with pytest.raises(ConfigError, match="'totals' reads it"):
        savepoints.clone("branch", Layout(tmp_path / "storage", "x"), FlowName("x"), drop=["numbers"])
    with pytest.raises(ConfigError, match="no operator 'nobody'"):
        savepoints.clone("branch", Layout(tmp_path / "storage", "x"), FlowName("x"), rename={"nobody": "x"})
    with pytest.raises(ConfigError, match="two operators would be called"):
        savepoints.clone("branch", Layout(tmp_path / "storage", "x"), FlowName("x"), rename={"numbers": "totals"})
    assert not (tmp_path / "storage" / "x").exists()
    assert not list((tmp_path / "storage").glob(".tmp-*"))


def test_an_exported_savepoint_begins_a_flow_on_another_machine(tmp_path: Path) -> None:
    with running(tmp_path / "here") as flow:
        flow.emit(3)
        drained(flow, "move")
    here = Savepoints(flow.layout, store_at)
    here.export("move", str(tmp_path / "bucket" / "move"))
    shutil.rmtree(tmp_path / "here")
    there = Layout(tmp_path / "there" / "storage", "counting")
    imported = Savepoints(Layout(tmp_path / "shelf", "counting"), store_at)
    savepoint = imported.import_from(str(tmp_path / "bucket" / "move"), "moved")
    assert (savepoint.name, savepoint.epoch) == ("moved", 1)
    imported.clone("moved", there, FlowName("counting"))
    with running(tmp_path / "there") as flow:
        flow.emit(2)
        flow.drain()
        assert flow.sink.rows() == [[3, 4], [4, 5]]
    absolute = str(tmp_path).encode()
    assert not [path for path in (tmp_path / "bucket").rglob("*") if path.is_file() and absolute in path.read_bytes()]


def test_a_savepoint_is_whole_though_its_checkpoint_is_released_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Savepoints.create

    def slowly(self: Savepoints, name: str, manifest: Manifest, **more: Any) -> Savepoint:
        flow.emit(1)
        later = flow.checkpoint()
        flow.emit(1)
        flow.checkpoint()
        flow.wait(lambda: later not in flow.checkpoints.epochs())  # and it is younger than the one that is read
        return create(self, name, manifest, **more)

    with running(tmp_path, retain_checkpoints=1) as flow:
        flow.emit(3)
        monkeypatch.setattr(Savepoints, "create", slowly)
        saved = flow.run.savepoint("slow", drain=False)
        flow.checkpoint()
        flow.wait(lambda: saved.epoch not in flow.checkpoints.epochs())
    with running(tmp_path, restore_to="slow") as flow:
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_nothing_is_restored_from_bad_bytes(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        drained(flow, "rotten")
        flow.emit(1)
        flow.checkpoint()
        flow.wait(lambda: flow.checkpoints.epochs() == [2])
    for blob in flow.layout.savepoint("rotten").glob("blobs/*/*"):
        blob.write_bytes(b"rotten")
    with pytest.raises(DamagedRecordError, match="does not match its hash"):
        SparklessFlow(tmp_path, restore_to="rotten")
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"


def test_a_savepoint_of_another_history_is_not_restored_into_this_flow(tmp_path: Path) -> None:
    with running(tmp_path / "first") as flow:
        flow.emit(3)
        drained(flow, "foreign")
    Savepoints(flow.layout, store_at).export("foreign", str(tmp_path / "shelf"))
    with running(tmp_path / "second") as flow:
        flow.emit(2)
        flow.checkpoint()
        before = flow.layout.manifest(Epoch(1)).read_bytes()
    Savepoints(flow.layout, store_at).import_from(str(tmp_path / "shelf"), "foreign")
    with pytest.raises(ConfigError, match="not belong to this flow's history"):
        SparklessFlow(tmp_path / "second", restore_to="foreign")
    assert flow.layout.manifest(Epoch(1)).read_bytes() == before
    with running(tmp_path / "second") as flow:
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize("name", ["", "7", "../up", "a/b", ".hidden", "x" * 101])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with running(tmp_path) as flow, pytest.raises(ConfigError, match=r"not a valid savepoint name|cannot be called"):
        flow.run.savepoint(name)


def test_a_name_is_used_once_until_it_is_deleted(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        drained(flow, "one")
        with pytest.raises(ConfigError, match="already"):
            flow.run.savepoint("one")
        savepoints = Savepoints(flow.layout, store_at)
        savepoints.delete("one")
        with pytest.raises(UnknownSavepointError, match="available savepoints: none"):
            savepoints.load("one")
        drained(flow, "one")


def test_killed_while_it_is_taken_there_is_none_and_it_can_be_taken_again(tmp_path: Path) -> None:
    def life() -> None:
        with running(tmp_path) as flow:
            flow.emit(2)
            drained(flow, "one")

    assert is_killed_at("savepoint-sent", life)
    with running(tmp_path) as flow:
        assert flow.run.savepoints() == []
        flow.emit(1)
        drained(flow, "one")
        assert [one.name for one in flow.run.savepoints()] == ["one"]


def test_killed_while_it_is_imported_there_is_none_and_it_can_be_imported_again(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        drained(flow, "one")
    savepoints, place = Savepoints(flow.layout, store_at), str(tmp_path / "exported")
    savepoints.export("one", place)
    assert is_killed_at("savepoint-sent", lambda: savepoints.import_from(place, "two") and None)
    assert [one.name for one in savepoints.list()] == ["one"]
    assert savepoints.import_from(place, "two").epoch == savepoints.load("one").epoch


def test_stop_with_a_savepoint_leaves_nothing_after_it(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    done = threading.Thread(target=lambda: flow.run.stop(savepoint="end"))
    done.start()
    while done.is_alive():
        done.join(0.01)
    card = Savepoints(flow.layout, store_at).load("end")
    with running(tmp_path) as flow:
        assert flow.operators[NUMBERS].channel.last_batch == card.batches[NUMBERS]


def test_a_shell_asks_the_running_flow(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        answer = ask(flow.layout.requests, "savepoint", {"name": "asked"}, seconds=20, wait=lambda: None)
        assert (answer["name"], answer["epoch"]) == ("asked", 1)
        with pytest.raises(ConfigError, match="already"):
            ask(flow.layout.requests, "savepoint", {"name": "asked"}, seconds=20, wait=lambda: None)
        with pytest.raises(RequestFailedError, match="does not know"):
            ask(flow.layout.requests, "dance", {}, seconds=20, wait=lambda: None)
    with pytest.raises(RequestFailedError, match="not answered"):
        ask(flow.layout.requests, "checkpoint", {}, seconds=0.2, wait=lambda: None)
    assert list(flow.layout.requests.iterdir()) == []


def test_the_commands_know_nothing_of_what_was_given_up(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=9) as flow:
        for _ in range(3):
            flow.emit(1)
            flow.checkpoint()
    SparklessFlow(tmp_path, restore_to=1, retain_checkpoints=9).stop()
    where = ["--flow", "counting", "--storage", str(tmp_path / "storage")]
    taken = CliRunner().invoke(app, ["savepoint", "create", "now", "--json", *where])
    assert '"epoch":1' in taken.output.replace(" ", ""), taken.output
    planned = CliRunner().invoke(app, ["restore", "--at", "0s ago", "--dry-run", *where])
    assert "restore epoch 1" in planned.output, planned.output


def test_the_commands(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        drained(flow, "good")
        flow.emit(2)
        flow.drain()
    where = ["--flow", "counting", "--storage", str(tmp_path / "storage")]

    def cli(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, [*arguments, *where])
        assert result.exit_code == code, result.output
        return result.output

    assert "good" in cli("savepoint", "list")
    assert "No damage. Every byte was read." in cli("verify", "good")  # of a copy, also without --deep
    assert '"epoch":1' in cli("savepoint", "show", "good", "--json").replace(" ", "")
    assert "would restore epoch 1" in cli("restore", "--to", "good", "--dry-run")
    assert not flow.layout.restore_request.exists()
    cli("savepoint", "export", "good", str(tmp_path / "elsewhere"))
    cli("savepoint", "delete", "good")
    cli("savepoint", "import", str(tmp_path / "elsewhere"), "again")
    assert "restores epoch 1" in cli("restore", "--to", "again")
    with running(tmp_path) as flow:
        assert flow.recovered.restored_epoch == 1
        assert not flow.layout.restore_request.exists()
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 4
    cli("restore", code=1)
    cli("restore", "--to", "77", code=1)
    cli("restore", "--to", "1", "--at", "0s ago", code=1)
    cli("restore", "--at", "yesterday", code=1)
    cli("restore", "--at", "2999-01-01T00:00:00", code=1)
    assert "restore epoch" in cli("restore", "--at", "0s ago", "--dry-run")
