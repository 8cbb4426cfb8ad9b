"""Commands on a storage in which something is damaged or missing: what they need no more than others need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.cli.failures import ExitCode
from cutline.model.layout import Layout
from tests.support.command_line import CommandLine
from tests.support.running import running


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    line = CommandLine(tmp_path_factory.mktemp("damaged"))
    yield line
    line.close()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A stopped flow with three checkpoints."""
    with running(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
        flow.wait(flow.coordinator.is_settled)
        flow.wait(flow.layout.status.exists)
    return flow.layout


def test_a_restore_does_without_the_status(cli: CommandLine, layout: Layout) -> None:
    whole = layout.status.read_bytes()
    for content in (whole[:300], b"", b"\xff\xfe", b"[]"):
        layout.status.write_bytes(content)
        told = cli.run("restore", "--to", "2", "--dry-run", "--json", "--storage", str(layout.root.parent))
        assert told.code == ExitCode.DONE, told
        (note,) = [one for one in told.json["notes"] if "the status cannot be read" in one]
        assert "is left out" in note and "start" not in note
        assert told.json["sinks"][0]["fate"] == "rewind"
        flows = cli.run("flows", "--json", "--storage", str(layout.root.parent)).json["flows"]
        assert flows[0]["last_epoch"] == 3 and "the status cannot be read" in flows[0]["problems"][0]
    told = cli.run("status", "--storage", str(layout.root.parent))
    assert told.code == ExitCode.FAILED and "start the flow" not in told.err and "cutline checkpoints" in told.err
    assert cli.run("restore", "--to", "2", "--storage", str(layout.root.parent)).code == ExitCode.DONE
    assert layout.restore_request.exists()


def test_a_damaged_database_is_an_error_with_a_next_step(cli: CommandLine, layout: Layout) -> None:
    whole = layout.metadata.read_bytes()
    for content in (b"not a database" * 1000, whole[:4096] + b"\x55" * (len(whole) - 4096)):
        layout.metadata.write_bytes(content)
        for more in ((), ("--dry-run",)):
            told = cli.run("restore", "--to", "3", *more, "--storage", str(layout.root.parent))
            assert told.code == ExitCode.FAILED, told
            assert "the coordinator's database cannot be read" in told.err and "cutline verify" in told.err
        for command in ("pin 3", "sinks"):
            told = cli.run(*command.split(), "--storage", str(layout.root.parent))
            assert told.code == ExitCode.FAILED and "Next: see cutline verify counting" in told.err


def test_retention_of_a_stopped_flow_is_by_the_options_it_ran_with(cli: CommandLine, layout: Layout) -> None:
    where = ("--storage", str(layout.root.parent))

    def told(*more: str) -> dict[str, object]:
        found = cli.run("checkpoints", "--json", *more, *where, CUTLINE_RETAIN_CHECKPOINTS="2")
        return dict(found.json)

    for more in ((), ("--offline",)):
        assert told(*more)["epochs"][0]["limited_by"] == "the newest 5 stay"  # type: ignore[index]
    layout.restore_limits.unlink()
    found = told()
    assert found["epochs"][-1]["limited_by"] != "the newest 5 stay"  # type: ignore[index]
    assert any("with which options" in note for note in found["notes"])  # type: ignore[attr-defined]


def test_a_damaged_manifest_is_not_the_same_as_none(cli: CommandLine, layout: Layout) -> None:
    where = ("--storage", str(layout.root.parent))
    layout.manifest(2).write_bytes(b"{")  # type: ignore[arg-type]
    told = cli.run("checkpoints", "--json", *where)
    assert [one["epoch"] for one in told.json["epochs"]] == [1, 3] and told.json["damaged"] == [2]
    assert "the manifest of epoch 2 cannot be read: see cutline verify counting 2" in told.json["notes"]
    told = cli.run("restore", "--to", "2", *where)
    assert told.code == ExitCode.FAILED and "cutline verify counting 2; choose one of 1, 3" in told.err
    for epoch in (1, 3):
        layout.manifest(epoch).write_bytes(b"{")  # type: ignore[arg-type]
    told = cli.run("checkpoints", *where)
    assert "no complete checkpoint that can be read" in told.out and "cutline verify counting --all" in told.out
    for target in (("--to", "3"), ("--at", "0s ago")):
        told = cli.run("restore", *target, *where)
        assert told.code == ExitCode.FAILED and "none" not in told.err.partition("Next")[2]
        assert "cutline verify counting --all" in told.err


def test_a_folder_without_flow_json_is_told_from_no_flow(cli: CommandLine, layout: Layout) -> None:
    layout.identity.unlink()
    told = cli.run("checkpoints", "counting", "--storage", str(layout.root.parent))
    assert told.code == ExitCode.FAILED
    assert "has no flow.json" in told.err and "cutline verify counting" in told.err
    assert "there is no flow" not in told.err and "its flows are" not in told.err


def test_a_restore_reports_the_size_that_checkpoints_show(cli: CommandLine, layout: Layout) -> None:
    where = ("--storage", str(layout.root.parent))
    shown = {one["epoch"]: one["size_bytes"] for one in cli.run("checkpoints", "--json", *where).json["epochs"]}
    told = cli.run("restore", "--to", "3", "--dry-run", "--json", *where).json
    assert told["size_bytes"] == shown[3]
    text = cli.run("restore", "--to", "3", "--dry-run", *where).out
    assert "given up: all work since then; no later checkpoint is complete" in text
    header = next(line for line in text.splitlines() if "what happens" in line)
    assert header.index("operator") < header.index("now") < header.index("what happens")
    assert "numbers" in text.partition(header)[2].partition("│")[2].partition("│")[0]


def test_reading_leaves_no_folders_behind(cli: CommandLine, layout: Layout, tmp_path: Path) -> None:
    where = ("--storage", str(layout.root.parent))
    for place in (f"{tmp_path}/typo/deep", f"file://{tmp_path}/typo/deep"):
        told = cli.run("savepoint", "import", place, "name", *where)
        assert told.code == ExitCode.FAILED and "there is no savepoint at" in told.err and "Next: " in told.err
    for command in ("verify --remote", "gc --dry-run", "restore --to 2 --dry-run"):
        cli.run(*command.split(), *where, CUTLINE_REMOTE=f"file://{tmp_path}/typo")
    assert not (tmp_path / "typo").exists()


def test_messages_name_what_is_wrong(cli: CommandLine, layout: Layout, tmp_path: Path) -> None:
    where = ("--storage", str(layout.root.parent))
    told = cli.run("savepoint", "create", "12", *where)
    assert "a number is an epoch" in told.err and "digits" not in told.err
    assert "Next: nothing is left to stop" in cli.run("stop", *where).err
    (layout.root.parent / "second").mkdir()
    (layout.root.parent / "second" / "flow.json").write_text("{}")
    told = cli.run("verify", "3", *where)
    assert told.code == ExitCode.WRONG_USE
    assert "epoch 3 of which flow?" in told.err and "counting, second" in told.err and "verify FLOW 3" in told.err
    told = cli.run("flows", "--storage", str(tmp_path / "nosuch"))
    assert told.code == ExitCode.FAILED and "does not exist" in told.err
    assert json.loads(cli.run("flows", "--json", "--storage", str(tmp_path / "nosuch")).out)["next_step"]
