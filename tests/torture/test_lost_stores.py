"""A store that does not answer makes a flow wait in a named state; when it is back, the flow continues by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutline.base.outages import outage_in, outage_of
from cutline.errors import NotDone, StoreError
from cutline.model.ids import Epoch
from cutline.sinks import Postgres
from cutline.testing.conformance.sinks import SIMPLE, Case, SinkConformance, rows
from cutline.testing.servers.postgres import PASSWORD, PostgresServer
from cutline.testing.servers.s3 import S3Server
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, SparklessFlow

IMPATIENT = {"request_timeout_s": "1", "retry_for_s": "0.3"}
#: A stop waits for nothing that does not answer.
STOP_SECONDS = 15.0


@pytest.fixture
def away(s3_server: S3Server) -> Iterator[S3Server]:
    yield s3_server
    s3_server.thaw()


def waiting_parts(flow: SparklessFlow) -> dict[str, str]:
    return {one.part: one.resource for one in flow.run.status().waiting}


def test_a_remote_tier_that_does_not_answer_is_named_and_the_flow_goes_on(tmp_path: Path, away: S3Server) -> None:
    url = away.fresh_url()
    with running(tmp_path, remote=url, remote_options=away.options | IMPATIENT) as flow:
        flow.emit(2)
        assert flow.run.wait_remote(flow.checkpoint(), timeout=20)
        away.freeze()
        flow.emit(2)
        epoch = flow.checkpoint()
        flow.wait(lambda: "remote tier" in waiting_parts(flow))
        status = flow.run.status()
        assert status.state == "running", "checkpoints are complete without it"
        assert away.url.partition("://")[2].partition("/")[0] in waiting_parts(flow)["remote tier"]
        away.thaw()
        assert flow.run.wait_remote(epoch, timeout=20)
        flow.wait(lambda: waiting_parts(flow) == {})
        assert_each_once(flow.sink.rows())


def test_rows_in_a_store_that_does_not_answer_wait_for_it(
    tmp_path: Path, away: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(away.options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("access_key_id"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret_access_key"))
    settings: dict[str, Any] = {"channel_store": away.fresh_url(), "remote_options": options | IMPATIENT}
    with running(tmp_path, **settings) as flow:
        flow.emit(2)
        away.freeze()
        with pytest.raises(StoreError) as failed:
            flow.step(NUMBERS)
        assert outage_of(failed.value) is not None
        assert outage_in(f"Traceback\ncutline.errors.{type(failed.value).__name__}: {failed.value}") is not None
        away.thaw()
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 4


def test_a_flow_stops_though_its_remote_tier_does_not_answer(tmp_path: Path, away: S3Server) -> None:
    with running(tmp_path, remote=away.fresh_url(), remote_options=away.options) as flow:
        flow.emit(2)
        away.freeze()
        flow.checkpoint()
        began = time.monotonic()
        flow.stop()
        assert time.monotonic() - began < STOP_SECONDS
    away.thaw()
    with running(tmp_path) as flow:
        assert flow.recovered.path == "resume"


def test_a_sink_whose_database_is_away_is_named_and_publishes_when_it_is_back(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(2)
        lost = NotDone("PostgreSQL cannot be reached: connection refused", database="host=db")
        flow.sink.commit_failures = [lost, lost, lost]
        request = flow.request()
        flow.wait(lambda: waiting_parts(flow) == {"sink table": "host=db"})
        flow.wait(lambda: flow.run.status().waiting[0].next_try_ms is not None)
        assert flow.run.status().state == "waiting"
        flow.wait(request.done)
        flow.wait(lambda: flow.run.status().waiting == [])
        assert flow.run.status().state == "running"
        assert flow.run.status().sinks["table"].failures == 0
        assert_each_once(flow.sink.rows())


def test_a_postgresql_server_that_is_gone_is_an_outage_at_every_step() -> None:
    server = PostgresServer()
    try:
        server.start()
        sink, context = Postgres(server.fresh_database(), "out"), SinkConformance().context(SIMPLE)
        sink.open(context)
        case = Case(sink=sink, context=context)
        staged = case.stage(0, rows(1, 2))
        token = sink.prepare(Epoch(1), [staged])
        server.kill()
        for step in (
            lambda: case.stage(1, rows(3)),
            lambda: sink.commit(case.permit(1, [staged]), [staged], token),
        ):
            with pytest.raises(StoreError) as failed:
                step()
            outage = outage_of(failed.value)
            assert outage is not None
            assert PASSWORD not in f"{outage}"
            assert outage_in(f"…\ncutline.errors.{type(failed.value).__name__}: {failed.value}\n") is not None
        server.start()
        sink.commit(case.permit(1, [staged]), [staged], token)
        assert sink.published() == 1
    finally:
        server.remove()
