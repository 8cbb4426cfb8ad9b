"""No address shows its secrets, whatever the password does to its syntax."""

from __future__ import annotations

import io
import logging

import pytest

from cutline.base.logs import get_logger, make_formatter
from cutline.base.redaction import (
    address_without_secrets,
    has_credentials,
    is_secret_name,
    without_named_secrets,
    without_secrets,
)

PASSWORDS = ["p@ssw0rd", "hun:ter/2", "hun#ter2", "hun%zzter2", "hun?ter2", "hun ter2", "a@b@c/d:e#f", "://@x"]


def pieces_of(password: str) -> list[str]:
    """No piece of a password that is longer than two characters may be seen either."""
    for mark in "@:/#%? ":
        password = password.replace(mark, "\n")
    return [piece for piece in password.split("\n") if len(piece) > 2]


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("scheme", ["postgresql", "nats", "s3", "hdfs", "SASL_SSL".lower().replace("_", "+")])
def test_an_address_without_its_secrets(scheme: str, password: str) -> None:
    address = f"{scheme}://user:{password}@host.example:5432/base"
    shown = address_without_secrets(address)
    assert shown == f"{scheme}://***@host.example:5432/base"
    assert has_credentials(address)


@pytest.mark.parametrize("password", [one for one in PASSWORDS if " " not in one])
def test_a_message_without_the_secrets_of_an_address(password: str) -> None:
    text = f"cannot open postgresql://user:{password}@host/base: refused"
    assert without_secrets(text) == "cannot open postgresql://***@host/base: refused"
    assert not [piece for piece in pieces_of(password) if piece in without_secrets(text)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host=db password=p@ss user=u", "host=db password=*** user=u"),
        ("host=db password='p s\\'s' user=u", "host=db password=*** user=u"),
        ("https://h/x?token=abc&a=1", "https://h/x?token=***&a=1"),
        ("aws_secret_access_key = abc/def", "aws_secret_access_key = ***"),
        ("sslpassword=x PGPASSWORD=y", "sslpassword=*** PGPASSWORD=***"),
        ("https://h/x?sig=abc%2F", "https://h/x?sig=***"),
        ("epoch=3, operator=totals", "epoch=3, operator=totals"),
        ("mail to someone@example.com", "mail to someone@example.com"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
    ],
)
def test_messages(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_an_address_without_credentials_stays() -> None:
    for address in ("s3://bucket/prefix", "nats://a:4222,nats://b:4222", "host:9092"):
        assert address_without_secrets(address) == address
        assert not has_credentials(address)
    assert address_without_secrets("https://h/x?sig=abc#frag") == "https://h/x"


def test_a_log_line_shows_no_secret() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(make_formatter(as_json=True))
    logger = logging.getLogger("cutline.test_redaction")
    logger.addHandler(handler)
    try:
        get_logger("cutline.test_redaction").error("lost", reason="postgresql://u:hun@ter2@host/x is gone")
    finally:
        logger.removeHandler(handler)
    assert "hun" not in stream.getvalue() and "ter2" not in stream.getvalue() and "***@host/x" in stream.getvalue()


def test_names_of_secrets_are_words_and_not_parts_of_words() -> None:
    for name in ("password", "DB_PASSWORD", "dbPassword", "sasl.jaas.token", "api_key", "aws_secret_access_key", "pwd"):
        assert is_secret_name(name), name
    for name in ("passengers", "design", "signal", "tokenizer", "compass", "key", "assign", "keyboard"):
        assert not is_secret_name(name), name


def test_code_keeps_all_that_is_no_secret() -> None:
    assert without_named_secrets("passengers = 5 and design='a'") == "passengers = 5 and design='a'"
    assert without_named_secrets("user=a password='b c' host=d") == "user=a password=*** host=d"
    assert without_named_secrets("postgresql://u:p@host/db") == "postgresql://***@host/db"
