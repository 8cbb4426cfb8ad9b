"""What a shell offers after Tab: commands, flows, epochs, savepoints; as the shells ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.sparkless import SparklessFlow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    flow = SparklessFlow(folder, retain_checkpoints=20)
    for _ in range(2):
        flow.emit(1)
        flow.checkpoint()
    flow.run.savepoint("before-deploy", drain=False)
    flow.stop()
    (folder / "two" / "bank").mkdir(parents=True)
    (folder / "two" / "bank" / "flow.json").touch()
    (folder / "two" / "shop").mkdir()
    (folder / "two" / "shop" / "flow.json").touch()
    return folder


@pytest.fixture(scope="module")
def cli(home: Path) -> Iterator[CommandLine]:
    line = CommandLine(home)
    yield line
    line.close()


def offered(cli: CommandLine, line: str, storage: str = "storage") -> list[str]:
    """As bash asks: all words, and the number of the one under the cursor."""
    words = f"cutline {line}"
    told = cli.run(
        CUTLINE_STORAGE=storage,
        _CUTLINE_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split(" ")) - 1),
    )
    assert not told.err, told.err
    return told.out.split()


def test_commands(cli: CommandLine) -> None:
    assert offered(cli, "check") == ["checkpoints"]
    assert offered(cli, "s") == ["stop", "status", "savepoint", "sinks", "simulate"]
    assert offered(cli, "savepoint cr") == ["create"]


def test_flows(cli: CommandLine) -> None:
    assert offered(cli, "checkpoints ") == ["counting"]
    assert offered(cli, "status ", "two") == ["bank", "shop"]
    assert offered(cli, "status s", "two") == ["shop"]
    assert offered(cli, "status ", "nosuch") == []
    assert offered(cli, "pin sh", "two") == ["shop"]


def test_epochs(cli: CommandLine) -> None:
    assert offered(cli, "pin counting ") == ["3", "2", "1"]
    assert offered(cli, "pin ") == ["counting", "3", "2", "1"], "the only flow may be left out"
    assert offered(cli, "verify counting ")[:2] == ["before-deploy", "3"]


def test_savepoints(cli: CommandLine) -> None:
    assert offered(cli, "savepoint show counting b") == ["before-deploy"]
    assert offered(cli, "savepoint delete b") == ["before-deploy"]
    assert offered(cli, "restore --to be") == ["before-deploy"]
    assert offered(cli, "clone b") == ["before-deploy"]


def test_what_is_wrong_is_not_told_in_the_middle_of_a_line(cli: CommandLine, home: Path) -> None:
    (home / "bad").mkdir(exist_ok=True)
    (home / "bad" / "cutline.toml").write_text("nosuch = 1\n")
    told = cli.run(
        folder=home / "bad",
        _CUTLINE_COMPLETE="complete_bash",
        COMP_WORDS="cutline status ",
        COMP_CWORD="2",
    )
    assert (told.out.strip(), told.err) == ("", "")
