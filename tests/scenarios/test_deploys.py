"""Other code is started: it is announced, the state before it is saved, and the flow can be restored to that."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cutline.base import durable, records
from cutline.base.crashpoints import DEPLOY_POINTS
from cutline.cli.main import app
from cutline.errors import ConfigError, DamagedRecordError, RecoveryError, UnknownSavepointError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoint, Savepoints
from cutline.storage.local import LocalStore
from tests.support.killing import is_killed_at
from tests.support.remote import copied, lose_host, remote
from tests.support.running import assert_each_once, drained, running
from tests.support.small_disk import small_disk
from tests.support.sparkless import TOTALS, SparklessFlow


def good(df: Any) -> Any:
    return df.sum()


def bad(df: Any) -> Any:
    return df.max()


def fixed(df: Any) -> Any:
    return df.sum() + 0


GOOD, BAD, FIXED = ({TOTALS: function} for function in (good, bad, fixed))
Code = dict[Any, Callable[..., Any]]


def live(storage: Path, code: Code, *, numbers: int = 3, **settings: Any) -> SparklessFlow:
    """One run, which takes a checkpoint; returns the flow that has stopped."""
    with running(storage, functions=code, **settings) as flow:
        if numbers:
            flow.emit(numbers)
            flow.drain()
    return flow


def savepoints_in(storage: Path) -> Savepoints:
    return Savepoints(Layout(storage / "storage", "counting"), store_at)


def automatic(storage: Path) -> list[Savepoint]:
    return [one for one in savepoints_in(storage).list() if one.taken_before]


def command(storage: Path, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--storage", str(storage / "storage")])


def test_the_same_code_is_not_announced(tmp_path: Path) -> None:
    first, second = live(tmp_path, GOOD), live(tmp_path, GOOD)
    for flow in (first, second):
        code = flow.run.status().code
        assert code is not None
        assert (code.change, code.savepoint) == ("", "")
    assert automatic(tmp_path) == []
    assert {one.code for one in second.run.checkpoints()} == {first.recovered.record.code.hash}  # type: ignore[union-attr]


def test_other_code_is_announced_and_the_state_before_it_is_saved(tmp_path: Path) -> None:
    before = live(tmp_path, GOOD)
    with running(tmp_path, functions=BAD) as flow:
        (saved,) = automatic(tmp_path)
        assert saved.name.startswith("auto-")
        assert saved.name.endswith(f"Z-e{saved.epoch}")
        assert saved.epoch == flow.recovered.manifests[-1].epoch
        was, now = before.recovered.record.code, flow.recovered.record.code
        assert was is not None
        assert now is not None
        assert (saved.code, saved.taken_before) == (was.hash, "deploy")
        change = f"code changed since epoch {saved.epoch}: operators totals (function)"
        code = flow.run.status().code
        assert code is not None
        assert (code.hash, code.change, code.savepoint) == (now.hash, change, saved.name)
        assert saved.note == change
        flow.emit(2)
        flow.drain()
        outcomes = flow.run.checkpoints()
        assert (outcomes[0].code, outcomes[-1].code) == (now.hash, was.hash)
        manifest = flow.checkpoints.load_manifest(outcomes[0].epoch)
        assert manifest.code == now.hash
        assert_each_once(flow.sink.rows())
    shown = command(tmp_path, "status", "counting").stdout
    assert change in " ".join(shown.split())
    assert now.hash in shown
    assert was.hash in command(tmp_path, "savepoint", "show", saved.name, "--flow", "counting").stdout


def test_a_flow_is_restored_to_before_the_last_deploy(tmp_path: Path) -> None:
    live(tmp_path, GOOD)
    for _ in range(3):  # the checkpoint of the good code is long collected
        live(tmp_path, BAD)
    told = command(tmp_path, "restore", "--flow", "counting", "--to", "before-last-deploy")
    (saved,) = automatic(tmp_path)
    assert f"epoch {saved.epoch} (savepoint {saved.name}, code {saved.code})" in told.stdout
    with running(tmp_path, functions=GOOD) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("local", saved.epoch)
        assert len(flow.sink.rows()) == 3
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5
    assert [one.taken_before for one in automatic(tmp_path)] == ["deploy", "restore"], "what was given up is kept too"


def test_what_a_restore_gave_up_is_kept_and_not_offered_for_restoring(tmp_path: Path) -> None:
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    command(tmp_path, "restore", "--flow", "counting", "--to", "before-last-deploy")
    with running(tmp_path, functions=GOOD) as flow:
        flow.emit(2)
        flow.drain()
        flow.wait(flow.layout.status.exists)
    good, bad = automatic(tmp_path)
    shown = " ".join(command(tmp_path, "status", "counting").stdout.split())
    kept = f"what was given up is kept as savepoint {bad.name} (clone only)"
    assert f"restored to epoch {good.epoch}; {kept}" in shown
    assert "code changed" not in shown and "the state before it" not in shown
    code = json.loads(command(tmp_path, "status", "counting", "--json").stdout)["code"]
    assert (code["restored"], code["given_up"], code["savepoint"]) == (good.epoch, bad.name, "")
    listed = json.loads(command(tmp_path, "savepoint", "list", "counting", "--json").stdout)
    assert {one["name"]: one["is_restorable"] for one in listed} == {good.name: True, bad.name: False}
    lines = command(tmp_path, "savepoint", "list", "counting").stdout.splitlines()
    assert [name in lines[0] for name in ("age", "size", "restorable")] == [True] * 3
    assert "no, clone only" in next(line for line in lines if bad.name in line)
    target = ("restore", "--flow", "counting", "--to", bad.name)
    told = CliRunner().invoke(app, [*target, "--dry-run", "--storage", str(tmp_path / "storage")])
    first, then = told.stdout.splitlines()[:2]
    why = f"epoch {bad.epoch} left the flow's history when epoch {good.epoch} was restored"
    assert told.exit_code == 1 and first.startswith("the start would refuse: ") and why in first
    assert then.startswith(f"Next: begin a second flow from it: cutline clone counting {bad.name} NEW_FLOW --storage ")
    assert "would restore" not in told.stdout and "given up:" not in told.stdout
    told = CliRunner().invoke(app, [*target, "--storage", str(tmp_path / "storage")])
    assert isinstance(told.exception, RecoveryError) and why in told.exception.what


def test_before_the_last_deploy_of_a_flow_that_had_none(tmp_path: Path) -> None:
    live(tmp_path, GOOD)
    live(tmp_path, GOOD)
    line = ["restore", "--flow", "counting", "--to", "before-last-deploy", "--storage", str(tmp_path / "storage")]
    told = CliRunner().invoke(app, line)
    assert isinstance(told.exception, UnknownSavepointError)
    assert "the code has not changed since the first start" in told.exception.what


@pytest.mark.parametrize("code", [GOOD, FIXED], ids=["former code", "fixed code"])
def test_a_start_restores_to_before_the_last_deploy(tmp_path: Path, code: Code) -> None:
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    with running(tmp_path, functions=code, restore_to="before-last-deploy") as flow:
        assert len(flow.sink.rows()) == 3
        assert flow.run.status().code.change.startswith("code changed since epoch ")  # type: ignore[union-attr]


def test_code_that_was_deployed_by_a_restore_can_be_undone_too(tmp_path: Path) -> None:
    """As for changed operators: stop with a savepoint, restore it with new code."""
    with running(tmp_path, functions=GOOD) as flow:
        flow.emit(3)
        drained(flow, "release")
    live(tmp_path, BAD, restore_to="release")
    with running(tmp_path, functions=GOOD, restore_to="before-last-deploy") as flow:
        assert len(flow.sink.rows()) == 3
    assert [one.taken_before for one in automatic(tmp_path)] == ["deploy", "restore"]


def test_a_return_to_former_code_without_a_restore_names_what_that_code_left(tmp_path: Path) -> None:
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    with running(tmp_path, functions=GOOD) as flow:
        left = automatic(tmp_path)[0]
        change = flow.run.status().code.change  # type: ignore[union-attr]
        assert change.endswith(f"totals (function); this code ran before and left savepoint {left.name}")
    with running(tmp_path, functions=GOOD, restore_to=left.name) as flow:
        assert len(flow.sink.rows()) == 3


def test_a_restore_is_not_undone_by_repeating_it(tmp_path: Path) -> None:
    """A supervisor may repeat the command line: it must not restore what a person has given up."""
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    live(tmp_path, GOOD, restore_to="before-last-deploy")
    with pytest.raises(UnknownSavepointError, match="restored to before its last deploy already"):
        SparklessFlow(tmp_path, functions=GOOD, restore_to="before-last-deploy")
    told = command(tmp_path, "restore", "--flow", "counting", "--to", "before-last-deploy")
    assert isinstance(told.exception, UnknownSavepointError)


def test_a_restore_with_corrected_code_is_not_repeated_either(tmp_path: Path) -> None:
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    live(tmp_path, FIXED, restore_to="before-last-deploy", numbers=5)
    with pytest.raises(UnknownSavepointError, match=f"already, to savepoint {automatic(tmp_path)[0].name}"):
        SparklessFlow(tmp_path, functions=FIXED, restore_to="before-last-deploy")
    assert len(live(tmp_path, FIXED, numbers=0).sink.rows()) == 8, "nothing of its work is given up"


def test_a_restore_that_was_killed_and_given_up_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """The savepoint that it took is the one from before the next deploy all the same."""
    live(tmp_path, GOOD)
    newest = live(tmp_path, BAD).run.checkpoints()[0].epoch
    go_back = partial(SparklessFlow, tmp_path, functions=GOOD, restore_to="before-last-deploy")
    assert is_killed_at("deploy-saved", go_back)
    assert [one.taken_before for one in automatic(tmp_path)] == ["deploy", "restore"]
    for _ in range(2):
        live(tmp_path, FIXED, auto_savepoints=1)
    told = command(tmp_path, "restore", "--flow", "counting", "--to", "before-last-deploy", "--dry-run")
    assert f"would restore epoch {newest} " in told.stdout
    with running(tmp_path, functions=BAD, restore_to="before-last-deploy") as flow:
        assert (flow.recovered.restored_epoch, len(flow.sink.rows())) == (newest, 6)


def test_code_that_is_changed_back_keeps_its_own_work(tmp_path: Path) -> None:
    """The bad code died before its first checkpoint, and the file was rolled back first."""
    live(tmp_path, FIXED)
    newest = live(tmp_path, GOOD).run.checkpoints()[0].epoch
    with running(tmp_path, functions=BAD) as flow:
        flow.emit(2)
    live(tmp_path, GOOD, numbers=0)
    with running(tmp_path, functions=GOOD, restore_to="before-last-deploy") as flow:
        assert (flow.recovered.restored_epoch, len(flow.sink.rows())) == (newest, 6)


def test_a_savepoint_that_was_deleted_is_named(tmp_path: Path) -> None:
    """An earlier one is not taken for it."""
    live(tmp_path, FIXED)
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    last = automatic(tmp_path)[-1].name
    savepoints_in(tmp_path).delete(last)
    with pytest.raises(UnknownSavepointError, match=f"savepoint {last}, taken before the code last changed, is not"):
        SparklessFlow(tmp_path, functions=GOOD, restore_to="before-last-deploy")


@pytest.mark.parametrize("point", ["", "restore-generation"])
def test_a_repeated_restore_does_not_go_to_before_an_earlier_deploy(tmp_path: Path, point: str) -> None:
    live(tmp_path, FIXED)
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    if point:  # out of memory, say, and the person on call repeats the command
        go_back = partial(SparklessFlow, tmp_path, functions=GOOD, restore_to="before-last-deploy")
        assert is_killed_at(point, go_back)
    else:
        live(tmp_path, GOOD, restore_to="before-last-deploy")
    with pytest.raises(UnknownSavepointError, match=automatic(tmp_path)[1].name):
        SparklessFlow(tmp_path, functions=GOOD, restore_to="before-last-deploy")
    assert len(live(tmp_path, GOOD, numbers=1).sink.rows()) >= 7


def test_a_savepoint_of_a_history_that_was_left_is_not_before_the_last_deploy(tmp_path: Path) -> None:
    live(tmp_path, GOOD)
    live(tmp_path, BAD)
    live(tmp_path, FIXED)
    first, _ = automatic(tmp_path)
    live(tmp_path, GOOD, restore_to=first.name, numbers=0)
    live(tmp_path, FIXED, numbers=0)
    with running(tmp_path, functions=GOOD, restore_to="before-last-deploy") as flow:
        assert flow.recovered.restored_epoch == first.epoch


def test_a_former_savepoint_counts_when_the_code_changes_again_without_a_checkpoint(tmp_path: Path) -> None:
    live(tmp_path, GOOD)
    live(tmp_path, BAD, numbers=0)
    with running(tmp_path, functions=FIXED) as flow:
        (saved,) = automatic(tmp_path)
        assert flow.run.status().code.savepoint == saved.name  # type: ignore[union-attr]


@pytest.mark.parametrize("is_restore", [False, True], ids=["resume", "restore"])
@pytest.mark.parametrize("point", ["restore-dirs-built", "savepoint-sent", "deploy-saved", "restore-generation"])
def test_wherever_the_start_is_killed_there_is_one_savepoint_before_the_first_batch(
    tmp_path: Path, point: str, *, is_restore: bool
) -> None:
    saved_epoch = live(tmp_path, GOOD).run.checkpoints()[0].epoch
    if is_restore:
        live(tmp_path, BAD)
        assert command(tmp_path, "restore", "--flow", "counting", "--to", "before-last-deploy").exit_code == 0
    expected = len(automatic(tmp_path)) + 1
    code = FIXED if is_restore else BAD
    is_passed = is_killed_at(point, lambda: SparklessFlow(tmp_path, functions=code))
    assert is_passed is not (point == "restore-dirs-built" and not is_restore), "a resume builds no directory"
    with running(tmp_path, functions=code) as flow:
        assert len(automatic(tmp_path)) == expected
        assert len(flow.sink.rows()) == 3
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 5
    found = automatic(tmp_path)
    assert len(found) == expected
    assert found[0].epoch == saved_epoch
    for one in found:
        assert savepoints_in(tmp_path).manifest_of(one).epoch == one.epoch


def test_only_the_newest_automatic_savepoints_are_kept_and_none_of_a_person(tmp_path: Path) -> None:
    with running(tmp_path, functions=GOOD) as flow:
        flow.emit(1)
        drained(flow, "auto-mine")
        drained(flow, "release")
    for number in range(5):
        live(tmp_path, (BAD, GOOD)[number % 2], numbers=1, auto_savepoints=2)
    names = [one.name for one in savepoints_in(tmp_path).list()]
    assert [one for one in names if not one.startswith("auto-2")] == ["auto-mine", "release"]
    assert len(names) == 4
    newest = [one.epoch for one in automatic(tmp_path)]
    live(tmp_path, BAD, numbers=0, auto_savepoints=0)
    assert [one.epoch for one in automatic(tmp_path)] == newest, "with 0 none is taken, none is removed"


def test_a_kill_while_old_ones_are_removed_leaves_the_rest(tmp_path: Path) -> None:
    for code in (GOOD, BAD, GOOD, BAD):
        live(tmp_path, code, numbers=1)
    assert len(automatic(tmp_path)) == 3
    before = automatic(tmp_path)
    assert is_killed_at(
        "deploy-collected", lambda: SparklessFlow(tmp_path, functions=GOOD, auto_savepoints=1, checkpoint_interval=0)
    )
    left = automatic(tmp_path)
    assert [one.name for one in left][:-1] == [one.name for one in before[1:]]
    live(tmp_path, GOOD, auto_savepoints=1)
    assert [one.name for one in automatic(tmp_path)] == [left[-1].name]


def test_the_savepoint_that_is_being_restored_is_never_removed(tmp_path: Path) -> None:
    for code in (GOOD, BAD, GOOD):
        live(tmp_path, code, numbers=1)
    oldest = automatic(tmp_path)[0]
    live(tmp_path, BAD, restore_to=oldest.name, auto_savepoints=1)
    assert oldest.name in [one.name for one in automatic(tmp_path)]


def test_that_from_before_the_last_deploy_is_never_removed(tmp_path: Path) -> None:
    """However few are kept, and whatever restores have left since."""
    settings: dict[str, Any] = {"auto_savepoints": 1, "retain": "1h"}
    live(tmp_path, GOOD, **settings)
    first = live(tmp_path, BAD, **settings).recovered.manifests[-1].epoch
    live(tmp_path, BAD, **settings)
    live(tmp_path, FIXED, restore_to=first, **settings)
    assert [one.taken_before for one in automatic(tmp_path)] == ["deploy", "restore"]
    for _ in range(2):
        live(tmp_path, FIXED, **settings)
    with running(tmp_path, functions=GOOD, restore_to="before-last-deploy", **settings) as flow:
        assert flow.recovered.restored_epoch == first


def test_starts_that_are_killed_while_they_save_leave_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(tmp_path, GOOD)
    for number in range(3):  # their names tell the second
        monkeypatch.setattr("cutline.savepoints.automatic.now_ms", lambda number=number: number * 1_000)
        assert is_killed_at("savepoint-sent", lambda: SparklessFlow(tmp_path, functions=BAD))
    folder = Layout(tmp_path / "storage", "counting").savepoints
    assert len(list(folder.iterdir())) == 1
    live(tmp_path, BAD)
    assert [path.name for path in folder.iterdir()] == [one.name for one in automatic(tmp_path)]


def test_every_deploy_point_is_tested() -> None:
    assert set(DEPLOY_POINTS) == {"deploy-saved", "deploy-collected"}


# ---------------------------------------------------------------------- what prevents a savepoint


def test_without_a_complete_checkpoint_the_change_is_only_announced(tmp_path: Path) -> None:
    live(tmp_path, GOOD, numbers=0)
    with running(tmp_path, functions=BAD) as flow:
        code = flow.run.status().code
        assert code is not None
        assert "which has completed no checkpoint: operators totals (function)" in code.change
        assert code.savepoint == ""
    with pytest.raises(UnknownSavepointError):
        SparklessFlow(tmp_path, functions=BAD, restore_to="before-last-deploy")


def test_in_per_operator_mode_the_change_is_only_announced(tmp_path: Path) -> None:
    live(tmp_path, GOOD, mode="per-operator")
    with running(tmp_path, functions=BAD, mode="per-operator") as flow:
        assert "totals (function)" in flow.run.status().code.change  # type: ignore[union-attr]
    assert automatic(tmp_path) == []


def test_a_region_that_is_restored_runs_the_same_code(tmp_path: Path) -> None:
    with running(tmp_path, functions=GOOD) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.fail(TOTALS)
        flow.drain()
        records = flow.generations.load_all()
        assert [one.path for one in records] == ["fresh", "regional"]
        assert records[0].code == records[1].code
        assert records[0].code_since_ms == records[1].code_since_ms > 0
    live(tmp_path, GOOD)
    assert automatic(tmp_path) == []


def test_on_a_disk_without_room_the_start_is_refused_and_tells_the_way_out(tmp_path: Path) -> None:
    layout = live(tmp_path, GOOD).layout
    with small_disk(layout.savepoints, 1024) as disk:  # the rest of the storage has room
        disk.fill()
        with pytest.raises(RecoveryError, match="the state must be saved, and that failed") as caught:
            SparklessFlow(tmp_path, functions=BAD)
        assert "no space" in str(caught.value).lower()
        assert "--set auto_savepoints=0" in caught.value.next_step
        assert len(str(caught.value).splitlines()) <= 3
        assert len(LocalStore.reading(layout).generations.load_all()) == 1, "the new code has not run"
        live(tmp_path, GOOD)
        with running(tmp_path, functions=BAD, auto_savepoints=0) as flow:
            assert flow.run.status().code.change  # type: ignore[union-attr]
        live(tmp_path, GOOD, auto_savepoints=0)
        disk.free()
        live(tmp_path, BAD)
        assert len(automatic(tmp_path)) == 1
    assert_each_once(flow.sink.rows())


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    with running(tmp_path, functions=GOOD, retain_checkpoints=3) as flow:
        for _ in range(2):
            flow.emit(1)
            flow.drain()
        first, second = flow.checkpoints.epochs()[-2:]
    cut = LocalStore.reading(flow.layout).checkpoints.load_manifest(second).operators[TOTALS]
    flow.layout.record(second, TOTALS, cut.generation).unlink()
    with running(tmp_path, functions=BAD, retain_checkpoints=3):
        assert [one.epoch for one in automatic(tmp_path)] == [first]


def test_the_name_before_last_deploy_is_not_for_a_savepoint(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
        with pytest.raises(ConfigError, match="before-last-deploy"):
            flow.run.savepoint("before-last-deploy")


# ---------------------------------------------------------------------- other tiers, copies, former versions


def test_another_host_with_other_code_saves_what_it_has_downloaded(tmp_path: Path) -> None:
    with running(tmp_path, functions=GOOD, **remote(tmp_path)) as flow:
        flow.emit(3)
        flow.drain()
        epoch = flow.checkpoints.epochs()[-1]
        copied(flow, epoch)
    lose_host(tmp_path)
    with running(tmp_path, functions=BAD, **remote(tmp_path)) as flow:
        assert flow.recovered.path == "remote"
        (saved,) = automatic(tmp_path)
        assert saved.epoch == epoch
        assert "totals (function)" in flow.run.status().code.change  # type: ignore[union-attr]
    live(tmp_path, GOOD, restore_to="before-last-deploy", **remote(tmp_path))


def test_an_exported_savepoint_and_a_clone_know_their_code(tmp_path: Path) -> None:
    made = live(tmp_path, GOOD).recovered.record.code
    assert made is not None
    live(tmp_path, BAD)
    (saved,) = automatic(tmp_path)
    savepoints = savepoints_in(tmp_path)
    savepoints.export(saved.name, str(tmp_path / "export"))
    imported = savepoints.import_from(str(tmp_path / "export"), "mine")
    assert (imported.code, imported.taken_before) == (made.hash, ""), "a person owns what they import"
    target = Layout(tmp_path / "clone", "second")
    savepoints.clone("mine", target, "second", rename={"totals": "sums"})  # type: ignore[arg-type]
    copy = LocalStore.reading(target)
    assert copy.checkpoints.load_manifest(saved.epoch).code == made.hash
    code = copy.generations.load_all()[-1].code
    assert code is not None
    assert set(code.operators) == {"numbers", "sums"}


@pytest.mark.parametrize("code", ["../../etc/x", "0123456789AB", "0123456789ab\n", 7, None])
def test_a_manifest_with_a_code_that_no_start_writes_is_refused(tmp_path: Path, code: Any) -> None:
    flow = live(tmp_path, GOOD)
    path = flow.layout.manifest(flow.run.checkpoints()[0].epoch)
    plain = msgspec.to_builtins(records.load("manifest", path, Manifest))
    with pytest.raises(DamagedRecordError):
        records.decode("manifest", records.encode("manifest", {**plain, "code": code}), Manifest)
    del plain["code"]  # as a former version stored it
    assert records.decode("manifest", records.encode("manifest", plain), Manifest).code == ""


def test_a_flow_of_a_former_version_is_saved_before_it_continues(tmp_path: Path) -> None:
    flow = live(tmp_path, GOOD)
    path = flow.layout.generation(flow.recovered.generation)
    record = records.load("generation", path, GenerationRecord)
    plain = msgspec.to_builtins(record)
    del plain["code"], plain["code_since_ms"]
    durable.replace(path, records.encode("generation", plain))
    with running(tmp_path, functions=GOOD) as flow:
        assert "former version" in flow.run.status().code.change  # type: ignore[union-attr]
        assert [one.epoch for one in automatic(tmp_path)] == [Epoch(flow.recovered.manifests[-1].epoch)]
