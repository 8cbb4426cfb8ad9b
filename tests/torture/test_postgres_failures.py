"""The PostgreSQL sink when the server goes away, the line is cut, or somebody else has taken over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.base.outages import outage_of
from cutline.connectors import shared_epochs
from cutline.errors import FencedError, OutcomeUnknown, Refused, StoreError
from cutline.model.ids import BatchId, Epoch, Generation
from cutline.sinks import Postgres
from cutline.testing.conformance.sinks import SIMPLE, Case, SinkConformance, rows
from cutline.testing.servers.postgres import PASSWORD, PostgresServer
from tests.support.cut_proxy import cut_proxy
from tests.support.postgres_tables import make_sinks, reader
from tests.support.torture_flow import EVENTS, LATEST, TortureFlow, all_rows, newest_rows, with_totals


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that a test may kill."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


def start(dsn: str, **options: Any) -> Case:
    sink, context = Postgres(dsn, "out", **options), SinkConformance().context(SIMPLE)
    sink.open(context)
    return Case(sink=sink, context=context)


def ids(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        return [number for (number,) in connection.execute("SELECT id FROM out ORDER BY id")]


def become_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_epochs, "_processes", {})


# ------------------------------------------------------------------------------------------------- lost answers


def test_a_commit_whose_answer_is_lost_is_found_in_the_ledger(postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    with cut_proxy(postgres_server.port) as proxy:
        case = start(dsn.replace(f":{postgres_server.port}/", f":{proxy.port}/"))
        staged = case.stage(0, rows(1, 2), rows(3))
        token = case.sink.prepare(Epoch(1), [staged])
        permit = case.permit(1, [staged])
        proxy.cut_answers = 1
        case.sink.commit(permit, [staged], token)
        assert proxy.cut == 1
        assert ids(dsn) == [1, 2, 3]
        case.sink.commit(permit, [staged], token)
        assert ids(dsn) == [1, 2, 3]
        assert case.sink.published() == 1


def test_a_lost_answer_that_cannot_be_asked_for_again_says_so(postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    with cut_proxy(postgres_server.port) as proxy:
        case = start(dsn.replace(f":{postgres_server.port}/", f":{proxy.port}/"))
        case.publish(1, 0, rows(1))
        staged = case.stage(1, rows(2))
        token = case.sink.prepare(Epoch(2), [staged])
        permit = case.permit(2, [staged])
        proxy.cut_answers, proxy.is_shut = 1, True  # lines that are open stay open
        with pytest.raises(OutcomeUnknown) as caught:
            case.sink.commit(permit, [staged], token)
        assert PASSWORD not in str(caught.value)
        proxy.is_shut = False
        case.sink.commit(permit, [staged], token)
        assert ids(dsn) == [1, 2]


def test_a_rewind_whose_answer_is_lost_is_done_once(postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    with cut_proxy(postgres_server.port) as proxy:
        case = start(dsn.replace(f":{postgres_server.port}/", f":{proxy.port}/"))
        for epoch in (1, 2, 3):
            case.publish(epoch, epoch, rows(epoch))
        proxy.cut_answers = 1
        case.sink.rewind(Epoch(1))
        assert (proxy.cut, ids(dsn), case.sink.published()) == (1, [1], 1)


# ------------------------------------------------------------------------------------------------- a dead server


@pytest.mark.kill
@pytest.mark.parametrize("point", ["sink-commit-begun", "sink-commit-half", "sink-commit-done"])
def test_the_server_is_killed_in_the_middle_of_a_commit(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    dsn = own_server.fresh_database()
    case = start(dsn, mode="upsert", key=["id"])
    case.publish(1, 0, rows(1))
    kills = [point]

    def kill(passed: str, scope: str = "") -> None:
        if passed in kills:
            kills.remove(passed)
            own_server.restart()

    monkeypatch.setattr(shared_epochs, "crashpoint", kill)
    case.publish(2, 1, rows(2, 3), rows(4))
    assert (kills, ids(dsn), case.sink.published()) == ([], [1, 2, 3, 4], 2)


@pytest.mark.kill
def test_a_flow_outlives_a_server_that_comes_and_goes(tmp_path: Path, own_server: PostgresServer) -> None:
    dsn = own_server.fresh_database()
    flow = TortureFlow(tmp_path, make_sinks({"dsn": dsn}), only_newest=True)
    is_over = threading.Event()

    def come_and_go() -> None:
        for _ in range(5):
            if is_over.wait(0.3):
                return
            own_server.kill()
            time.sleep(0.2)
            own_server.start()

    enemy = threading.Thread(target=come_and_go)
    enemy.start()
    try:
        while enemy.is_alive():
            flow.step(EVENTS)
            while flow.step(LATEST):
                pass
            flow.request()
    finally:
        is_over.set()
        enemy.join()
    flow.drain()
    count = flow.batches() * 4
    flow.stop()
    with reader(dsn) as read:
        view = read()
    assert view is not None
    assert sorted(view["events"]) == all_rows(count)
    assert sorted(view["latest"]) == newest_rows(with_totals(count))


def test_a_server_that_is_gone_is_an_error_that_can_be_repeated(own_server: PostgresServer) -> None:
    dsn = own_server.fresh_database()
    case = start(dsn)
    staged = case.stage(0, rows(1))
    token, permit = case.sink.prepare(Epoch(1), [staged]), case.permit(1, [staged])
    own_server.kill()
    for failing in (lambda: case.sink.commit(permit, [staged], token), case.sink.published, lambda: start(dsn)):
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            failing()
        assert PASSWORD not in str(caught.value)
    with pytest.raises(StoreError):
        case.stage(1, rows(2))
    own_server.start()
    case.sink.commit(permit, [staged], token)
    assert ids(dsn) == [1]


def test_a_server_that_refuses_the_user_is_not_waited_for(postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    for failing in (dsn.replace(PASSWORD, "wrong"), f"{dsn}_none", dsn.replace("//", "//nobody_")):
        with pytest.raises(Refused, match="PostgreSQL refuses the connection") as caught:
            start(failing)
        assert outage_of(caught.value) is None


# ------------------------------------------------------------------------------------------------- other processes


def test_a_process_that_another_has_replaced_is_fenced(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = postgres_server.fresh_database()
    old = start(dsn)
    old.publish(1, 0, rows(1))
    late = old.stage(1, rows(2))
    token, permit = old.sink.prepare(Epoch(2), [late]), old.permit(2, [late])
    old_life = shared_epochs._processes
    become_another_process(monkeypatch)
    new = start(dsn)
    new.through, new.previous, new.generation = BatchId(0), Epoch(1), Generation(2)
    new.publish(3, 1, rows(2))
    monkeypatch.setattr(shared_epochs, "_processes", old_life)
    for refused in (lambda: old.sink.rewind(Epoch(1)), lambda: old.publish(4, 5, rows(9))):
        with pytest.raises(FencedError):
            refused()
    with pytest.raises(FencedError):
        old.sink.commit(permit, [late], token)
    assert ids(dsn) == [1, 2]


def test_who_began_before_a_late_commit_of_the_old_process_is_fenced(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has decided where to go on from what it saw, and that has changed: it must begin again."""
    dsn = postgres_server.fresh_database()
    old = start(dsn)
    staged = old.stage(0, rows(1))
    old_life = shared_epochs._processes
    become_another_process(monkeypatch)
    new, new_life = start(dsn), shared_epochs._processes
    monkeypatch.setattr(shared_epochs, "_processes", old_life)
    old.commit(1, staged)
    monkeypatch.setattr(shared_epochs, "_processes", new_life)
    new.generation = Generation(2)
    with pytest.raises(FencedError):
        new.publish(2, 0, rows(1))
    assert ids(dsn) == [1]


def test_an_older_generation_is_fenced(postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    case = start(dsn)
    case.generation = Generation(5)
    case.publish(1, 0, rows(1))
    case.generation = Generation(4)
    with pytest.raises(FencedError):
        case.publish(2, 1, rows(2))
    assert ids(dsn) == [1]
