"""Every command with hostile arguments, as real processes: short errors, known exit codes, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.cli.failures import ExitCode
from cutline.runtime.lock import FlowLock
from tests.support.command_line import CommandLine, Told
from tests.support.sparkless import SparklessFlow

MARKUP = ("[red]", "[/]", "[delta]", "[link=x]y[/link]")
#: What a person may write in the place of a name, a number, a file.
HOSTILE = ("nosuch", "../x", "", "[/]", b"\xff\xfe", "²", "9" * 5000, "a\x1b[31mb")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the storage of a stopped flow in it, a file, and an empty folder."""
    folder = tmp_path_factory.mktemp("hostile")
    flow = SparklessFlow(folder)
    flow.emit(2)
    flow.checkpoint()
    flow.stop()
    (folder / "file").write_text("a file")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def cli(home: Path) -> Iterator[CommandLine]:
    line = CommandLine(home)
    yield line
    line.close()


def check_short(told: Told, *, codes: tuple[int, ...] = (ExitCode.FAILED, ExitCode.WRONG_USE)) -> None:
    assert not told.has_traceback, told.err
    assert told.code in codes, told
    assert told.out == "", told
    # Before it fails, a run names what it starts.
    lines = [line for line in told.err.splitlines() if not line.startswith("starting: ")]
    assert 1 <= len(lines) <= 3, told.err
    assert lines[0].startswith("error: ")
    assert len("\n".join(lines)) < 5_000
    assert "\x1b" not in told.err


