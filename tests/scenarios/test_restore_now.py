"""``cutline restore --now`` beside a flow that runs on, a second person, one who interrupts it, and other options."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutline.base import durable
from cutline.cli.asking import ask_running
from cutline.cli.flows_here import flow_here
from cutline.cli.history import restore_now
from cutline.cli.running.former import former_run
from cutline.errors import ConfigError, LostInputError, RecoveryError, RequestFailedError, UnknownEpochError
from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.model.restore_request import RestoreRequest
from cutline.runtime.lock import FlowLock
from cutline.storage.query_dir import LocalQueryDir
from cutline.storage.restore_requests import store_request, stored_request
from tests.scenarios.test_deploys import GOOD, automatic, command, live
from tests.scenarios.test_restore_command import FILE, HOLDER, invoke, previewed, take, up
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, FolderSink, HandDrivenEngine, SparklessFlow

KEPT: dict[str, Any] = {"retain_checkpoints": 5}
FEW: dict[str, Any] = {"retain_checkpoints": 2}


def before(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Something happens just before the command calls this function of its module."""
    real = getattr(restore_now, name)

    def acting(*words: Any, **more: Any) -> Any:
        act()
        return real(*words, **more)

    monkeypatch.setattr(restore_now, name, acting)


def at_point(monkeypatch: pytest.MonkeyPatch, point: str, act: Callable[[], object]) -> None:
    monkeypatch.setattr(restore_now, "crashpoint", lambda name: act() if name == point else None)


# ---------------------------------------------------------------------- the checkpoint stays


def test_the_running_flow_keeps_the_checkpoint_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timer takes checkpoints meanwhile, and retention releases the others."""
    with up(tmp_path, **FEW) as flow:
        take(flow, 3)
        flow.wait(lambda: flow.checkpoints.epochs() == [2, 3])

        def go_on() -> None:
            take(flow, 3)
            flow.wait(lambda: 4 not in flow.checkpoints.epochs())

        before(monkeypatch, "store_request", go_on)
        assert invoke(tmp_path, "--to", "2", "--now", "--no-start").exit_code == 0
        assert 2 in flow.checkpoints.epochs()
    with running(tmp_path, **FEW) as flow:
        assert (flow.recovered.restored_epoch, len(flow.sink.rows())) == (2, 4)
        take(flow, 3)
        flow.wait(lambda: 2 not in flow.checkpoints.epochs())  # it is kept no longer
        assert_each_once(flow.sink.rows())


def test_a_checkpoint_that_was_released_since_the_preview_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with up(tmp_path, **FEW) as flow:
        take(flow, 3)
        flow.wait(lambda: flow.checkpoints.epochs() == [2, 3])

        def release() -> None:
            if 2 in flow.checkpoints.epochs():
                take(flow, 1)
                flow.wait(lambda: 2 not in flow.checkpoints.epochs())

        before(monkeypatch, "ask_running", release)
        with pytest.raises(UnknownEpochError, match="epoch 2 is not a complete checkpoint that is kept"):
            invoke(tmp_path, "--to", "2", "--now", "--no-start")
        assert stored_request(flow.layout) is None
        take(flow, 1)  # it runs on


def test_a_flow_that_runs_on_keeps_it_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with up(tmp_path, **FEW) as flow:
        take(flow, 3)
        flow.wait(lambda: flow.checkpoints.epochs() == [2, 3])
        real = ask_running

        def refusing(layout: Any, kind: str, *words: Any, **more: Any) -> Any:
            if kind == "stop":
                raise RequestFailedError("it does not want to")
            return real(layout, kind, *words, **more)

        monkeypatch.setattr(restore_now, "ask_running", refusing)
        with pytest.raises(RequestFailedError, match="does not want to"):
            invoke(tmp_path, "--to", "2", "--now", "--no-start")
        assert stored_request(flow.layout) is None
        flow.wait(lambda: list(flow.layout.requests.glob("*.answer.json")) != [])
        take(flow, 1)
        flow.wait(lambda: flow.checkpoints.epochs() == [3, 4])


def test_a_restore_that_became_impossible_is_withdrawn_when_the_flow_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with up(tmp_path, **KEPT) as flow:
        take(flow, 3)
        cut = flow.checkpoints.load_manifest(Epoch(1)).operators[TOTALS]
        record = flow.layout.record(Epoch(1), TOTALS, cut.generation)
        at_point(monkeypatch, "restore-stopped", record.unlink)
        with pytest.raises(RecoveryError, match="is stopped, and cannot be restored to 1 any more") as refused:
            invoke(tmp_path, "--to", "1", "--now", "--no-start")
        assert "start the flow: it continues where it was" in refused.value.next_step
    with running(tmp_path, **KEPT) as flow:
        assert flow.recovered.path == "resume"


def test_a_checkpoint_that_a_stored_request_names_is_not_collected(tmp_path: Path) -> None:
    """It was stored while the flow started, and waits for the next start."""
    with up(tmp_path, **FEW) as flow:
        take(flow, 2)
        store_request(flow.layout, RestoreRequest(to="1"))
        take(flow, 3)
        flow.wait(lambda: flow.checkpoints.epochs() == [1, 4, 5])
    with running(tmp_path, **FEW) as flow:
        assert (flow.recovered.restored_epoch, len(flow.sink.rows())) == (1, 2)


def other(number: int) -> dict[OperatorId, Callable[..., Any]]:
    names: dict[str, Any] = {}
    exec(f"def f(df):\n    return df.limit({number})", names)
    return {TOTALS: names["f"]}


def test_a_savepoint_that_a_stored_request_names_is_not_removed(tmp_path: Path) -> None:
    for number in range(4):
        live(tmp_path, other(number), auto_savepoints=3)
    oldest = automatic(tmp_path)[0]

    class Engine(HandDrivenEngine):
        def plan(self) -> dict[OperatorId, OperatorPlan]:
            store_request(Layout(tmp_path / "storage", "counting"), RestoreRequest(to=oldest.name))
            return super().plan()

    class Flow(SparklessFlow):
        engine_type = Engine

    Flow(tmp_path, functions=other(9), auto_savepoints=3).stop()
    with running(tmp_path, functions=other(9), auto_savepoints=3) as flow:
        assert flow.recovered.restored_epoch == oldest.epoch


def test_a_savepoint_that_a_stored_request_names_is_not_deleted_by_mistake(tmp_path: Path) -> None:
    live(tmp_path, other(1))
    live(tmp_path, other(2))
    (saved,) = automatic(tmp_path)
    invoke(tmp_path, "--to", saved.name)
    told = command(tmp_path, "savepoint", "delete", saved.name)
    assert isinstance(told.exception, ConfigError)
    assert "cutline restore counting --cancel" in told.exception.next_step
    invoke(tmp_path, "--cancel")
    assert command(tmp_path, "savepoint", "delete", saved.name).exit_code == 0


# ---------------------------------------------------------------------- a person interrupts it


class _Clock:
    """The time of the command: it is interrupted, or its limit passes, while the flow stops."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.passed, self._act = 0.0, act

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    def sleep(self, _: float) -> None:
        self._act()


