"""Iceberg tables in catalogs on servers: PostgreSQL and REST, which lose answers, are killed and come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cutline
from cutline.errors import NotDone, OutcomeUnknown, Refused
from cutline.model.ids import Epoch
from cutline.sinks import Iceberg
from cutline.testing.conformance.sinks import Case, Row, SinkBehaviour, SinkSuite, rows
from cutline.testing.servers.postgres import PASSWORD, PostgresServer
from tests.support.cut_proxy import CutProxy
from tests.support.rest_catalog import TOKEN, RestCatalogServer, rest_catalog

pytestmark = [pytest.mark.kill]


def start(make: Any) -> Case:
    sink, context = make(), SinkSuite().context()
    sink.open(context)
    return Case(sink=sink, context=context)


def ids(sink: Iceberg) -> list[int]:
    return sorted(cutline.read(sink, flow="orders").to_arrow()["id"].to_pylist())


# ---------------------------------------------------------------------- PostgreSQL


class TestInPostgres(SinkBehaviour):
    can_be_shared = True

    @pytest.fixture(autouse=True)
    def _database(self, postgres_server: PostgresServer) -> None:
        self.catalog = postgres_server.fresh_database()

    def make_sink(self, tmp_path: Path) -> Iceberg:
        return Iceberg(self.catalog, "shop.totals", warehouse=tmp_path / "warehouse")

    def read_rows(self, tmp_path: Path) -> list[Row]:
        table = self.make_sink(tmp_path)._target.find()
        assert table is not None
        found: list[Row] = table.scan().to_arrow().to_pylist()
        return found


def test_a_lost_answer_to_a_commit_in_postgres_is_found_out(tmp_path: Path, postgres_server: PostgresServer) -> None:
    database = postgres_server.fresh_database().rpartition("/")[2]
    proxy = CutProxy(postgres_server.port)
    try:
        address = postgres_server.dsn(database, port=proxy.port)

        def make() -> Iceberg:
            return Iceberg(address, "shop.totals", warehouse=tmp_path / "warehouse")

        case = start(make)
        sink = case.sink
        assert isinstance(sink, Iceberg)
        proxy.cut_answers = 1
        sink.claim("history", expected="")
        assert sink.claimed().endswith(" history")
        for epoch in (1, 2, 3):
            proxy.cut_answers = 1
            case.publish(epoch, epoch, rows(epoch))
        proxy.cut_answers = 1
        sink.rewind(Epoch(2))
        assert proxy.cut == 5
        assert (sink.published(), ids(make())) == (2, [1, 2])
        # Nobody gets through any more: what became of the commit is not known.
        staged = case.stage(4, rows(4))
        permit = case.permit(4, [staged])
        proxy.cut_answers, proxy.is_shut = 1, True
        with pytest.raises((OutcomeUnknown, NotDone)) as told:
            sink.commit(permit, [staged], {})
        assert PASSWORD not in str(told.value)
        proxy.is_shut = False
        sink.commit(permit, [staged], {})
        assert ids(make()) == [1, 2, 4]
    finally:
        proxy.close()


def test_a_server_that_is_killed_and_started_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    server = PostgresServer()
    server.start()
    try:
        catalog = server.fresh_database()

        def make() -> Iceberg:
            return Iceberg(catalog, "shop.totals", warehouse=tmp_path / "warehouse")

        case = start(make)
        case.publish(1, 1, rows(1))
        staged = case.stage(2, rows(2))
        permit = case.permit(2, [staged])
        server.kill()
        with pytest.raises(NotDone) as told:
            case.sink.commit(permit, [staged], {})
        assert PASSWORD not in str(told.value)
        server.start()
        case.sink.commit(permit, [staged], {})
        assert ids(make()) == [1, 2]
    finally:
        server.remove()


def test_a_wrong_password_is_told_apart_from_a_server_that_is_away(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    wrong = postgres_server.fresh_database().replace(PASSWORD, "wrong-secret-77")
    with pytest.raises(Refused) as told:
        start(lambda: Iceberg(wrong, "shop.totals", warehouse=tmp_path))
    assert "wrong-secret-77" not in str(told.value)


# ---------------------------------------------------------------------- REST


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestCatalogServer]:
    with rest_catalog(tmp_path) as one:
        yield one


def rest_sink(server: RestCatalogServer, **options: Any) -> Iceberg:
    return Iceberg(server.address, "shop.totals", properties={"token": TOKEN}, **options)


class TestByRest(SinkBehaviour):
    can_be_shared = True

    @pytest.fixture(autouse=True)
    def _catalog(self, server: RestCatalogServer) -> None:
        self.server = server

    def make_sink(self, tmp_path: Path) -> Iceberg:
        return rest_sink(self.server)

    def read_rows(self, tmp_path: Path) -> list[Row]:
        found: list[Row] = self.server.tables.load_table("shop.totals").scan().to_arrow().to_pylist()
        return found


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": ["id"]}])
def test_a_lost_answer_of_a_rest_catalog_is_found_out(server: RestCatalogServer, options: dict[str, Any]) -> None:
    case = start(lambda: rest_sink(server, **options))
    sink = case.sink
    assert isinstance(sink, Iceberg)
    server.lost_answers = 1
    sink.claim("history", expected="")
    for epoch in (1, 2, 3):
        server.lost_answers = 1
        case.publish(epoch, epoch, rows(epoch))
    server.lost_answers = 1
    sink.rewind(Epoch(2))
    assert (server.commits, server.lost_answers) == (5, 0)
    assert ids(rest_sink(server, **options)) == [1, 2]


def test_errors_of_a_rest_catalog_are_tried_again(server: RestCatalogServer) -> None:
    case = start(lambda: rest_sink(server))
    server.failures = 3
    case.publish(1, 1, rows(1))
    server.failures = 100
    staged = case.stage(2, rows(2))
    permit = case.permit(2, [staged])
    with pytest.raises(NotDone, match="no room"):
        case.sink.commit(permit, [staged], {})
    server.failures = 0
    case.sink.commit(permit, [staged], {})
    assert (ids(rest_sink(server)), server.commits) == ([1, 2], 2)


def test_a_rest_catalog_that_does_not_know_the_token_refuses(server: RestCatalogServer) -> None:
    with pytest.raises(Refused) as told:
        start(lambda: Iceberg(server.address, "shop.totals", properties={"token": "wrong-secret-78"}))
    assert "wrong-secret-78" not in str(told.value)


def test_a_rest_catalog_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotDone, match="cannot be reached"):
        start(lambda: Iceberg("http://127.0.0.1:1", "shop.totals", warehouse=tmp_path))