#: Commands that have one hostile value; "?" stands for it.
COMMANDS = (
    "status ? --storage storage",
    "status counting --storage ?",
    "verify ? --flow counting --storage storage",
    "verify --flow ? --storage storage",
    "verify --flow counting --storage storage --config ?",
    "restore --flow counting --storage storage --dry-run --to ?",
    "restore --flow counting --storage storage --dry-run --at ?",
    "restore --flow counting --storage storage --dry-run --to 1 --rename ?",
    "restore --flow counting --storage storage --dry-run --to 1 --code ?",
    "gc --flow counting --storage storage --dry-run --grace ?",
    "sinks --flow counting --storage storage --accept ?",
    "savepoint create ? --flow counting --storage storage",
    "savepoint show ? --flow counting --storage storage",
    "savepoint delete ? --flow counting --storage storage",
    "savepoint export ? place --flow counting --storage storage",
    "savepoint import empty ? --flow counting --storage storage",
    "clone nosuch ? --flow counting --storage storage",
    "stop --flow ? --storage storage",
    "checkpoints ? --storage storage",
    "checkpoints --storage ?",
    "checkpoints --storage storage --config ?",
    "pin ? --storage storage",
    "pin counting ? --storage storage",
    "unpin ? --storage storage",
    "flows --config ?",
    "run ?",
    "demo --interval ?",
    "demo --rows ?",
    "simulate --seeds ?",
)
#: What is allowed after all, in this command.
ALLOWED = {
    ("status counting --storage ?", ""),  # not set
    ("verify --flow counting --storage storage --config ?", ""),
    ("savepoint create ? --flow counting --storage storage", "nosuch"),
    ("checkpoints --storage storage --config ?", ""),
    ("flows --config ?", ""),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_value_gives_a_short_error(cli: CommandLine, command: str) -> None:
    for value in HOSTILE:
        if (command, value) not in ALLOWED:
            told = cli.run(*(value if word == "?" else word for word in command.split()))
            check_short(told)


@pytest.mark.parametrize("storage", ["nosuch", "file", "file/below", "empty", "[/]", "storage/counting/flow.json"])
def test_a_storage_that_is_none_gives_a_short_error(cli: CommandLine, storage: str) -> None:
    for command in ("status counting", "verify --flow counting", "gc --flow counting", "sinks --flow counting"):
        check_short(cli.run(*command.split(), "--storage", storage))
    for command in ("stop", "savepoint list", "restore --to 1", "savepoint show x", "clone x y"):
        check_short(cli.run(*command.split(), "--flow", "counting", "--storage", storage))


@pytest.mark.parametrize(
    "command",
    [
        "status nosuch --storage storage",
        "verify 99 --flow nosuch --storage storage",
        "gc --flow nosuch --storage storage",
        "sinks --flow nosuch --storage storage",
        "restore --flow counting --to 999 --storage storage",
        "stop --flow counting --storage storage",
        "savepoint show nosuch --flow counting --storage storage",
        "savepoint list --flow counting --storage file",
        "clone nosuch other --flow counting --storage storage",
        "run nosuch.py",
        "demo --interval soon",
        "simulate --seeds many",
        "status --nosuch",
        "nosuch",
    ],
)
def test_with_json_a_failed_command_prints_one_object(cli: CommandLine, command: str) -> None:
    told = cli.run(*command.split(), "--json")
    assert told.code in (ExitCode.FAILED, ExitCode.WRONG_USE)
    assert {"error", "where", "next_step"} <= set(told.json)
    assert told.json["error"] and told.json["next_step"] and isinstance(told.json["where"], dict)
    assert told.out.count("\n") == 1 and told.err == ""


@pytest.mark.parametrize("name", MARKUP)
def test_brackets_in_names_and_messages_are_printed_as_they_are(cli: CommandLine, home: Path, name: str) -> None:
    told = cli.run("status", "counting", "--storage", name)
    assert (
        told.err
        == f"error: there is no flow 'counting' in {name} (flow=counting). Next: check --storage and the name\n"
    )
    assert name in cli.run("savepoint", "show", name, "--flow", "counting", "--storage", "storage").err
    flow_file = home / "brackets.py"
    flow_file.write_text(f"raise ValueError({name!r})")
    assert f"ValueError: {name} (brackets.py, line 1)" in cli.run("run", "brackets.py").err
    assert name in cli.run(name).err


def test_the_advice_to_install_a_package_is_whole(cli: CommandLine, home: Path) -> None:
    (home / "advice.py").write_text(
        "from cutline.errors import ConfigError\n"
        "raise ConfigError('the Delta sink needs the package deltalake', next_step='pip install cutline[delta]')\n"
    )
    told = cli.run("run", "advice.py")
    assert "pip install cutline[delta]" in told.err and "at=advice.py, line 2" in told.err
    check_short(told)


def test_notes_and_places_with_brackets_are_printed_as_they_are(cli: CommandLine, home: Path) -> None:
    """In tables, and on a terminal beside the spinner."""
    where = ("--flow", "counting", "--storage", "storage")
    note = "[red]why[/] [delta] \x1b[31m"
    assert cli.run("savepoint", "create", "noted", "--note", note, *where, COLUMNS="200").code == 0
    for command in ("list", "show noted"):
        told = cli.run("savepoint", *command.split(), *where, COLUMNS="200")
        assert "[red]why[/] [delta] ?[31m" in told.out
    told = cli.run("savepoint", "export", "noted", "place[/red]", *where)
    assert "place[/red]" in told.out and (home / "place[/red]").is_dir()
    told = cli.run("savepoint", "import", "place[/red]", "again", *where, COLUMNS="200")
    assert told.code == 0, told.err
    assert cli.run("savepoint", "delete", "again", *where).code == 0


def test_what_is_unexpected_is_reported_with_the_file_that_holds_its_trace(
    cli: CommandLine, home: Path, tmp_path: Path
) -> None:
    """A bug: here one in a class that the flow's file defines, found only when the class is used."""
    (home / "bug.py").write_text(
        "from cutline import Flow\n"
        "class Odd(Flow):\n"
        "    def graph(self):\n"
        "        return {}['a bug [/]']\n"
        "flow = Odd('odd')\n"
    )
    told = cli.run("run", "bug.py", TMPDIR=str(tmp_path))
    check_short(told, codes=(ExitCode.UNEXPECTED,))
    assert "unexpected error: KeyError: 'a bug [/]' (bug.py, line 4, in graph)" in told.err
    (trace,) = (tmp_path / "cutline-traces").iterdir()
    assert str(trace) in told.err and "Traceback" in trace.read_text()
    told = cli.run("run", "bug.py", "--json", TMPDIR=str(tmp_path))
    assert told.code == ExitCode.UNEXPECTED and told.json["where"] == {"trace": str(trace)}


FLOW_FILES = {
    "import nosuch_package": "ModuleNotFoundError: No module named 'nosuch_package' (flow.py, line 3)",
    "from json import nosuch": "ImportError: cannot import name 'nosuch' from 'json'",
    "def broken(:": "SyntaxError: invalid syntax (flow.py, line 3)",
    "  x = 1": "IndentationError: unexpected indent (flow.py, line 3)",
    "1 / 0": "ZeroDivisionError: division by zero (flow.py, line 3)",
    "import sys; sys.exit(7)": "SystemExit: 7 (flow.py, line 3)",
    "x = '\udcff'": "flow.py",
    "x = 5": "flow.py defines no flow",
    "a, b = Flow('a'), Flow('b')": "flow.py defines these flows: a, b",
    "Flow('bad name')": "at=flow.py, line 3",
    "Flow('f').operator(subtasks='four')": "subtasks='four' is not a whole number (flow=f, at=flow.py, line 3)",
    "def f(): f()\nf()": "RecursionError: maximum recursion depth exceeded",
}


@pytest.mark.parametrize("line", FLOW_FILES)
def test_a_flow_file_that_cannot_be_used_is_named_with_its_line(cli: CommandLine, tmp_path: Path, line: str) -> None:
    text = f"from cutline import Flow\n\n{line}\n"
    (tmp_path / "flow.py").write_bytes(text.encode(errors="surrogateescape"))
    told = cli.run("run", "flow.py", folder=tmp_path, TMPDIR=str(tmp_path))
    check_short(told, codes=(ExitCode.FAILED,))
    assert FLOW_FILES[line] in told.err


def test_a_folder_or_a_missing_file_is_no_flow_file(cli: CommandLine, tmp_path: Path) -> None:
    check_short(cli.run("run", str(tmp_path)), codes=(ExitCode.FAILED,))
    assert "there is no file" in cli.run("run", "nosuch.py", folder=tmp_path).err


SETTINGS = {
    b"checkpoint_interval = 10s": "line 3, column",
    b"storage = ": "line 3, column",
    b"colour = 'red'": "unknown option 'colour' (path=cutline.toml, line=3)",
    b"mode = 'odd'": "mode: 'odd' is not known (path=cutline.toml, line=3)",
    b"restart_limit = [1]": "restart_limit: [1] is not a whole number (path=cutline.toml, line=3)",
    b"[operators.totals]\nmode = 'aligned'\ncolour = 'red'": "unknown option 'colour' (path=cutline.toml, line=5)",
    b"[operators]\ntotals = 5": "cutline.toml, line=",
    b"# gr\xfc\xdfe": "cutline.toml is not UTF-8 (path=cutline.toml, line=3)",
    b"checkpoint_interval = '" + b"9" * 400 + b"s'": "is too long (path=cutline.toml, line=3)",
    b"max_batch_bytes = '" + b"9" * 5000 + b"'": "is too large (path=cutline.toml, line=3)",
    b"mode = ['aligned']": "is not known (path=cutline.toml, line=3)",
}


@pytest.mark.parametrize("line", SETTINGS)
def test_a_configuration_that_cannot_be_used_is_named_with_its_line(
    cli: CommandLine, tmp_path: Path, line: bytes
) -> None:
    (tmp_path / "cutline.toml").write_bytes(b"# settings\n\n" + line + b"\n")
    told = cli.run("status", "counting", folder=tmp_path)
    check_short(told, codes=(ExitCode.FAILED,))
    assert SETTINGS[line] in told.err


def test_a_configuration_that_is_a_folder_or_missing_is_reported(cli: CommandLine, tmp_path: Path) -> None:
    told = cli.run("verify", "--flow", "counting", "--config", "nosuch.toml", folder=tmp_path)
    assert told.err == "error: nosuch.toml does not exist (path=nosuch.toml). Next: check the path\n"
    (tmp_path / "cutline.toml").mkdir()
    told = cli.run("status", "counting", folder=tmp_path)
    check_short(told, codes=(ExitCode.FAILED,))
    assert "cutline.toml is a folder" in told.err
    (tmp_path / "cutline.toml").rmdir()
    (tmp_path / "cutline.toml").symlink_to("nowhere.toml")
    check_short(cli.run("status", "counting", folder=tmp_path), codes=(ExitCode.FAILED,))


def test_a_wrong_setting_of_the_environment_names_its_variable(cli: CommandLine, tmp_path: Path) -> None:
    told = cli.run("status", "counting", folder=tmp_path, CUTLINE_MODE="odd")
    assert told.err.startswith("error: mode: 'odd' is not known (variable=CUTLINE_MODE).")


def test_files_that_the_user_may_not_use_are_named(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "cutline.toml").write_text("mode = 'aligned'")
    (tmp_path / "cutline.toml").chmod(0)
    told = cli.run("status", "counting", folder=tmp_path, without_capabilities=True)
    check_short(told, codes=(ExitCode.FAILED,))
    assert "may not use the file or folder (path=cutline.toml)" in told.err
    (tmp_path / "cutline.toml").unlink()
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "cutline-data").mkdir(mode=0o555)
    told = cli.run("run", "flow.py", folder=tmp_path, without_capabilities=True)
    check_short(told, codes=(ExitCode.FAILED,))
    assert f"may not use the file or folder (flow=tiny, path={tmp_path}/cutline-data/tiny)" in told.err
    (tmp_path / "flow.py").chmod(0)
    told = cli.run("run", "flow.py", folder=tmp_path, without_capabilities=True)
    check_short(told, codes=(ExitCode.WRONG_USE,))
    assert "'flow.py' is not readable" in told.err


