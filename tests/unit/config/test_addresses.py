"""Addresses to listen on."""

from __future__ import annotations

import pytest

from cutline.config.addresses import parse_address
from cutline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("99999999", "99999999 is not a port"),
        ("127.0.0.1:65536", "65536 is not a port"),
        ("localhost", "there is no port"),
        ("", "there is no port"),
        (":²", "there is no port"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_address(text)
    assert refused.value.what == f"--http {text}: {what}"


def test_the_ports_that_there_are() -> None:
    assert parse_address("0") == ("127.0.0.1", 0)
    assert parse_address("[::1]:65535") == ("::1", 65535)