@pytest.mark.parametrize("is_late", [False, True], ids=["Ctrl-C", "limit"])
def test_a_flow_that_is_stopping_is_restored_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    with running(tmp_path, **KEPT) as flow:
        take(flow, 2)
    flow = SparklessFlow(tmp_path, **KEPT)
    lock = FlowLock(flow.layout.lock, "counting")
    lock.acquire()  # a long batch delays its end

    def act() -> None:
        if not is_late:
            raise KeyboardInterrupt
        clock.passed = 1000.0

    monkeypatch.setattr(restore_now, "time", clock := _Clock(act))
    says = "its next start restores epoch 1; cutline restore counting --cancel withdraws that"
    if is_late:
        with pytest.raises(RequestFailedError, match=f"it is stopping still, and {says}"):
            invoke(tmp_path, "--to", "1", "--now", "--no-start")
    else:
        assert f"it is stopping; {says}" in " ".join(
            invoke(tmp_path, "--to", "1", "--now", "--no-start").stderr.split()
        )
    flow.wait(lambda: bool(flow.run.await_termination(0)))
    lock.release()
    with running(tmp_path, **KEPT) as flow:
        assert flow.recovered.restored_epoch == 1


def test_a_flow_that_has_not_taken_the_stop_runs_on_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, **KEPT) as flow:
        take(flow, 2)
    lock = FlowLock(flow.layout.lock, "counting")
    lock.acquire()

    def interrupt(_: Any, kind: str, *__: Any, **___: Any) -> dict[str, Any]:
        if kind == "stop":
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(restore_now, "ask_running", interrupt)
    monkeypatch.setattr("cutline.cli.history.preview._ANSWER_SECONDS", 0.3)
    invoke(tmp_path, "--to", "1", "--now", "--no-start")
    lock.release()
    assert stored_request(flow.layout) is None


# ---------------------------------------------------------------------- two people


def started(monkeypatch: pytest.MonkeyPatch) -> list[RestoreRequest]:
    """What successors are told to restore; none runs."""
    found: list[RestoreRequest] = []
    monkeypatch.setattr(restore_now.Successor, "start", lambda _, request, *, as_json: found.append(request))
    return found


