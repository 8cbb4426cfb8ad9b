"""Addresses of NATS servers are stored in plans and checkpoints: none may hold a secret."""

from __future__ import annotations

import pytest

from cutline.connectors.nats.client import check_url, is_refusal
from cutline.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        *(
            f"nats://user:{password}@host:4222"
            for password in ("hun@ter2", "hun:ter/2", "hun#ter2", "%zzhunter2", "hun,ter")
        ),
        *("nats://hunter2@host", "user:hunter2@host", "nats://host?token=hunter2", "nats://[hunter2@host"),
        "nats://a:4222,nats://user:hunter/2@b:4222",
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_url(url)
    assert "hun" not in str(refused.value)


def test_addresses_without_secrets() -> None:
    assert check_url("nats://a:4222, nats://b:4222") == "nats://a:4222,nats://b:4222"
    assert check_url("127.0.0.1:4222") == "127.0.0.1:4222"


def test_only_an_answer_that_blames_the_request_is_a_refusal() -> None:
    assert is_refusal({"code": 400, "description": "expected stream does not match"})
    assert not is_refusal({"code": 503, "description": "insufficient resources"})
    assert not is_refusal({"description": "the batch was not acknowledged"})
