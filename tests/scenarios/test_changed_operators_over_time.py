"""A flow whose operators have changed: killed on the way back, collected, verified, copied to a remote tier."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutline.base.crashpoints import EVOLUTION_POINTS
from cutline.channels.entry_files import data_dir
from cutline.cli.main import app
from cutline.errors import FlowFailedError, RecoveryError
from cutline.model.ids import OperatorId
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest
from cutline.storage.restore_requests import store_request
from tests.support.changes import AFTER, BEFORE, CHANGES, NEW_TABLES, TABLES, first_life
from tests.support.changing import ChangingFlow, changing, counted
from tests.support.killing import is_killed_at

ON_THE_WAY = [*EVOLUTION_POINTS, "restore-dirs-built", "restore-generation", "sink-rewind-half"]
AFTERWARDS = ["after-barrier", "after-record", "after-manifest", "sink-commit-half", "mid-truncate", "mid-collect"]
REMOTELY = ["remote-carried", "remote-told", "remote-sent"]


def layout_of(storage: Path) -> Layout:
    return Layout(storage / "storage", "changing")


def wish(storage: Path, epoch: int) -> None:
    store_request(layout_of(storage), RestoreRequest(to=str(epoch), rename={"totals": "sums"}, allow_dropped=True))


def finishes(flow: ChangingFlow, table: str = "table") -> None:
    """Whatever has happened, every number is counted once."""
    flow.emit(2)
    flow.settle()
    emitted = flow.operators[OperatorId("numbers")].channel.last_batch + 1
    assert flow.table(table) == counted(0, emitted)


def cli(storage: Path, *arguments: str, code: int = 0) -> str:
    where = ["--flow", "changing", "--storage", str(storage / "storage")]
    result = CliRunner().invoke(app, [*arguments, *where], env={"COLUMNS": "160"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def whole_and_tidy(storage: Path) -> None:
    """Every checkpoint that is kept is whole, and a collector with no patience takes nothing that any of them needs."""
    cli(storage, "verify", "--all", "--deep")
    cli(storage, "gc", "--grace", "0")
    cli(storage, "verify", "--all", "--deep")


# ------------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("point", [*ON_THE_WAY, *AFTERWARDS])
def test_killed_anywhere_the_next_start_brings_the_flow_to_where_it_was_wanted(tmp_path: Path, point: str) -> None:
    epoch = first_life(tmp_path)
    wish(tmp_path, epoch)

    def life() -> None:
        with changing(tmp_path, AFTER, NEW_TABLES, retain_checkpoints=2) as flow:
            for _ in range(3):
                flow.emit(2)
                flow.settle()

    assert is_killed_at(point, life)
    with changing(tmp_path, AFTER, NEW_TABLES) as flow:
        assert flow.table("table")[:3] == counted(0, 3)
        finishes(flow)
        counts = [count for _, count in flow.table("latest")]
        assert counts == list(range(1, len(counts) + 1))
    whole_and_tidy(tmp_path)
    with changing(tmp_path, AFTER, NEW_TABLES) as flow:
        assert flow.recovered.path == "resume"


@pytest.mark.parametrize("point", ON_THE_WAY)
def test_killed_anywhere_and_asked_no_more_either_nothing_has_changed_or_all_has(tmp_path: Path, point: str) -> None:
    epoch = first_life(tmp_path)
    assert is_killed_at(point, lambda: ChangingFlow(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES))  # type: ignore[arg-type]
    cli(tmp_path, "verify", "--all", "--deep")
    if point in ("restore-generation", "sink-rewind-half"):
        with pytest.raises(RecoveryError, match="the last run holds operators"):
            ChangingFlow(tmp_path, BEFORE, TABLES)
        with changing(tmp_path, AFTER, NEW_TABLES) as flow:
            assert flow.recovered.path == "resume"
            assert flow.table("table") == counted(0, 3), "what was given up is taken back by the next start"
            finishes(flow)
    else:
        with pytest.raises(RecoveryError, match="the last run holds operators"):
            ChangingFlow(tmp_path, AFTER, NEW_TABLES)
        with changing(tmp_path, BEFORE, TABLES, retain_checkpoints=1) as flow:
            assert flow.recovered.path == "resume"
            assert flow.table("table") == counted(0, 5)
            finishes(flow)
            finishes(flow, "copies")
            flow.wait(lambda: len(flow.checkpoints.epochs()) == 1)
            flow.wait(lambda: not flow.layout.channel(OperatorId("sums")).exists())
    whole_and_tidy(tmp_path)


def test_killed_while_an_operator_joins_it_joins_again(tmp_path: Path) -> None:
    first_life(tmp_path)
    edges, tables = {**BEFORE, "late": ("numbers",)}, {**TABLES, "last": "late"}
    for point in ("restore-generation", "after-append:late", "after-barrier:late", "after-record:late"):

        def life() -> None:
            with changing(tmp_path, edges, tables) as flow:
                flow.emit(1)
                flow.settle()

        assert is_killed_at(point, life)
    with changing(tmp_path, edges, tables) as flow:
        finishes(flow)
        finishes(flow, "last")
    whole_and_tidy(tmp_path)


def test_a_checkpoint_whose_start_was_killed_counts_for_nothing_even_if_no_name_is_shared(tmp_path: Path) -> None:
    old, new = {"numbers": (), "totals": ("numbers",)}, {"digits": (), "sums": ("digits",)}
    with changing(tmp_path, old, {"table": "totals"}) as flow:
        flow.emit(3)
        epoch = flow.settle()
    rename = {"numbers": "digits", "totals": "sums"}
    assert is_killed_at(
        "carry-manifest", lambda: ChangingFlow(tmp_path, new, {"table": "sums"}, restore_to=epoch, rename=rename)
    )
    cli(tmp_path, "verify", "--all", "--deep")
    with changing(tmp_path, old, {"table": "totals"}) as flow:
        assert [manifest.epoch for manifest in flow.recovered.manifests] == [epoch]
        finishes(flow)


def test_what_an_earlier_life_had_begun_is_given_up_when_an_operator_joins(tmp_path: Path) -> None:
    first_life(tmp_path)

    def life() -> None:
        with changing(tmp_path, BEFORE, TABLES) as flow:
            flow.emit(1)
            flow.settle()

    assert is_killed_at("after-barrier:totals", life)
    edges, tables = {**BEFORE, "late": ("totals",), "source": ()}, {**TABLES, "last": "late", "own": "source"}
    with changing(tmp_path, edges, tables) as flow:
        assert flow.recovered.pending
        finishes(flow)
        assert [one.outcome for one in flow.run.checkpoints() if one.epoch == flow.recovered.pending[0].epoch] == [
            "aborted"
        ]


def test_what_was_staged_and_given_up_is_thrown_away_under_the_old_name(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    with changing(tmp_path, BEFORE, TABLES) as flow:
        flow.emit(1)
        flow.wait(lambda: flow.step("totals"))
        given_up = [entry.batch for entry in flow.operators[OperatorId("totals")].channel.data_entries()]
        cut = flow.recovered.manifests[0].operators[OperatorId("totals")].batch
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES) as flow:
        thrown_away = sorted(staged.batch for staged in flow.sinks["table"].aborted)
        assert thrown_away == [batch for batch in given_up if batch > cut]
        finishes(flow)


# ------------------------------------------------------------------------------------------------- over time


def test_what_is_left_of_old_operators_goes_with_the_last_checkpoint_that_has_them(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, retain_checkpoints=3, **CHANGES) as flow:
        folders = [flow.layout.channel(OperatorId(name)) for name in ("totals", "copy")]
        assert not (flow.layout.spark_dirs / "totals").exists()
        assert all(folder.exists() for folder in folders)
        for _ in range(3):
            flow.emit(1)
            flow.settle()
        flow.wait(lambda: epoch not in flow.checkpoints.epochs())
        flow.wait(lambda: not any(folder.exists() for folder in folders))
        assert flow.table("table") == counted(0, 6)
    whole_and_tidy(tmp_path)


def test_a_flow_goes_back_to_the_carried_checkpoint_itself_and_past_several_changes(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES) as flow:
        carried = flow.recovered.manifests[-1].epoch
        flow.emit(2)
        flow.settle()
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=carried) as flow:
        assert flow.table("table") == counted(0, 3)
        finishes(flow)
    third = {"numbers": (), "adds": ("numbers",)}
    with changing(
        tmp_path, third, {"table": "adds"}, restore_to=carried, rename={"sums": "adds"}, allow_dropped=True
    ) as flow:
        finishes(flow)
    whole_and_tidy(tmp_path)
    with changing(
        tmp_path, third, {"table": "adds"}, restore_to=epoch, rename={"totals": "adds"}, allow_dropped=True
    ) as flow:
        assert flow.table("table") == counted(0, 3)
        finishes(flow)
    with changing(tmp_path, BEFORE, TABLES, restore_to=epoch) as flow:
        finishes(flow)
        finishes(flow, "copies")
    whole_and_tidy(tmp_path)


def test_the_directory_of_a_renamed_operator_is_lost_and_comes_back_from_the_carried_checkpoint(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES) as flow:
        carried = flow.recovered.manifests[-1].epoch
        flow.emit(2)
        flow.wait(lambda: flow.step("sums"))
    shutil.rmtree(flow.spark("sums").root)
    with changing(tmp_path, AFTER, NEW_TABLES) as flow:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("regional", carried)
        finishes(flow)


def test_a_region_goes_back_while_the_changed_flow_runs(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES) as flow:
        flow.emit(2)
        flow.settle()
        service = flow.operators[OperatorId("sums")]
        flow.run._parts.regions.operator_failed(service, FlowFailedError("it fails", flow="changing", operator="sums"))
        flow.wait(lambda: flow.operators[OperatorId("sums")] is not service)
        flow.wait(lambda: not flow.run._parts.regions._lock.locked())
        finishes(flow)
    with changing(tmp_path, AFTER, NEW_TABLES) as flow:
        finishes(flow)


def test_segments_in_flight_are_the_same_files_under_both_names(tmp_path: Path) -> None:
    edges = {"numbers": (), "totals": ("numbers",)}
    with changing(tmp_path, edges, {"table": "totals"}) as flow:
        flow.emit(3)
        epoch = flow.checkpoint()
    renamed = {"digits": (), "totals": ("digits",)}
    with changing(tmp_path, renamed, {"table": "totals"}, restore_to=epoch, rename={"numbers": "digits"}) as flow:
        old, new = (data_dir(flow.layout.channel(OperatorId(name))) for name in ("numbers", "digits"))
        assert {path.stat().st_ino for path in new.iterdir()} == {path.stat().st_ino for path in old.iterdir()}
        flow.settle()
        assert flow.table("table") == counted(0, 3)


# ------------------------------------------------------------------------------------------------- remote tier


def remote(storage: Path) -> dict[str, Any]:
    return {"remote": str(storage / "bucket")}


def first_life_with_remote(storage: Path) -> int:
    with changing(storage, BEFORE, TABLES, **remote(storage)) as flow:
        flow.emit(3)
        epoch = flow.settle()
        assert flow.run.wait_remote(epoch)
        flow.emit(2)
        assert flow.run.wait_remote(flow.settle())
    return epoch


@pytest.mark.parametrize("point", [*REMOTELY, "carry-manifest", "restore-generation", None])
def test_the_host_is_lost_right_after_the_change(tmp_path: Path, point: str | None) -> None:
    epoch = first_life_with_remote(tmp_path)

    def life() -> None:
        with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES, **remote(tmp_path)) as flow:
            flow.emit(2)
            flow.run.wait_remote(flow.settle())

    if point is None:
        with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES, **remote(tmp_path)):
            pass
    else:
        assert is_killed_at(point, life)
    shutil.rmtree(tmp_path / "storage")
    if point in ("carry-manifest", "remote-carried"):
        with changing(tmp_path, BEFORE, TABLES, **remote(tmp_path)) as flow:
            assert flow.recovered.path == "remote"
            finishes(flow)
            finishes(flow, "copies")
        return
    with changing(tmp_path, AFTER, NEW_TABLES, **remote(tmp_path)) as flow:
        assert flow.recovered.path == "remote"
        finishes(flow)
        assert flow.run.wait_remote(flow.checkpoints.epochs()[-1])
    cli(tmp_path, "verify", "--deep")


def test_the_change_is_made_by_a_host_that_has_nothing_of_the_flow(tmp_path: Path) -> None:
    epoch = first_life_with_remote(tmp_path)
    shutil.rmtree(tmp_path / "storage")
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES, **remote(tmp_path)) as flow:
        assert flow.table("table") == counted(0, 3)
        finishes(flow)


# ------------------------------------------------------------------------------------------------- savepoints, commands


def test_a_savepoint_is_restored_with_other_operators_after_its_checkpoint_was_collected(tmp_path: Path) -> None:
    with changing(tmp_path, BEFORE, TABLES, retain_checkpoints=1) as flow:
        flow.emit(3)
        flow.settle()
        flow.run.savepoint("before", drain=False)
        for _ in range(3):
            flow.emit(1)
            flow.settle()
    code = tmp_path / "flow.py"
    code.write_text(
        "from cutline import Flow, sinks\n"
        "flow = Flow('changing')\n"
        "flow.operator('numbers')(print)\n"
        "flow.operator('sums', inputs=['numbers'])(print)\n"
        "flow.operator('late', inputs=['sums'])(print)\n"
        f"flow.sink('late', sinks.Parquet({str(tmp_path / 'x')!r}))\n"
    )
    said = cli(tmp_path, "restore", "--to", "before", "--rename", "totals=sums", "--dry-run")
    assert "renamed" in said
    assert "--code" in said
    assert not layout_of(tmp_path).restore_request.exists()
    refused = CliRunner().invoke(
        app,
        [
            "restore",
            "--to",
            "before",
            "--code",
            str(code),
            "--flow",
            "changing",
            "--storage",
            str(tmp_path / "storage"),
        ],
    )
    assert isinstance(refused.exception, RecoveryError)
    assert "copy, totals; new in the code: sums, late" in str(refused.exception)
    asked = ["restore", "--to", "before", "--rename", "totals=sums", "--allow-dropped", "--code", str(code)]
    plan = json.loads(cli(tmp_path, *asked, "--dry-run", "--json"))
    assert {(row["fate"], row["was"], row["now"]) for row in plan["operators"]} == {
        ("kept", "numbers", "numbers"),
        ("renamed", "totals", "sums"),
        ("dropped", "copy", None),
        ("added", None, "late"),
    }
    assert "restores epoch" in cli(tmp_path, *asked)
    with changing(tmp_path, AFTER, NEW_TABLES) as flow:
        assert flow.table("table") == counted(0, 3)
        finishes(flow)
    assert not layout_of(tmp_path).restore_request.exists()
    whole_and_tidy(tmp_path)
    # And the savepoint is as good as before: the old flow comes back from it.
    with changing(tmp_path, BEFORE, TABLES, restore_to="before") as flow:
        assert flow.table("table") == flow.table("copies") == counted(0, 3)
        finishes(flow)
