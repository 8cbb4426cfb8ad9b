"""``cutline run`` in a terminal: what it shows, where Spark's output goes, and how Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kill]

FLOW = """
from cutline import Flow, sinks
flow = Flow("made")

@flow.operator()
def payments(spark):
    return spark.readStream.format("cutline_generator").options(seed=7, keys=50, rows_per_second=100).load()

flow.sink(payments, sinks.Parquet("out"))
"""
#: A file that is still being read when Ctrl-C is pressed, and one that makes the signal an error of its own.
SLOW_FILE = "import time\ntime.sleep(60)\n" + FLOW
STUBBORN_FILE = "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n" + FLOW
#: A JVM that never answers.
STUCK_JAVA = "#!/bin/sh\nexec sleep 60\n"
#: On a machine that does much else.
SLACK_SECONDS = 2.0
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """A command whose standard error is a terminal; what it shows is collected."""

    def __init__(self, folder: Path, *, flow: str = FLOW, columns: int = 80, **environment: str) -> None:
        (folder / "flow.py").write_text(flow)
        screen, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._screen = screen
        self.shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cutline", "run", "flow.py", "--storage", "storage"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=end,
            stderr=end,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", **environment},
        )
        os.close(end)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self._screen, 65536):
                self.shown += data

    def wait_for(self, text: bytes, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert self.process.poll() is None and time.monotonic() < deadline, self.shown.decode(errors="replace")
            time.sleep(0.02)

    def press_ctrl_c(self) -> float:
        """As the terminal sends it: to all processes of the command. How long the command took to end."""
        begun = time.monotonic()
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(30)
        took = time.monotonic() - begun
        self._reader.join(1)  # a launcher of Java may still be there for a moment
        return took

    def lines(self) -> list[str]:
        """All lines that were ever shown."""
        return (
            re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown.decode(errors="replace")).replace("\r", "\n").split("\n")
        )

    def jvm(self) -> int | None:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in " ".join(path.read_text() for path in children).split():
            with contextlib.suppress(FileNotFoundError):
                if b"org.apache.spark.deploy.SparkSubmit" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # also what an ended command has left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        os.close(self._screen)


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(**options: str | int) -> Terminal:
        opened.append(Terminal(tmp_path, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for one in opened:
        one.end()


def is_running(pid: int) -> bool:
    """Not so if only its parent has yet to notice its end."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_interrupted(terminal: Terminal, took_seconds: float) -> None:
    shown = "\n".join(terminal.lines())
    assert terminal.process.returncode == 130, shown
    assert took_seconds < 1.0 + SLACK_SECONDS
    assert "error: interrupted" in shown and "Traceback" not in shown
    assert terminal.shown.rfind(SHOW_CURSOR) > terminal.shown.rfind(HIDE_CURSOR) or HIDE_CURSOR not in terminal.shown


# ---------------------------------------------------------------------- without Spark


def test_ctrl_c_ends_it_while_python_imports(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    deadline = time.monotonic() + 30
    while b"-m\0cutline" not in Path(f"/proc/{terminal.process.pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
    time.sleep(0.25)  # Python itself is up by then, most likely; before that the shell reports the signal
    took = terminal.press_ctrl_c()
    assert took < 1.0 + SLACK_SECONDS
    assert terminal.process.returncode in (130, -signal.SIGINT, 1)


@pytest.mark.parametrize("flow", [SLOW_FILE, STUBBORN_FILE], ids=["slow", "stubborn"])
def test_ctrl_c_ends_it_while_the_file_of_the_flow_is_read(open_terminal: Callable[..., Terminal], flow: str) -> None:
    terminal = open_terminal(flow=flow)
    terminal.wait_for(b"flow.py")
    time.sleep(0.5)
    check_interrupted(terminal, terminal.press_ctrl_c())


def test_ctrl_c_ends_it_while_java_starts(open_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(STUCK_JAVA)
    java.chmod(0o755)
    terminal = open_terminal(JAVA_HOME=str(tmp_path / "java"))
    terminal.wait_for(b"run.log")
    deadline = time.monotonic() + 60
    while (jvm := terminal.jvm()) is None:
        assert time.monotonic() < deadline, terminal.shown.decode(errors="replace")
        time.sleep(0.02)
    check_interrupted(terminal, terminal.press_ctrl_c())
    assert not is_running(jvm)
    lines = terminal.lines()
    assert any("✓ flow" in line and "flow.py" in line for line in lines)
    assert any(line.endswith("queries") for line in map(str.rstrip, lines)), "what is still to come is shown too"
    assert max(map(len, lines)) <= 80


# ---------------------------------------------------------------------- on Spark


@pytest.mark.spark
def test_spark_writes_to_the_log_and_not_between_the_lines_of_the_view(
    open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = open_terminal()
    for step in (b"Java", b"Spark", b"recovery", b"queries", b"payments", b"completed", b"next in"):
        terminal.wait_for(step)
    jvm = terminal.jvm()
    assert jvm is not None
    os.kill(jvm, signal.SIGKILL)
    assert terminal.process.wait(60) == 1
    terminal._reader.join(10)
    shown = terminal.shown.decode(errors="replace")
    assert "JVM" in shown
    assert [word for word in ("Traceback", "py4j", "WARN ", "log4j") if word in shown] == [], shown[-4000:]
    (ending,) = (number for number, line in enumerate(terminal.lines()) if line.startswith("error: "))
    assert max(map(len, terminal.lines()[:ending])) <= 80  # the view; the terminal wraps the error that ends it
    log = (tmp_path / "storage" / "made" / "traces" / "run.log").read_text()
    assert "log4j" in log and "flow_failed" in log
    assert "log: " in shown


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.parametrize("moment", ["Spark", "recovery", "queries", "first batch", "next in"])
def test_ctrl_c_ends_it_soon_at_any_moment(open_terminal: Callable[..., Terminal], moment: str) -> None:
    terminal = open_terminal()
    terminal.wait_for(moment.encode())
    if moment in ("Spark", "recovery", "queries"):  # the names of all steps are shown from the beginning
        deadline = time.monotonic() + 90
        while not any(re.search(rf"{moment} +\d", line) for line in terminal.lines()):
            assert time.monotonic() < deadline and terminal.process.poll() is None
            time.sleep(0.02)
    took = terminal.press_ctrl_c()
    assert took < 1.0 + SLACK_SECONDS
    assert terminal.process.returncode in (130, 0), terminal.shown.decode(errors="replace")
    assert b"Traceback" not in terminal.shown