def test_two_commands_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    with running(tmp_path, **KEPT) as flow:
        take(flow, 2)
    with durable.exclusive(flow.layout.restore_lock):
        for words in (("--to", "1", "--now", "--no-start"), ("--to", "1"), ("--cancel",)):
            with pytest.raises(ConfigError, match="another command is at work on a restore"):
                invoke(tmp_path, *words)
        assert not previewed(tmp_path, "--to", "1")["would_refuse"], "to look is always possible"
    assert invoke(tmp_path, "--to", "1").exit_code == 0


def test_the_start_restores_what_its_own_command_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flow.py").write_text(FILE.format(folder=tmp_path))
    requests = started(monkeypatch)
    words = ("--to", "1", "--now", "--run", str(tmp_path / "flow.py"), "--rename", "old=totals")
    with up(tmp_path, **KEPT) as flow:
        take(flow, 3)
        with pytest.raises(RecoveryError):
            invoke(tmp_path, *words)
        invoke(tmp_path, *words[:-2])
    assert requests == [RestoreRequest(to="1")]
    layout = flow.layout
    with pytest.raises(ConfigError, match="two restores are requested: this start was told to restore 2, and one of 1"):
        SparklessFlow(tmp_path, restore_to=2, **KEPT)
    with running(tmp_path, restore_to=1, **KEPT):
        assert stored_request(layout) is None


def test_a_request_of_another_person_is_neither_carried_out_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flow.py").write_text(FILE.format(folder=tmp_path))
    requests, theirs = started(monkeypatch), RestoreRequest(to="2")
    with up(tmp_path, **KEPT) as flow:
        take(flow, 3)
        before(monkeypatch, "waiting_request", lambda: store_request(flow.layout, theirs))
        with pytest.raises(ConfigError, match="a restore to 2 was requested meanwhile"):
            invoke(tmp_path, "--to", "1", "--now", "--run", str(tmp_path / "flow.py"))
    assert requests == []
    assert stored_request(flow.layout) == theirs

    class Engine(HandDrivenEngine):
        def plan(self) -> dict[OperatorId, OperatorPlan]:
            store_request(flow.layout, RestoreRequest(to="1"))
            return super().plan()

    class Flow(SparklessFlow):
        engine_type = Engine

    late = Flow(tmp_path, **KEPT)  # while it restores 2, a third person requests 1
    late.stop()
    assert late.recovered.restored_epoch == 2
    assert stored_request(flow.layout) == RestoreRequest(to="1")


def test_a_flow_that_starts_while_a_restore_is_requested_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, **KEPT) as flow:
        take(flow, 2)
    lock = FlowLock(flow.layout.lock, "counting")
    real = store_request

    def starts_meanwhile(layout: Layout, request: RestoreRequest) -> None:
        lock.acquire()
        real(layout, request)

    monkeypatch.setattr("cutline.storage.restore_requests.store_request", starts_meanwhile)
    with pytest.raises(ConfigError, match="restores epoch 1 now, or the request waits for its next start"):
        invoke(tmp_path, "--to", "1")
    lock.release()
    assert stored_request(flow.layout) == RestoreRequest(to="1")


def test_a_start_that_refuses_a_stored_request_tells_how_to_withdraw_it(tmp_path: Path) -> None:
    with running(tmp_path, **KEPT) as flow:
        take(flow, 1)
    store_request(flow.layout, RestoreRequest(to="7"))
    with pytest.raises(RecoveryError, match="cutline restore counting --cancel"):
        SparklessFlow(tmp_path, **KEPT)


def test_a_refusal_of_the_successor_withdraws_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flow.py").write_text(FILE.format(folder=tmp_path))

    def refuse(*_: Any, **__: Any) -> None:
        raise RecoveryError("the schema differs", next_step="correct it")

    monkeypatch.setattr(restore_now.Successor, "start", refuse)
    with up(tmp_path, **KEPT) as flow:
        take(flow, 2)
        with pytest.raises(RecoveryError, match="correct it; the flow is stopped, and the request is withdrawn"):
            invoke(tmp_path, "--to", "1", "--now", "--run", str(tmp_path / "flow.py"))
    assert stored_request(flow.layout) is None


# ---------------------------------------------------------------------- what the successor runs with


