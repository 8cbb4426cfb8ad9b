"""``cutline restore``: its preview says what the start does, and ``--now`` may be killed anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cutline.base import records
from cutline.base.crashpoints import ENVIRONMENT_VARIABLE, RESTORE_NOW_POINTS
from cutline.cli.main import app
from cutline.cli.running.run import load_flow
from cutline.errors import ConfigError, LostInputError, RecoveryError, RequestFailedError
from cutline.fingerprint.definition import code_of
from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.model.restore_request import RestoreRequest
from cutline.runtime.lock import FlowLock
from cutline.storage.query_dir import LocalQueryDir
from cutline.storage.restore_requests import store_request
from tests.support.running import assert_each_once, drained, running
from tests.support.sparkless import NUMBERS, TOTALS, FolderSink, HandDrivenEngine, SparklessFlow

#: What only the running flow writes.
OF_THE_FLOW = ("status.json", "coordinator.sqlite", "coordinator.sqlite-wal", "coordinator.sqlite-shm", "requests")


def bad(df: Any) -> Any:
    return df.max()


@contextmanager
def up(storage: Path, kind: type[SparklessFlow] = SparklessFlow, **settings: Any) -> Iterator[SparklessFlow]:
    """A running flow that other processes see as running, until it is stopped."""
    flow = kind(storage, **settings)
    lock = FlowLock(flow.layout.lock, "counting")
    lock.acquire()

    def release() -> None:
        flow.run.await_termination()
        lock.release()

    waiting = threading.Thread(target=release, daemon=True)
    waiting.start()
    try:
        yield flow
    finally:
        flow.stop()
        waiting.join(20)


def take(flow: SparklessFlow, count: int, rows: int = 2) -> None:
    for _ in range(count):
        flow.emit(rows)
        flow.checkpoint()


def invoke(storage: Path, *words: str, zone: str = "UTC") -> Any:
    told = CliRunner().invoke(app, ["restore", *words, "--storage", str(storage / "storage")], env={"TZ": zone})
    if told.exception is not None and not isinstance(told.exception, SystemExit):
        raise told.exception
    return told


def previewed(storage: Path, *words: str, code: int = 0) -> dict[str, Any]:
    told = invoke(storage, *words, "--dry-run", "--json")
    assert told.exit_code == code, told.output
    return dict(json.loads(told.stdout))


def flow_rows(flow: SparklessFlow) -> int:
    """As the status shows them, which the flow writes now and then."""
    return int(json.loads(flow.layout.status.read_bytes())["operators"]["totals"]["rows"])


def content(storage: Path) -> dict[str, int]:
    files = {path: path.stat().st_mtime_ns for path in (storage / "storage").rglob("*")}
    return {str(path): at for path, at in files.items() if path.name not in OF_THE_FLOW}


def test_a_restore_is_previewed_while_the_flow_runs_and_nothing_changes(tmp_path: Path) -> None:
    with up(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 3)
        flow.emit(3)
        flow.wait(lambda: flow_rows(flow) == 9)
        before = content(tmp_path)
        told = previewed(tmp_path, "--to", "1")
        folder = str(flow.layout.root)
        after = content(tmp_path)
        assert {key: at for key, at in after.items() if key != folder} == {
            key: at for key, at in before.items() if key != folder
        }
        assert list(flow.layout.requests.iterdir()) == []
        take(flow, 1)
        assert_each_once(flow.sink.rows())
    assert told["given_up"] == [2, 3]
    assert (told["is_running"], told["would_refuse"], told["tier"]) == (True, False, "local")
    (sink,), (source,) = told["sinks"], told["sources"]
    assert (sink["fate"], sink["published"], sink["epochs"], sink["rows"]) == ("rewind", 3, 2, 4)
    assert (source["operator"], source["rows"], source["batches"]) == ("numbers", 7, 7), "also what is not complete yet"
    assert told["estimate"]["rows_per_second"] > 0


def test_rows_count_that_belong_to_released_checkpoints(tmp_path: Path) -> None:
    """The savepoint is all that is left of the time before the deploy."""
    with running(tmp_path) as flow:
        take(flow, 2)
    with up(tmp_path, functions={TOTALS: bad}) as flow:
        take(flow, 6, rows=3)
        flow.wait(lambda: len(flow.checkpoints.epochs()) == 1)
        told = previewed(tmp_path, "--to", "before-last-deploy")
        shown = invoke(tmp_path, "--to", "before-last-deploy", "--dry-run").stdout
    (sink,) = told["sinks"]
    assert (sink["fate"], sink["epochs"], sink["rows"], sink["unmeasured"]) == ("rewind", 6, 18, 0)
    assert told["sources"][0]["rows"] == 18
    assert "sink table: rewound from epoch 8 to 2: 6 epochs, 18 rows withdrawn" in shown
    assert "source numbers: 18 rows (18 batches) read again" in shown
    with running(tmp_path, restore_to="before-last-deploy") as flow:
        assert len(flow.sink.rows()) == 4, "18 rows less"


class ShortSink(FolderSink):
    """Can be rewound to its second epoch, and no further."""

    def oldest_rewind(self) -> Epoch:
        return Epoch(2)


class ShortFlow(SparklessFlow):
    def sinks(self, storage: Path) -> dict[str, Any]:
        self.sink = ShortSink(storage / "table")
        return {"table": self.sink}


def test_what_the_start_would_refuse_is_said_before_with_its_reason(tmp_path: Path) -> None:
    with up(tmp_path, ShortFlow, retain_checkpoints=5) as flow:
        take(flow, 3)
        told = previewed(tmp_path, "--to", "1", code=1)
        assert previewed(tmp_path, "--to", "2")["sinks"][0]["oldest_rewind"] == 2
        shown = invoke(tmp_path, "--to", "1", "--dry-run")
        with pytest.raises(RecoveryError, match="cannot be rewound further than epoch 2"):
            invoke(tmp_path, "--to", "1", "--now", "--no-start")
        assert not flow.layout.restore_request.exists()
        take(flow, 1)  # it was not stopped
    assert (shown.exit_code, told["would_refuse"], told["sinks"][0]["fate"]) == (1, True, "refuse")
    assert f"the start would refuse: {told['why']}\nNext: {told['next_step']}\n" in shown.stdout
    with pytest.raises(RecoveryError) as refused:
        ShortFlow(tmp_path, restore_to=1, retain_checkpoints=5)
    published = told["why"].replace("published epoch 3", "published epoch 4")
    assert (refused.value.what, refused.value.next_step) == (published, told["next_step"]), "the start says the same"


def test_input_that_is_gone_refuses_a_restore_before_it_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 2)
    lost = LostInput(operator=NUMBERS, what="stream ORDERS: sequences 120 to 340", why="dropped", parts=221)
    monkeypatch.setattr(LocalQueryDir, "lost_input", lambda _, record, *__: [lost] if not record.positions else [])
    told = previewed(tmp_path, "--to", "1", code=1)
    assert "stream ORDERS: sequences 120 to 340" in told["why"] and "missing_input" in told["next_step"]
    with pytest.raises(LostInputError, match="ORDERS"):
        invoke(tmp_path, "--to", "1")
    assert not flow.layout.restore_request.exists()


def test_a_record_that_is_missing_refuses_a_restore(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 2)
    cut = flow.checkpoints.load_manifest(Epoch(1)).operators[TOTALS]
    flow.layout.record(Epoch(1), TOTALS, cut.generation).unlink()
    told = previewed(tmp_path, "--to", "1", code=1)
    assert told["why"].startswith("epoch 1 cannot be restored")
    assert not previewed(tmp_path, "--to", "2")["would_refuse"]


def test_a_savepoint_that_lacks_a_file_refuses_a_restore(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        drained(flow, "kept")
        take(flow, 2)
    assert not previewed(tmp_path, "--to", "kept")["would_refuse"]
    entries = sorted((flow.layout.savepoints / "kept" / "channels").rglob("*.json*"))
    entries[-1].unlink()
    told = previewed(tmp_path, "--to", "kept", code=1)
    assert "kept" in told["why"] and "channels/" in told["why"]


def test_a_stopped_flow_is_previewed_by_its_records_and_nothing_is_written(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 3)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "storage").rglob("*")}
    told = previewed(tmp_path, "--to", "2")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "storage").rglob("*")} == before
    (sink,) = told["sinks"]
    assert (told["is_running"], sink["fate"], sink["rows"]) == (False, "rewind", 2)
    assert told["notes"] == [], "the sinks have said how far they can be rewound when the flow stopped"
    flow.layout.restore_limits.unlink()
    assert "how far table can be rewound is checked by its start" in previewed(tmp_path, "--to", "2")["notes"][0]


class LedgerSink(ShortSink):
    """Answers soon, so it is asked when the flow stops."""

    def rewind_gaps(self) -> tuple[Any, ...]:
        return ()


class LedgerFlow(SparklessFlow):
    def sinks(self, storage: Path) -> dict[str, Any]:
        self.sink = LedgerSink(storage / "table")
        return {"table": self.sink}


def test_a_sink_of_a_stopped_flow_refuses_by_what_it_said_last(tmp_path: Path) -> None:
    flow = LedgerFlow(tmp_path, retain_checkpoints=5)
    take(flow, 3)
    flow.wait(flow.coordinator.is_settled)
    flow.stop()
    told = previewed(tmp_path, "--to", "1", code=1)
    assert "the sink cannot be rewound further than epoch 2" in told["why"]
    assert not previewed(tmp_path, "--to", "2")["would_refuse"]


def test_an_epoch_that_is_gone_is_answered_with_the_newest_ones(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=20) as flow:
        take(flow, 12, rows=1)
    with pytest.raises(RecoveryError, match="epoch 99 is not available") as refused:
        invoke(tmp_path, "--to", "99", "--dry-run")
    assert refused.value.next_step.startswith("choose one of …, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 (cutline checkpoints")


def test_the_zone_that_was_understood_is_in_the_json_too(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 1)
        at_ms = flow.checkpoints.load_manifest(Epoch(1)).completed_ms
    environment = {**os.environ, "TZ": "Asia/Tokyo"}
    command = [sys.executable, "-m", "cutline", "restore", "--at", "0s ago", "--dry-run", "--storage", "storage"]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    told = json.loads(done.stdout)
    assert told["epoch"] == 1 and told["completed_ms"] == at_ms
    assert (told["zone"], told["at"][-6:], told["at_local"][-6:]) == ("JST", "+00:00", "+09:00")
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, text=True).stdout
    assert " JST (" in shown.splitlines()[0] and " UTC): epoch 1" in shown.splitlines()[0]


# ---------------------------------------------------------------------- now


FILE = """
import cutline
flow = cutline.Flow("counting")

