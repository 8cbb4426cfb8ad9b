"""Several flows in one process: each has its own health and its own end; all are told of over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cutline.cli.running.run import _follow
from cutline.config.addresses import parse_address
from cutline.errors import ConfigError, FlowFailedError, RecoveryError
from cutline.model.ids import FlowName
from cutline.runtime.handle import RunningFlow
from cutline.runtime.process.flows import Flows
from cutline.runtime.process.http import serving
from tests.support.running import assert_each_once, running
from tests.support.sparkless import TOTALS, SparklessFlow

A, B = FlowName("a"), FlowName("b")


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[SparklessFlow, SparklessFlow]]:
    with running(tmp_path / "a", name=A) as first, running(tmp_path / "b", name=B) as second:
        yield first, second


def failed(flow: SparklessFlow, problem: str) -> None:
    flow.run._lifecycle.fail(FlowFailedError(problem, flow=flow.run.name, operator=TOTALS))
    assert flow.run._lifecycle.ended.wait(20)


def get(port: int | None, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# ------------------------------------------------------------------------------------------------- ends


def test_a_flow_that_fails_does_not_end_the_others(two: tuple[SparklessFlow, SparklessFlow], tmp_path: Path) -> None:
    first, second = two
    flows = Flows.of(first.run, second.run)
    failed(first, "its disk is lost")
    assert not flows.are_over()
    second.emit(3)
    second.drain()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(FlowFailedError, match="1 of 2 flows have failed\na: its disk is lost"):
        _follow(flows, None, "", until_done=False, as_json=False)
    assert second.run.status().state == "stopped"
    assert_each_once(second.sink.rows())


def test_when_every_flow_has_failed_the_command_ends(two: tuple[SparklessFlow, SparklessFlow]) -> None:
    for number, flow in enumerate(two):
        failed(flow, f"problem {number}")
    with pytest.raises(FlowFailedError, match=r"2 of 2 flows have failed\na: problem 0.*\nb: problem 1"):
        _follow(Flows.of(*(flow.run for flow in two)), None, "", until_done=False, as_json=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_flows(two: tuple[SparklessFlow, SparklessFlow], number: int) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    _follow(Flows.of(*(flow.run for flow in two)), None, "", until_done=False, as_json=False)
    assert [flow.run.status().state for flow in two] == ["stopped", "stopped"]


@pytest.mark.parametrize("error", [RecoveryError("nothing to restore"), ValueError("nothing to restore")])
def test_of_several_flows_one_that_cannot_start_leaves_the_others_running(
    two: tuple[SparklessFlow, SparklessFlow], error: Exception
) -> None:
    def refuse() -> RunningFlow:
        raise error

    flows = Flows([A, B])
    flows.start(A, refuse)
    flows.start(B, lambda: two[1].run)
    assert (list(flows.running), flows.are_over()) == ([B], False)
    assert flows.health()[A].reason == "nothing to restore"
    alone = Flows([A])
    with pytest.raises(type(error)):  # as it is
        alone.start(A, refuse)


# ------------------------------------------------------------------------------------------------- HTTP


def test_health_names_the_flow_that_is_not_well_and_why(two: tuple[SparklessFlow, SparklessFlow]) -> None:
    flows = Flows([A, B])
    with serving(flows, "127.0.0.1:0") as port:
        code, body = get(port, "/healthz")
        assert (code, json.loads(body)["flows"]) == (503, {"a": "starting", "b": "starting"})
        flows.start(A, lambda: two[0].run)
        flows.start(B, lambda: two[1].run)
        code, body = get(port, "/healthz")
        assert (code, json.loads(body)) == (
            200,
            {"healthy": True, "flows": {"a": "running", "b": "running"}, "unhealthy": {}},
        )
        failed(two[1], "its disk is lost")
        code, body = get(port, "/healthz")
        told = json.loads(body)
        assert (code, told["healthy"], told["flows"]) == (503, False, {"a": "running", "b": "failed"})
        assert list(told["unhealthy"]) == ["b"] and "its disk is lost" in told["unhealthy"]["b"]
        assert get(port, "/other")[0] == 404


def test_metrics_of_all_flows_stand_in_one_valid_answer(two: tuple[SparklessFlow, SparklessFlow]) -> None:
    for flow in two:
        flow.emit(2)
        flow.drain()
    with serving(Flows.of(*(flow.run for flow in two)), "127.0.0.1:0") as port:
        code, body = get(port, "/metrics")
    assert code == 200
    names = [line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    families: dict[str, Any] = {family.name: family for family in text_string_to_metric_families(body)}
    completed = {
        sample.labels["flow"]: sample.value
        for sample in families["cutline_checkpoints_completed"].samples
        if sample.name.endswith("_total")
    }
    assert set(completed) == {"a", "b"} and min(completed.values()) >= 1


def test_the_port_is_free_again_when_the_run_has_ended(two: tuple[SparklessFlow, SparklessFlow]) -> None:
    flows = Flows.of(two[0].run)
    with serving(flows, ":0") as port:
        assert get(port, "/healthz")[0] == 200
    with serving(flows, str(port)) as again:
        assert again == port and get(port, "/healthz")[0] == 200


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use")
        with refused, serving(Flows([A]), f"127.0.0.1:{port}"):
            pass


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7441", ("127.0.0.1", 7441)),
        (":7441", ("127.0.0.1", 7441)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_an_address_without_a_host_is_loopback(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "localhost", "localhost:http", "127.0.0.1:70000", "-1", ":²", ":" + "9" * 5000])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--http"):
        parse_address(text)
