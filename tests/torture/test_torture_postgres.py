"""The PostgreSQL sink under kill -9 at every step and at random, with a reader beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.testing.servers.postgres import PostgresServer
from tests.support.postgres_tables import reader
from tests.support.sink_torture import each_number_of_kills, torture

pytestmark = [pytest.mark.kill]


@pytest.mark.parametrize("sinks", [pytest.param("make_sinks", marks=pytest.mark.soak), "make_emptied"])
@each_number_of_kills
def test_two_tables_survive_torture_and_never_disagree(
    tmp_path: Path, postgres_server: PostgresServer, kills: int, sinks: str
) -> None:
    dsn = postgres_server.fresh_database()
    with reader(dsn) as read:
        report = torture(
            f"tests.support.postgres_tables:{sinks}",
            {"dsn": dsn},
            read,
            folder=tmp_path / "flow",
            kills=kills,
            seed=3,
            only_newest=True,
            same_epoch=True,
        )
    assert report.killed >= 20 + kills and report.rollbacks >= 3 and report.states > 20, report
