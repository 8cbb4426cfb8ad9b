"""Addresses of catalogs, and that no secret of them is shown or stored."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from cutline.connectors.iceberg.catalog import CatalogAddress, table_identifier
from cutline.connectors.iceberg.sink import Iceberg
from cutline.errors import ConfigError, NotDone, Refused
from cutline.fingerprint.definition import _settings
from cutline.fingerprint.functions import Functions
from cutline.testing.conformance.sinks import SinkSuite
from tests.support.sink_targets import iceberg

SECRET = "s3cr3t-p4ss/w@rd"
QUOTED = "s3cr3t-p4ss%2Fw%40rd"


@pytest.mark.parametrize(
    "uri",
    ["", "/data/catalog", "thrift://host:9083", "mysql://host/db", "sqlite:/x"],
)
def test_addresses_of_no_known_kind_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="of no kind"):
        CatalogAddress(uri, "default", None, {})


@pytest.mark.parametrize(
    "uri",
    [
        f"postgresql://user:{SECRET}@host/db",
        "postgresql://user:p@ss@host/db",
        "postgresql://user:pass/word@host/db",
        "postgresql://user:pa:ss word@host/db",
        "https://user:p@ss@host/catalog",
    ],
)
def test_an_address_that_may_be_cut_inside_a_password_is_refused_without_showing_it(uri: str) -> None:
    with pytest.raises(ConfigError) as told:
        CatalogAddress(uri, "default", None, {})
    for part in ("s3cr3t", "p@ss", "pass", "ss word"):
        assert part not in str(told.value).replace("password", "")


def test_nothing_shows_or_stores_a_secret(tmp_path: Path) -> None:
    uri = f"postgresql://user:{QUOTED}@127.0.0.1:1/db?sslpassword=hidden-too"
    sink = Iceberg(uri, "a.b", warehouse=tmp_path, properties={"token": "tok-123456", "credential": "id:cred-7890"})
    with pytest.raises(NotDone) as told:
        sink.open(SinkSuite().context())
    shown = f"{sink!r} {told.value} {told.value!r} {told.value.__cause__!r} {told.value.__context__!r}"
    kept = _settings(sink, Functions())
    assert kept["table"] is not None
    for secret in (SECRET, QUOTED, "hidden-too", "tok-123456", "cred-7890"):
        assert secret not in shown
        assert secret not in str(kept)
    assert "127.0.0.1" in repr(sink)


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path: Path) -> None:
    one = Iceberg("sqlite:////a/c.sqlite", "a.b", warehouse="/a")
    other = Iceberg(f"postgresql://user:{QUOTED}@host/db", "a.b", warehouse="/b", properties={"token": "t"})
    third = Iceberg("sqlite:////a/c.sqlite", "a.c", warehouse="/a")
    settings = [_settings(sink, Functions()) for sink in (one, other, third)]
    assert settings[0] == settings[1] != settings[2]


def test_what_travels_to_the_executors_holds_no_address(tmp_path: Path) -> None:
    sink = iceberg(tmp_path, properties={"token": "tok-123456"})
    sink.open(SinkSuite().context())
    travelling = pickle.dumps(sink.stager())
    assert b"sqlite://" not in travelling
    assert b"tok-123456" not in travelling


def test_errors_are_told_in_one_line_without_secrets() -> None:
    address = CatalogAddress(f"postgresql://user:{QUOTED}@host/db", "default", None, {"token": "tok-123456"})
    told = address.describe(OperationalError("SELECT secret", {}, Exception(f"no\nway {SECRET} {QUOTED} tok-123456")))
    assert told == "no way *** *** ***"


def test_a_server_that_refuses_is_told_apart_from_one_that_is_away() -> None:
    address = CatalogAddress("postgresql://user@host/db", "default", None, {})
    assert isinstance(address.unreachable(OSError('FATAL: role "x" does not exist')), Refused)
    assert not isinstance(address.unreachable(OSError("connection refused")), Refused)


def test_names_of_tables() -> None:
    assert table_identifier("a.b") == ("a", "b")
    assert table_identifier("a.b.c") == ("a", "b", "c")
    for wrong in ("", "a", ".a", "a.", "a..b"):
        with pytest.raises(ConfigError, match="namespace"):
            table_identifier(wrong)


def test_the_database_is_asked_to_notice_a_dead_host() -> None:
    found = CatalogAddress("postgresql://u@h/db?connect_timeout=3", "default", None, {})._properties()["uri"]
    assert found.startswith("postgresql+psycopg://u@h/db?")
    assert "connect_timeout=3" in found
    assert "tcp_user_timeout=30000" in found