def test_the_preview_goes_by_the_options_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flow.py").write_text(FILE.format(folder=tmp_path))
    requests = started(monkeypatch)
    lost = LostInput(operator=NUMBERS, what="stream ORDERS: sequences 120 to 340", why="dropped", parts=221)
    run = ("--to", "1", "--run", str(tmp_path / "flow.py"))
    with up(tmp_path, **KEPT) as flow:
        take(flow, 2)
        monkeypatch.setattr(LocalQueryDir, "lost_input", lambda _, record, *__: [lost] if not record.positions else [])
        with pytest.raises(LostInputError, match="ORDERS"):
            invoke(tmp_path, *run, "--now")
        assert previewed(tmp_path, *run, "--set", "missing_input=continue")["lost_input"][0]["parts"] == 221
        invoke(tmp_path, *run, "--now", "--set", "missing_input=continue")
    assert requests == [RestoreRequest(to="1")]
    assert "per-operator" in previewed(tmp_path, *run, "--set", "mode=per-operator", code=1)["why"]


def test_the_options_of_the_stopped_flow_count_also_when_it_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager starts it with the same ones."""
    lost = LostInput(operator=NUMBERS, what="stream ORDERS: sequences 120 to 340", why="dropped", parts=221)
    with up(tmp_path, missing_input="continue", **KEPT) as flow:
        take(flow, 2)
        monkeypatch.setattr(LocalQueryDir, "lost_input", lambda _, record, *__: [lost] if not record.positions else [])
        assert invoke(tmp_path, "--to", "1", "--now", "--no-start").exit_code == 0
    assert stored_request(flow.layout) == RestoreRequest(to="1")


class ElsewhereFlow(SparklessFlow):
    def sinks(self, storage: Path) -> dict[str, Any]:
        self.sink = FolderSink(storage / "elsewhere")
        return {"table": self.sink}


def test_a_sink_with_another_target_is_refused_before_anything_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "flow.py"
    file.write_text(FILE.format(folder=tmp_path).replace("/table", "/elsewhere"))
    with up(tmp_path, **KEPT) as flow:
        take(flow, 3)
        told = previewed(tmp_path, "--to", "1", "--run", str(file), code=1)
        with pytest.raises(RecoveryError, match="holds nothing of this flow"):
            invoke(tmp_path, "--to", "1", "--now", "--run", str(file))
        take(flow, 1)
        assert not (tmp_path / "elsewhere").exists(), "nothing was opened"
        file.write_text(FILE.format(folder=tmp_path))
        assert not previewed(tmp_path, "--to", "1", "--run", str(file))["would_refuse"]
    assert "sink table of the code publishes to another target" in told["notes"][0]
    with pytest.raises(RecoveryError) as refused:
        ElsewhereFlow(tmp_path, restore_to=1, **KEPT)
    assert refused.value.what == told["why"].replace("epoch 3", "epoch 4"), "the start says the same"


def test_the_variables_of_the_stopped_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, program = tmp_path / "flow.py", tmp_path / "cutline"
    file.write_text(FILE.format(folder=tmp_path))
    program.write_text(HOLDER)
    with running(tmp_path, functions=GOOD, **KEPT) as flow:
        take(flow, 1)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CUTLINE_")]:
        monkeypatch.delenv(name)  # whatever the machine has set
    monkeypatch.setenv("CUTLINE_RETAIN_CHECKPOINTS", "3")
    monkeypatch.setenv("CUTLINE_MODE", "aligned")
    theirs = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUTLINE_")},
        "CUTLINE_RETAIN_CHECKPOINTS": "77",
        "CUTLINE_NATS_PASSWORD": "hunter2",
        "CUTLINE_CRASH_AT": "restore-stopped",
    }
    command = [sys.executable, str(program), "run", "flow.py", str(flow.layout.lock)]
    with subprocess.Popen(command, cwd=tmp_path, env=theirs, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        here = flow_here("counting", str(tmp_path / "storage"), None)
        successor = restore_now.Successor.of(here, file, [], None)
        former = former_run(process.pid)
        process.communicate(b"")
    assert (successor.options.retain_checkpoints, successor.options.mode) == (77, "auto")
    assert successor.taken_over() == ["CUTLINE_MODE", "CUTLINE_NATS_PASSWORD", "CUTLINE_RETAIN_CHECKPOINTS"]
    assert former is not None
    assert "hunter2" not in repr(former) + repr(successor)
    seen: dict[str, str | None] = {}
    monkeypatch.setattr(
        type(successor.context.command),
        "invoke",
        lambda *_: seen.update({name: os.environ.get(name) for name in (*theirs, "CUTLINE_MODE")}),
    )
    successor.start(RestoreRequest(to="1"), as_json=False)
    assert seen["CUTLINE_RETAIN_CHECKPOINTS"] == "77"
    assert seen["CUTLINE_MODE"] is None
    assert seen["CUTLINE_CRASH_AT"] is None, "of tests"
    assert os.environ["CUTLINE_RETAIN_CHECKPOINTS"] == "3"
