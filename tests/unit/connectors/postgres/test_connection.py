"""Connection strings: whatever the password does to their syntax, no error shows a piece of it."""

from __future__ import annotations

import pytest

from cutline.connectors.postgres.connection import Address, connection_parameters
from cutline.connectors.postgres.positions import connect
from cutline.errors import ConfigError, CutlineError, SinkError

NASTY = ["hun@ter2", "hun:ter/2x", "hun@ter@two", "hun/ter2", "%zzhunter2", "hun ter2"]


@pytest.mark.parametrize("password", NASTY)
def test_an_address_that_libpq_may_cut_in_the_password_is_refused(password: str) -> None:
    with pytest.raises(SinkError) as refused:
        connection_parameters(f"postgresql://user:{password}@127.0.0.1:1/shop")
    assert "hun" not in str(refused.value) and "ter" not in str(refused.value)
    assert "%40" in refused.value.next_step
    assert refused.value.__cause__ is None


def test_a_password_without_a_second_reading_is_accepted_and_hidden() -> None:
    for dsn in (
        "postgresql://user:p#w-hunter@127.0.0.1:1/shop",
        "postgresql://user:p%40w-hunter@127.0.0.1:1/shop",
        "host=127.0.0.1 port=1 dbname=shop user=user password=p@w-hunter",
        "postgresql://127.0.0.1:1/shop?user=user&password=p@w-hunter",
    ):
        address = Address(dsn)
        assert repr(address) == "host=127.0.0.1 port=1 dbname=shop"
        with pytest.raises(CutlineError) as refused:
            address.connect()
        assert "hunter" not in str(refused.value)


@pytest.mark.parametrize("password", [*NASTY, "p#w-hunter"])
def test_the_source_refuses_passwords_and_shows_none(password: str) -> None:
    for url in (f"postgresql://user:{password}@127.0.0.1:1/shop", f"host=127.0.0.1 port=1 password='{password}'"):
        with pytest.raises(ConfigError) as refused:
            connect(url)
        assert "hun" not in str(refused.value) and "ter" not in str(refused.value).replace("intermediate", "")


def test_several_hosts_and_sockets_are_read_as_before() -> None:
    assert connection_parameters("postgresql://u@a:1,b:2/shop")["host"] == "a,b"
    assert connection_parameters("postgresql:///shop?host=/run/db")["host"] == "/run/db"
    assert connection_parameters("postgresql://%2Frun%2Fdb/shop")["host"] == "/run/db"
    assert connection_parameters("")