FLOW = """
from cutline import Flow, sinks
flow = Flow("tiny")
@flow.operator()
def rows(spark):
    raise AssertionError("the storage is looked at before Spark is asked")
flow.sink(rows, sinks.Parquet("out"))
"""


def test_a_storage_that_is_a_file_is_refused_before_spark_starts(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "file").write_text("")
    told = cli.run("run", "flow.py", "--storage", "file", folder=tmp_path)
    check_short(told, codes=(ExitCode.FAILED,))
    assert f"a file is where a folder is needed (flow=tiny, path={tmp_path}/file/tiny)" in told.err
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "tiny").write_text("")
    told = cli.run("run", "flow.py", "--storage", "storage", "--json", folder=tmp_path)
    assert told.json["error"] == "a file is where a folder is needed"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k,nr_inodes=64", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Create files until no more fits."""
    with pytest.raises(OSError, match="No space"):
        [(folder / f"file{number}").write_bytes(b"x" * 4096) for number in range(1_000)]
    with pytest.raises(OSError, match="No space"):
        [(folder / f"empty{number}").write_bytes(b"") for number in range(1_000)]


def test_a_start_on_a_read_only_file_system_is_refused(cli: CommandLine, tmp_path: Path, mounted: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    told = cli.run("run", "flow.py", "--storage", str(mounted), folder=tmp_path)
    check_short(told, codes=(ExitCode.FAILED,))
    assert f"the file system is read-only (flow=tiny, path={mounted}/tiny)" in told.err


def test_commands_on_a_full_or_read_only_file_system_say_so(cli: CommandLine, tmp_path: Path, mounted: Path) -> None:
    flow = SparklessFlow(tmp_path / "flow")
    flow.emit(1)
    flow.checkpoint()
    flow.stop()
    where = ("--flow", "counting", "--storage", str(tmp_path / "flow" / "storage"))
    assert cli.run("savepoint", "create", "first", *where).code == 0
    fill(mounted)
    told = cli.run("clone", "first", "second", *where, "--into", str(mounted))
    check_short(told, codes=(ExitCode.FAILED,))
    assert "the file system is full" in told.err and "make room" in told.err
    told = cli.run("savepoint", "export", "first", str(mounted / "export"), *where)
    check_short(told, codes=(ExitCode.FAILED,))
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    told = cli.run("savepoint", "export", "first", str(mounted / "export"), *where)
    check_short(told, codes=(ExitCode.FAILED,))
    assert "Read-only" in told.err and "Next: " in told.err
    told = cli.run("clone", "first", "second", *where, "--into", str(mounted), "--json")
    assert told.json["error"] == "the file system is read-only"


def test_a_start_on_a_full_file_system_is_refused(cli: CommandLine, tmp_path: Path, mounted: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    fill(mounted)
    told = cli.run("run", "flow.py", "--storage", str(mounted), folder=tmp_path)
    check_short(told, codes=(ExitCode.FAILED,))
    assert f"the file system is full (flow=tiny, path={mounted}/tiny)" in told.err


def test_the_copy_of_a_running_flow_answers_immediately(cli: CommandLine, home: Path, tmp_path: Path) -> None:
    """Its lock file names the process of the original, which does not hear the copy's requests."""
    original = tmp_path / "original"
    shutil.copytree(home / "storage", original, copy_function=shutil.copyfile)
    lock = FlowLock(original / "counting" / "lock", "counting")
    lock.acquire()
    try:
        shutil.copytree(original, tmp_path / "copy")
        where = ("--flow", "counting", "--storage", str(tmp_path / "copy"))
        told = cli.run("stop", *where)
        check_short(told, codes=(ExitCode.FAILED,))
        assert "the flow does not run" in told.err
        told = cli.run("savepoint", "create", "x", *where)
        check_short(told, codes=(ExitCode.FAILED,))
        assert f"pid {os.getpid()}" in told.err and f"in {original}/counting" in told.err
        assert "end that process" not in told.err
    finally:
        lock.release()


def test_a_start_of_the_copy_of_a_running_flow_is_refused_before_spark_starts(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    original = tmp_path / "original" / "tiny"
    original.mkdir(parents=True)
    lock = FlowLock(original / "lock", "tiny")
    lock.acquire()
    lock.note_jvm(os.getppid())  # alive, as the JVM of a healthy flow is
    try:
        shutil.copytree(tmp_path / "original", tmp_path / "copy")
        told = cli.run("run", "flow.py", "--storage", "copy", folder=tmp_path)
        check_short(told, codes=(ExitCode.FAILED,))
        assert f"a copy of a storage that is in use: pid {os.getpid()}" in told.err and str(original) in told.err
        told = cli.run("run", "flow.py", "--storage", "original", folder=tmp_path)
        assert f"another process runs this flow (pid {os.getpid()})" in told.err
    finally:
        lock.release()


def test_json_is_found_among_arguments_only(cli: CommandLine) -> None:
    told = cli.run("status", "--", "--json")
    assert told.out == "" and told.err.startswith("error: ")
    assert json.loads(cli.run("status", "--json", "nosuch").out)["error"]
