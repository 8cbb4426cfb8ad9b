"""The table of exit codes in docs/cli.md holds: every command, as a real process, ends with a code that it names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.cli.failures import ExitCode
from cutline.cli.main import app
from cutline.runtime.lock import FlowLock
from tests.support.command_line import CommandLine
from tests.support.sparkless import SparklessFlow
from tools.cli_reference import PAGE, command_names

#: A command of each kind that is done, that fails, and that is used wrongly, in this order: later ones may need earlier
#: ones. Commands that need Spark, or minutes, are done elsewhere.
DONE = (
    "status",
    "flows",
    "checkpoints",
    "pin 1",
    "unpin 1",
    "savepoint create good",
    "savepoint list",
    "savepoint show good",
    "savepoint export good place",
    "savepoint import place again",
    "savepoint delete again",
    "clone good second --into other",
    "verify",
    "gc --dry-run",
    "sinks",
    "restore --to good --dry-run",
    "version",
    "simulate --seeds 1 --workers 1",
)
FAILED = (
    "status nosuch",
    "flows --config nosuch.toml",
    "flows --storage nosuch",
    "checkpoints nosuch",
    "pin 99",
    "unpin 99",
    "savepoint create good",
    "savepoint list nosuch",
    "savepoint show nosuch",
    "savepoint export nosuch place",
    "savepoint import nosuch name",
    "savepoint delete nosuch",
    "clone nosuch second",
    "gc nosuch",
    "sinks nosuch",
    "restore --to nosuch",
    "stop",
    "run nosuch.py",
    "doctor --config nosuch.toml",
)
#: One of them cannot fail in this way: verify says 2 if it cannot check, version has nothing to fail at.
WRONG_USE = (
    *("status a b", "flows a", "checkpoints --nosuch", "pin", "unpin a b c", "savepoint create", "savepoint list a b"),
    *("savepoint show", "savepoint export", "savepoint import", "savepoint delete", "clone", "verify nosuch", "gc a b"),
    *("sinks a b", "restore a b", "stop a b", "run", "doctor a", "demo --rows no", "simulate --seeds no", "version a"),
    "nosuch",
    *(
        "restore",
        "restore --to 1 --at 02:00",
        "restore --at 25:00",
        "restore --to 1 --rename x",
        "restore --to 1 --run f",
    ),
    *("gc --grace soon", "pin one", "demo --interval soon", "demo --mode quick", "savepoint create 1 2 3"),
    *("run flow.py --conf foo", "run flow.py --conf =x", "run flow.py --conf foo=1", "run flow.py --set x"),
    *("run flow.py --set nosuch=1", "run flow.py --mode quick", "run flow.py --checkpoint-interval soon"),
    *("run flow.py --http nowhere", "run flow.py --http 99999999", "run flow.py --log-size x"),
    *("run flow.py --log-format xml", "run flow.py --rename x", "run flow.py flow.py --restore-to 1"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    flow = SparklessFlow(folder)
    flow.emit(2)
    flow.checkpoint()
    flow.stop()
    return folder


@pytest.fixture(scope="module")
def cli(home: Path) -> Iterator[CommandLine]:
    line = CommandLine(home)
    yield line
    line.close()


def documented() -> list[int]:
    section = PAGE.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    return [int(code) for code in rows[1:]]


def test_the_documentation_has_the_codes_that_there_are() -> None:
    assert documented() == [int(code) for code in ExitCode]


def test_every_command_ends_with_the_documented_code(cli: CommandLine) -> None:
    for commands, code in ((DONE, ExitCode.DONE), (FAILED, ExitCode.FAILED), (WRONG_USE, ExitCode.WRONG_USE)):
        for command in commands:
            told = cli.run(*command.split(), CUTLINE_STORAGE="storage")
            assert told.code == code, (command, told)


def test_a_wrong_line_is_refused_before_the_file_is_run_and_java_started(cli: CommandLine, home: Path) -> None:
    """The file would say so, and Java would not start."""
    (home / "flow.py").write_text("print('it runs')\nimport cutline\nflow = cutline.Flow('counting')\n")
    try:
        for command in [one for one in WRONG_USE if one.startswith("run flow.py")]:
            told = cli.run(*command.split(), CUTLINE_STORAGE="storage", JAVA_HOME="/none")
            assert told.code == ExitCode.WRONG_USE and "it runs" not in told.out, (command, told)
        for target in ("99", "nosuch"):
            told = cli.run("run", "flow.py", "--restore-to", target, CUTLINE_STORAGE="storage", JAVA_HOME="/none")
            assert told.code == ExitCode.FAILED, told
            assert target in told.err and "Next: " in told.err and "Java" not in told.err
        for target in ("99", "nosuch", "before-last-deploy"):  # the flow has never run
            told = cli.run("run", "flow.py", "--restore-to", target, CUTLINE_STORAGE="fresh", JAVA_HOME="/none")
            assert told.code == ExitCode.FAILED and "path=" not in told.err and "Java" not in told.err, told
        told = cli.run("run", "flow.py", CUTLINE_STORAGE="storage", CUTLINE_MODE="quick")
        assert told.code == ExitCode.FAILED and "CUTLINE_MODE" in told.err and "it runs" not in told.out
    finally:
        (home / "flow.py").unlink()


def test_java_that_does_not_start_is_no_bug(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "import cutline\n"
        "flow = cutline.Flow('javaless')\n"
        "@flow.operator()\n"
        "def rows(spark):\n"
        "    return spark.readStream.format('rate').load()\n"
        "flow.sink(rows, cutline.sinks.Parquet('out'))\n"
    )
    told = cli.run("run", "flow.py", folder=tmp_path, JAVA_HOME="/none", CUTLINE_STORAGE=str(tmp_path / "storage"))
    assert told.code == ExitCode.FAILED, told
    *steps, error = told.err.splitlines()
    assert all(line.startswith("starting: ") for line in steps), "no raw lines"
    assert error.startswith("error: Java cannot be started: /none/bin/java: No such file") and "cutline doctor" in error
    assert "/none/bin/java" in (tmp_path / "storage/javaless/traces/spark.log").read_text()


def test_completion_is_for_the_shell_that_runs_it(cli: CommandLine, tmp_path: Path) -> None:
    """Typer would ignore the word, and install."""
    for option in ("--install-completion", "--show-completion"):
        told = cli.run(option, "nosuchshell", HOME=str(tmp_path))
        assert told.code == ExitCode.WRONG_USE and f"{option} takes no argument" in told.err
    assert list(tmp_path.iterdir()) == []


def test_no_command_is_left_out() -> None:
    def named(commands: tuple[str, ...]) -> set[str]:
        return {name for name in command_names(app) if any(f"{one} ".startswith(f"{name} ") for one in commands)}

    everything = set(command_names(app))
    assert everything - named(DONE) == {"run", "stop", "doctor", "demo"}, "these need Spark, Java, or a running flow"
    assert everything - named(FAILED) == {"verify", "version", "simulate", "demo"}
    assert everything - named(WRONG_USE) == set()


def test_damage_and_bugs_have_codes_of_their_own(cli: CommandLine, home: Path, tmp_path: Path) -> None:
    (home / "bug.py").write_text(
        "from cutline import Flow\n"
        "class Odd(Flow):\n"
        "    def graph(self):\n"
        "        return {}['bug']\n"
        "flow = Odd('odd')\n"
    )
    assert cli.run("run", "bug.py", TMPDIR=str(tmp_path)).code == ExitCode.UNEXPECTED
    damaged = SparklessFlow(tmp_path)
    damaged.emit(2)
    damaged.checkpoint()
    damaged.stop()
    next(path for path in (tmp_path / "storage/counting/blobs").rglob("*") if path.is_file()).write_bytes(b"")
    assert cli.run("verify", "--storage", str(tmp_path / "storage")).code == ExitCode.FAILED


@pytest.mark.kill
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_a_signal_has_a_code_of_its_own(home: Path, number: signal.Signals, code: ExitCode) -> None:
    requests = home / "storage" / "counting" / "requests"
    lock = FlowLock(home / "storage" / "counting" / "lock", "counting")
    lock.acquire()  # it seems to run, and never answers
    try:
        command = subprocess.Popen(
            [sys.executable, "-m", "cutline.cli.main", "stop", "--storage", str(home / "storage")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        deadline = time.monotonic() + 60
        while not any(requests.glob("*.json")) and command.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        command.send_signal(number)
        assert command.wait(timeout=30) == code
        assert not any(requests.glob("*.json")), "the request is withdrawn"
    finally:
        lock.release()
