"""Every command ends within seconds when it is interrupted, whatever it waits for; a flow ends at a batch boundary."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cutline.cli.running.run import _follow
from cutline.errors import FlowFailedError, NotDone
from cutline.ports.metadata import MetadataStore
from cutline.runtime.process.flows import Flows
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_until_done_that_waits_for_a_slow_operator_is_interrupted(tmp_path: Path, number: int) -> None:
    flow = SparklessFlow(tmp_path)
    flow.step(NUMBERS)  # nothing reads it: the input is never processed
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    _follow(Flows.of(flow.run), None, "", until_done=True, as_json=False)
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_run_until_done_ends_with_the_error_that_ended_the_flow(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.step(NUMBERS)
    error = FlowFailedError("its disk is lost", flow="counting", operator=TOTALS)
    threading.Timer(0.3, flow.run._lifecycle.fail, (error,)).start()
    with pytest.raises(FlowFailedError, match="its disk is lost"):
        _follow(Flows.of(flow.run), None, "", until_done=True, as_json=False)


class _Away:
    """The coordinator's records, on a disk that fails."""

    def __init__(self, metadata: MetadataStore, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("history", "recoveries"):
            monkeypatch.setattr(metadata, name, self._fail)

    def _fail(self, *_: object) -> None:
        raise NotDone("the disk of the coordinator's records fails", store="coordinator.sqlite")


def test_a_run_whose_records_are_away_is_stopped_and_keeps_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = SparklessFlow(tmp_path)
    flow.emit(2)
    flow.drain()
    before = flow.run.status().history
    assert before
    _Away(flow.metadata, monkeypatch)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    _follow(Flows.of(flow.run), None, "", until_done=False, as_json=False)
    assert flow.run.await_termination(0)
    assert (flow.run.status().state, flow.run.status().history) == ("stopped", before)
    assert flow.run.checkpoints() == before


def test_a_flow_whose_records_are_lost_while_it_ends_still_has_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = SparklessFlow(tmp_path)

    def damaged(*_: object) -> None:
        raise RuntimeError("damaged")

    monkeypatch.setattr(flow.metadata, "history", damaged)
    flow.run.stop()
    monkeypatch.undo()
    assert flow.run.status().state == "stopped"


# ------------------------------------------------------------------------------------------- real processes

#: A request to a store that does not answer is given up after 5 s; everything else ends at once.
SECONDS = 12.0


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The storage of a flow that has run."""
    with running(tmp_path) as flow:
        flow.emit(2)
        flow.drain()
    return tmp_path / "storage"


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


def ended_by(
    number: int, command: list[str], is_waiting: Callable[[], bool], *, returns: int | None = None, **environment: str
) -> str:
    """Start the command, interrupt it when it waits; what it has said when it has ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cutline.cli.main", *command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not is_waiting():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        said = process.communicate(timeout=SECONDS)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in ((1, 130, 143) if returns is None else (returns,)), said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("command", "number"), [(["savepoint", "create", "s1"], signal.SIGTERM), (["stop"], signal.SIGINT)]
)
def test_a_request_to_a_flow_that_does_not_answer_is_withdrawn(stopped: Path, command: list[str], number: int) -> None:
    (stopped / "counting" / "lock").write_text(str(os.getpid()))  # this process runs the flow, and does not answer
    requests = stopped / "counting" / "requests"
    where = ["--flow", "counting", "--storage", str(stopped)]
    ended_by(number, [*command, *where], lambda: any(requests.glob("*.json")))
    assert list(requests.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "number"),
    [(["gc", "--remote", "s3://bucket/x"], signal.SIGTERM), (["verify", "--remote"], signal.SIGINT)],
)
def test_a_command_that_waits_for_a_silent_store_ends(
    stopped: Path, silent: socket.socket, command: list[str], number: int
) -> None:
    reached = threading.Event()

    def accept() -> None:
        connection, _ = silent.accept()
        with connection:
            reached.set()
            time.sleep(SECONDS)

    threading.Thread(target=accept, daemon=True).start()
    host, port = silent.getsockname()
    ended_by(
        number,
        [*command, "--flow", "counting", "--storage", str(stopped)],
        reached.is_set,
        CUTLINE_REMOTE="s3://bucket/x",
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ALLOW_HTTP="true",
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="nobody",
        AWS_SECRET_ACCESS_KEY="nothing",
    )


def test_a_start_that_waits_for_the_jvm_of_a_dead_process_ends(stopped: Path, tmp_path: Path) -> None:
    code = tmp_path / "flow.py"
    code.write_text(
        "import cutline\nflow = cutline.Flow('counting')\nflow.operator('numbers')(lambda spark: None)\n"
        "flow.sink('numbers', cutline.sinks.Parquet('out'), name='table')\n"
    )
    lock = stopped / "counting" / "lock"
    with subprocess.Popen(["sleep", "60"]) as jvm:
        started = Path(f"/proc/{jvm.pid}/stat").read_text().rpartition(")")[2].split()[19]
        lock.write_text(f"999999 {jvm.pid} {started}")
        try:
            ended_by(signal.SIGTERM, ["run", str(code), "--storage", str(stopped)], lambda: _is_locked(lock))
        finally:
            jvm.kill()
    assert not _is_locked(lock)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_interrupted_while_its_file_loads_does_not_blame_the_file(
    tmp_path: Path, number: int, code: int
) -> None:
    file = tmp_path / "flow.py"
    file.write_text(
        "import pathlib, sys, time\npathlib.Path(__file__).with_name('loading').touch()\n"
        "try:\n    time.sleep(30)\nexcept SystemExit:\n    raise ValueError('what a library makes of it')\n"
    )
    said = ended_by(number, ["run", str(file)], (tmp_path / "loading").exists, returns=code)
    assert "flow.py" not in said.partition("error")[2] and "what a library makes of it" not in said


HANGING = """
import sys, threading
from pathlib import Path
from cutline.cli.running.run import _follow
from cutline.cli.signals import end_on_signals
from cutline.runtime.process.flows import Flows
from tests.support.sparkless import SparklessFlow

flow = SparklessFlow(Path(sys.argv[1]))
flow.run.stop = lambda: (print("stopping", flush=True), threading.Event().wait())
flow.run.await_termination = lambda _: print("running", flush=True)
end_on_signals()
_follow(Flows.of(flow.run), None, "", until_done=False, as_json=False)
"""


def test_a_second_signal_ends_a_run_that_does_not_stop(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HANGING, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert any(line == "running\n" for line in run.stdout)
            run.send_signal(signal.SIGINT)
            run.send_signal(signal.SIGINT)  # by a wrapper that passes on what the terminal has sent to both
            assert any(line == "stopping\n" for line in run.stdout)
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(1.2)
            run.send_signal(signal.SIGTERM)
            assert run.wait(5) == 143
        finally:
            run.kill()


def _is_locked(path: Path) -> bool:
    with path.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