@flow.operator()
def numbers(spark): ...

@flow.operator(inputs=[numbers], subtasks=1)
def totals(numbers): ...

flow.sink(totals, cutline.sinks.Parquet("{folder}/table"), name="table")
"""


def now(storage: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cutline", "restore", "--now", *words, "--storage", str(storage / "storage")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_running_flow_is_stopped_and_the_next_start_restores_it(tmp_path: Path) -> None:
    with up(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 3)
        done = now(tmp_path, "--to", "1", "--no-start")
        assert done.returncode == 0, done.stderr
        assert flow.run.await_termination(0)
    for step in (f"stopping flow counting (pid {os.getpid()})", "stopped after", "restores epoch 1"):
        assert step in done.stderr
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert (flow.recovered.restored_epoch, len(flow.sink.rows())) == (1, 2)
        assert not flow.layout.restore_request.exists()


@pytest.mark.kill
@pytest.mark.parametrize("point", RESTORE_NOW_POINTS)
def test_killed_on_the_way_the_next_start_restores_the_flow(tmp_path: Path, point: str) -> None:
    (tmp_path / "flow.py").write_text(FILE.format(folder=tmp_path))
    with up(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 3)
        done = now(tmp_path, "--to", "1", "--run", str(tmp_path / "flow.py"), **{ENVIRONMENT_VARIABLE: point})
        assert done.returncode == -9, done.stderr
        assert flow.run.await_termination(0) == (point == "restore-stopped")
        if point == "restore-requested":
            take(flow, 1)  # it runs on; a second try finds the request
            assert previewed(tmp_path, "--to", "1")["given_up"] == [2, 3, 4]
            assert now(tmp_path, "--to", "2", "--no-start").returncode == 0
    restored = 1 if point == "restore-stopped" else 2
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert flow.recovered.restored_epoch == restored
        take(flow, 2)
        assert_each_once(flow.sink.rows())


def test_a_flow_that_does_not_answer_runs_on_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("asking", "history.preview"):
        monkeypatch.setattr(f"cutline.cli.{module}._ANSWER_SECONDS", 0.3)
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 2)
    lock = FlowLock(flow.layout.lock, "counting")
    lock.acquire()  # a process that holds the flow and hears nothing
    try:
        with pytest.raises(RequestFailedError, match="has not answered"):
            invoke(tmp_path, "--to", "1", "--now", "--no-start")
    finally:
        lock.release()
    assert not flow.layout.restore_request.exists()


def test_what_to_run_must_be_known_before_anything_is_stopped(tmp_path: Path) -> None:
    with up(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 2)
        with pytest.raises(ConfigError, match="is no cutline run of this user"):
            invoke(tmp_path, "--to", "1", "--now")
        with pytest.raises(ConfigError, match="add --now to stop it"):
            invoke(tmp_path, "--to", "1")
        (tmp_path / "flow.py").write_text(FILE.format(folder=tmp_path))
        with pytest.raises(ConfigError, match="'nonsense' is not known"):
            invoke(tmp_path, "--to", "1", "--now", "--run", str(tmp_path / "flow.py"), "--set", "mode=nonsense")
        take(flow, 1)
    with pytest.raises(ConfigError, match="the flow does not run") as refused:
        invoke(tmp_path, "--to", "1", "--now")
    assert "--run FILE" in refused.value.next_step
    for words in (("--no-start",), ("--run", "x.py"), ("--now", "--no-start", "--run", "x.py")):
        with pytest.raises(ConfigError):
            invoke(tmp_path, "--to", "1", *words)


HOLDER = """
import sys
from pathlib import Path
from cutline.runtime.lock import FlowLock
lock = FlowLock(Path(sys.argv[-1]), "counting")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_code_that_runs_is_not_run_again_unless_it_is_named(tmp_path: Path) -> None:
    """The person has forgotten to roll the file back."""
    file, program = tmp_path / "flow.py", tmp_path / "cutline"
    file.write_text(FILE.format(folder=tmp_path))
    program.write_text(HOLDER)
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 1)
    bad_flow = load_flow(file, "counting")
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 1)
        generation = flow.recovered.record
    code = code_of(bad_flow.graph(), bad_flow.functions, bad_flow.sinks)
    path = flow.layout.generation(generation.generation)
    path.write_bytes(records.encode("generation", msgspec.structs.replace(generation, code=code)))
    command = [sys.executable, str(program), "run", "flow.py", "--set", "mode=unaligned", str(flow.layout.lock)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match=rf"{file} is the code that runs now \({code.hash}\); other code"):
            invoke(tmp_path, "--to", "1", "--now")
        process.communicate(b"")
    assert not flow.layout.restore_request.exists()


