"""Going back, and going on, with other operators than the checkpoint was taken with."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutline.errors import ConfigError, OtherHistoryError, RecoveryError
from cutline.model.ids import OperatorId
from cutline.storage.query_dir import LocalQueryDir
from tests.support.changes import AFTER, BEFORE, CHANGES, NEW_TABLES, TABLES, first_life
from tests.support.changing import ChangingFlow, changing, counted
from tests.support.killing import is_killed_at


def goes_on_right(flow: ChangingFlow, *, emitted: int = 4) -> None:
    flow.emit(emitted)
    flow.settle()
    assert flow.table("table") == counted(0, 3 + emitted)
    # It has seen what ``sums`` passed on after the checkpoint, and counts from nothing.
    assert [number for number, _ in flow.table("latest")] == list(range(3, 3 + emitted))
    assert [count for _, count in flow.table("latest")] == list(range(1, emitted + 1))


def test_one_renamed_one_dropped_one_added(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES) as flow:
        assert flow.recovered.restored_epoch == epoch
        assert flow.fates() == {"numbers": "kept", "sums": "renamed", "copy": "dropped", "late": "added"}
        assert flow.table("table") == counted(0, 3), "what was published since is taken back"
        goes_on_right(flow)
    with changing(tmp_path, AFTER, NEW_TABLES) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(2)
        flow.settle()
        assert flow.table("table") == counted(0, 9)


def test_what_was_in_flight_comes_through_a_renamed_channel(tmp_path: Path) -> None:
    edges = {"numbers": (), "totals": ("numbers",), "last": ("totals",)}
    with changing(tmp_path, edges, {"table": "last"}) as flow:
        flow.emit(3)
        flow.wait(lambda: flow.step("totals"))
        flow.emit(2)
        epoch = flow.checkpoint()
    renamed = {"digits": (), "sums": ("digits",), "last": ("sums",)}
    names = {"numbers": "digits", "totals": "sums"}
    with changing(tmp_path, renamed, {"table": "last"}, restore_to=epoch, rename=names) as flow:
        flow.emit(1)
        flow.settle()
        assert flow.table("table") == counted(0, 6)


def test_names_may_be_swapped(tmp_path: Path) -> None:
    edges = {"numbers": (), "one": ("numbers",), "two": ("numbers",)}
    with changing(tmp_path, edges, {"first": "one", "second": "two"}) as flow:
        flow.emit(2)
        flow.wait(lambda: flow.step("one"))
        flow.emit(1)
        epoch = flow.settle()
        flow.emit(1)
        flow.settle()
    names = {"one": "two", "two": "one"}
    tables = {"first": "two", "second": "one"}
    with changing(tmp_path, edges, tables, restore_to=epoch, rename=names) as flow:
        assert flow.fates() == {"numbers": "kept", "two": "renamed", "one": "renamed"}
        flow.emit(2)
        flow.settle()
        assert flow.table("first") == flow.table("second") == counted(0, 5)
        assert epoch in flow.checkpoints.epochs()
    # And back, as it was: what the old logs hold is still there, although others have had their names.
    with changing(tmp_path, edges, {"first": "one", "second": "two"}, restore_to=epoch) as flow:
        flow.emit(3)
        flow.settle()
        assert flow.table("first") == flow.table("second") == counted(0, 6)


@pytest.mark.parametrize(
    ("names", "again"),
    [({"one": "three"}, {}), ({"one": "three"}, {"one": "three"}), ({"one": "two", "two": "one"}, {})],
    ids=["renamed", "renamed and restored again", "swapped"],
)
def test_a_source_that_had_read_nothing_begins_again_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, str], again: dict[str, str]
) -> None:
    """Under whatever name: otherwise a source that begins at the latest position would skip input."""
    edges, tables = {"one": (), "two": ()}, {"first": "one", "second": "two"}
    with changing(tmp_path, edges, tables) as flow:
        epoch = flow.checkpoint()
        flow.emit(2)
        flow.settle()
        ran_in = {name: flow.spark(name).root for name in edges}
    begun: dict[str, Path] = {}

    def begin(_: LocalQueryDir, folder: Path, live_dir: Path) -> None:
        begun[folder.parent.name] = live_dir

    monkeypatch.setattr(LocalQueryDir, "begin_as_before", begin)
    renamed = {names.get(name, name): () for name in edges}
    moved = {sink: names.get(name, name) for sink, name in tables.items()}
    for rename in filter(None, (names, again)):
        with changing(tmp_path, renamed, moved, restore_to=epoch, rename=rename) as flow:
            assert begun == {names.get(name, name): folder for name, folder in ran_in.items()}
            ran_in = {name: flow.spark(names.get(name, name)).root for name in edges}


def test_the_old_code_goes_back_across_the_change(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES) as flow:
        goes_on_right(flow)
    tables = {"table": "totals", "copies": "copy"}
    with changing(tmp_path, BEFORE, tables, restore_to=epoch) as flow:
        assert flow.table("table") == flow.table("copies") == counted(0, 3)
        flow.emit(1)
        flow.settle()
        assert flow.table("table") == flow.table("copies") == counted(0, 4)
    with changing(tmp_path, BEFORE, tables) as flow:
        assert flow.recovered.path == "resume"


def test_the_change_is_made_again_after_it_was_taken_back(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    for _ in range(3):
        with changing(tmp_path, AFTER, {"table": "sums", "other": "late"}, restore_to=epoch, **CHANGES) as flow:
            assert flow.table("table") == counted(0, 3)
            assert flow.table("other") == []
            flow.emit(2)
            flow.settle()
            assert flow.table("table") == counted(0, 5)
            assert [count for _, count in flow.table("other")] == [1, 2]


def test_what_no_sink_had_published_is_published_under_the_new_name(tmp_path: Path) -> None:
    flow = ChangingFlow(tmp_path, BEFORE, TABLES)
    try:
        flow.emit(2)
        flow.settle()
        flow.sinks["table"].commit_failures = [OSError("away")] * 1000
        for expected in (2, 3):
            flow.emit(2)
            flow.read_all()
            flow.coordinator.request_checkpoint(None)
            flow.wait(partial(is_stored, flow, expected))
        epoch = flow.checkpoints.epochs()[-1]
    finally:
        flow.stop()
    assert flow.table("table") == counted(0, 2)
    with changing(tmp_path, AFTER, NEW_TABLES, restore_to=epoch, **CHANGES) as flow:
        flow.wait(flow.coordinator.is_settled)
        assert flow.table("table") == counted(0, 6)
        flow.emit(1)
        flow.settle()
        assert flow.table("table") == counted(0, 7)


def is_stored(flow: ChangingFlow, epoch: int) -> bool:
    return epoch in flow.checkpoints.epochs()


# ------------------------------------------------------------------------------------------------- joining


def test_an_operator_joins_a_flow_that_just_goes_on(tmp_path: Path) -> None:
    first_life(tmp_path)
    edges = {**BEFORE, "late": ("numbers",), "latest": ("late",)}
    with changing(tmp_path, edges, {**TABLES, "last": "latest"}) as flow:
        assert flow.recovered.path == "resume"
        assert flow.fates() == dict.fromkeys(BEFORE, "kept") | {"late": "added", "latest": "added"}
        flow.emit(2)
        flow.settle()
        assert flow.table("table") == counted(0, 7)
        assert flow.table("last") == counted(0, 7), "nothing had been let go of"
    with changing(tmp_path, edges, {**TABLES, "last": "latest"}) as flow:
        flow.emit(1)
        flow.settle()
        assert flow.table("last") == counted(0, 8)


def test_one_that_joins_reads_what_the_log_still_holds(tmp_path: Path) -> None:
    with changing(tmp_path, BEFORE, TABLES, retain_checkpoints=1) as flow:
        for _ in range(4):
            flow.emit(3)
            flow.settle()
        flow.wait(lambda: flow.operators[OperatorId("numbers")].channel.start > 0)
    edges = {**BEFORE, "late": ("numbers",), "source": ()}
    with changing(tmp_path, edges, {**TABLES, "last": "late", "own": "source"}, retain_checkpoints=1) as flow:
        start = flow.operators[OperatorId("numbers")].channel.start
        note = next(row.note for row in flow.run.status().recovery.operators if row.now == "late")
        assert f"numbers from entry {start} on" in note
        for _ in range(3):
            flow.emit(2)
            flow.settle()
        rows = flow.table("last")
        assert [count for _, count in rows] == list(range(1, len(rows) + 1))
        assert rows[-1][0] == 17
        assert flow.table("own") == [[number, 0] for number in range(6)], "a source begins at its own beginning"


def test_damaged_before_the_first_checkpoint_with_the_new_operator_the_flow_comes_back(
    tmp_path: Path,
) -> None:
    first_life(tmp_path)
    edges, tables = {**BEFORE, "late": ("numbers",)}, {**TABLES, "last": "late"}
    with changing(tmp_path, edges, tables) as flow:
        flow.emit(1)
        flow.wait(lambda: flow.step("late"))
    shutil.rmtree(flow.spark("numbers").root)
    with changing(tmp_path, edges, tables) as flow:
        assert flow.recovered.path == "local"
        assert flow.fates()["late"] == "added"
        flow.emit(2)
        flow.settle()
        assert flow.table("table") == counted(0, 7)
        assert flow.table("last") == counted(5, 7, seen=0), "it begins after the checkpoint"


# ------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("edges", "changes", "said"),
    [
        ({"numbers": (), "totals": ("numbers",)}, {}, r"epoch 1 holds operators .* no longer has: copy"),
        (AFTER, {"rename": {"totals": "sums"}}, "no longer has: copy; new in the code: late"),
        (AFTER, {"rename": {"total": "sums"}, "allow_dropped": True}, "epoch 1 has no operator 'total'"),
        (AFTER, {"rename": {"totals": "sum"}, "allow_dropped": True}, "the flow as written has no such operator"),
        (
            {"numbers": (), "sums": ("numbers",)},
            {"rename": {"totals": "sums", "copy": "sums"}},
            "copy and totals would both be 'sums'",
        ),
        (
            {"numbers": (), "totals": ("numbers",), "copy": ("totals",)},
            {},
            r"inputs of this operator have changed from \['numbers'\] to \['totals'\]",
        ),
        (
            {"digits": (), "totals": ("digits",), "copy": ("digits",)},
            {"allow_dropped": True},
            "numbers no longer exists, but this operator was reading it",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_changes(
    tmp_path: Path, edges: dict[str, tuple[str, ...]], changes: dict[str, object], said: str
) -> None:
    epoch = first_life(tmp_path)
    sinks = {f"of-{name}": name for name in edges}
    with pytest.raises(RecoveryError, match=said):
        ChangingFlow(tmp_path, edges, sinks, restore_to=epoch, **changes)  # type: ignore[arg-type]
    with changing(tmp_path, BEFORE, TABLES) as flow:
        assert flow.recovered.path == "resume"
        assert flow.table("table") == counted(0, 5)


def test_renames_need_a_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    first_life(tmp_path)
    with pytest.raises(ConfigError, match="only when a checkpoint or savepoint is restored"):
        ChangingFlow(tmp_path, AFTER, NEW_TABLES, **CHANGES)  # type: ignore[arg-type]
    with pytest.raises(RecoveryError, match=r"the last run holds operators .*: copy, totals; new in the code: sums"):
        ChangingFlow(tmp_path, AFTER, NEW_TABLES)


def test_a_sink_that_was_named_after_its_operator_keeps_its_name(tmp_path: Path) -> None:
    with changing(tmp_path, {"numbers": (), "totals": ("numbers",)}, {"totals-delta": "totals"}) as flow:
        flow.emit(2)
        epoch = flow.settle()
    edges, rename = {"numbers": (), "sums": ("numbers",)}, {"totals": "sums"}
    with pytest.raises(RecoveryError, match=r'name="totals-delta"'):
        ChangingFlow(tmp_path, edges, {"sums-delta": "sums"}, restore_to=epoch, rename=rename)
    with changing(tmp_path, edges, {"totals-delta": "sums"}, restore_to=epoch, rename=rename) as flow:
        flow.emit(1)
        flow.settle()
        assert flow.table("totals-delta") == counted(0, 3)


def test_a_name_comes_back_only_with_its_state(tmp_path: Path) -> None:
    epoch = first_life(tmp_path)
    without = {"numbers": (), "totals": ("numbers",)}
    with changing(tmp_path, without, {"table": "totals"}, restore_to=epoch, allow_dropped=True) as flow:
        flow.emit(1)
        flow.settle()
    with pytest.raises(RecoveryError, match="there was an operator of this name before, and epoch 1"):
        ChangingFlow(tmp_path, BEFORE, {"table": "totals", "more": "copy"})


def test_nobody_joins_in_per_operator_mode(tmp_path: Path) -> None:
    with changing(tmp_path, BEFORE, TABLES, mode="per-operator") as flow:
        flow.emit(1)
    with pytest.raises(RecoveryError, match="in per-operator mode no operator can join"):
        ChangingFlow(tmp_path, {**BEFORE, "late": ("numbers",)}, {**TABLES, "x": "late"}, mode="per-operator")


# ---------------------------------------------------------------------- several storages


def test_a_host_that_is_lost_right_after_an_operator_with_a_sink_has_joined(tmp_path: Path) -> None:
    remote: dict[str, Any] = {"remote": str(tmp_path / "bucket"), "replicate_interval": "1h"}
    one, table = {"numbers": (), "totals": ("numbers",)}, {"table": "totals"}
    two, tables = {**one, "late": ("totals",)}, {**table, "latest": "late"}
    with changing(tmp_path, one, table, **remote) as flow:
        flow.emit(3)
        assert flow.run.wait_remote(flow.settle())
    with changing(tmp_path, two, tables, **remote) as flow:
        assert flow.recovered.path == "resume"
    shutil.rmtree(tmp_path / "storage")
    with changing(tmp_path, two, tables, **remote) as flow:
        flow.emit(2)
        flow.settle()
        assert flow.table("table") == counted(0, 5)


def test_a_copy_shares_only_what_an_evolution_was_made_from(tmp_path: Path) -> None:
    """The start that changes the operators is killed before it claims the sinks; the next one claims them."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    with changing(a, BEFORE, TABLES, retain_checkpoints=9) as flow:
        flow.emit(3)
        first = flow.settle()
        flow.emit(4)
        flow.settle()
    b.mkdir()
    for path in a.iterdir():
        if path.name == "storage":
            shutil.copytree(path, b / path.name)
        else:
            (b / path.name).symlink_to(path)
    changes: dict[str, Any] = {"restore_to": first, "retain_checkpoints": 9, **CHANGES}
    assert is_killed_at("restore-generation", lambda: ChangingFlow(a, AFTER, NEW_TABLES, **changes))
    with changing(a, AFTER, NEW_TABLES, retain_checkpoints=9) as flow:
        flow.emit(1)
        flow.settle()
    with pytest.raises(OtherHistoryError) as caught:
        ChangingFlow(b, BEFORE, TABLES, retain_checkpoints=9).stop()
    assert caught.value.restorable == first
    with changing(b, BEFORE, TABLES, retain_checkpoints=9, restore_to=first) as flow:
        flow.emit(1)
        flow.settle()
        rows = flow.table("table")
        assert rows == counted(0, len(rows))