def test_a_request_is_shown_and_can_be_withdrawn(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 2)
    assert "no restore of flow counting is requested" in invoke(tmp_path, "--cancel").stdout
    invoke(tmp_path, "--to", "1")
    assert "a restore to 1 is requested already" in previewed(tmp_path, "--to", "2")["notes"][0]
    assert "to restore flow counting to 1 is withdrawn" in invoke(tmp_path, "--cancel").stdout
    flow.layout.restore_request.write_bytes(b"{")
    assert "which could not be read, is withdrawn" in invoke(tmp_path, "--cancel").stdout
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert flow.recovered.path == "resume"


def test_operators_are_compared_with_the_file_that_will_run(tmp_path: Path) -> None:
    file = tmp_path / "flow.py"
    file.write_text(FILE.format(folder=tmp_path).replace("totals", "sums"))
    with up(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 2)
        told = previewed(tmp_path, "--to", "1", "--run", str(file), code=1)
        assert "holds operators that the flow no longer has: totals" in told["why"]
        told = previewed(tmp_path, "--to", "1", "--run", str(file), "--rename", "totals=sums")
        assert [(one["fate"], one["now"]) for one in told["operators"]] == [("kept", "numbers"), ("renamed", "sums")]


def test_a_request_that_is_stored_while_the_flow_starts_is_for_the_next_start(tmp_path: Path) -> None:
    """The start has looked for one already: it must not remove what it does not carry out."""

    class Engine(HandDrivenEngine):
        def plan(self) -> dict[OperatorId, OperatorPlan]:
            store_request(Layout(tmp_path / "storage", "counting"), RestoreRequest(to="1"))
            return super().plan()

    class Flow(SparklessFlow):
        engine_type = Engine

    with running(tmp_path, retain_checkpoints=5) as flow:
        flow.emit(2)
        flow.drain()
        flow.emit(2)
        flow.drain()
    late = Flow(tmp_path, retain_checkpoints=5)
    late.stop()
    assert late.recovered.path == "resume"
    with running(tmp_path, retain_checkpoints=5) as flow:
        assert flow.recovered.restored_epoch == 1
        assert not flow.layout.restore_request.exists()
