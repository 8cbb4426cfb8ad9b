"""Options that exclude one another, or mean nothing for a flow, are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from cutline.config.compatibility import check_options
from cutline.config.options import OperatorOptions, build_options
from cutline.errors import ConfigError

PER_OPERATOR = {"mode": "per-operator"}


def check(settings: dict[str, Any], own: OperatorOptions | None = None) -> None:
    options = build_options(settings)
    declared = own or OperatorOptions()
    check_options(options, flow="orders", own={"totals": options.of_operator("totals", declared)})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        PER_OPERATOR,
        {"operators": {"totals": {"mode": "aligned", "checkpoint_timeout": "5s"}}},
        {**PER_OPERATOR, "operators": {"totals": {"checkpoint_interval": "5s"}}},
        {"remote": "s3://bucket", "durable": "remote"},
        {"remote": "s3://bucket", "operators": {"totals": {"replicate_interval": "1m"}}},
        {"channel_store": "s3://bucket/rows", "remote_options": {"region": "eu-central-1"}},
        {"channel_store": "file:///shared", "remote_options": {"secret_access_key": "x"}},
        {"spark_dirs": "hdfs://host/path"},
    ],
)
def test_what_fits_together_is_accepted(settings: dict[str, Any]) -> None:
    check(settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"operators": {"total": {"mode": "aligned"}}}, r"operators\.total: the flow has no such operator"),
        ({"durable": "remote"}, "durable: there is no remote tier"),
        ({**PER_OPERATOR, "remote": "s3://bucket"}, "remote: a checkpoint of a single operator"),
        ({"spark_dirs": "/shared"}, "spark_dirs: '/shared' is not a URL"),
        ({**PER_OPERATOR, "spark_dirs": "hdfs://host/path"}, "spark_dirs: in per-operator mode"),
        ({"channel_store": "/shared"}, "channel_store: '/shared' is not the URL"),
        (
            {"channel_store": "s3://bucket", "remote_options": {"secret_access_key": "x"}},
            "channel_store: secret_access_key would have to be written",
        ),
        ({**PER_OPERATOR, "operators": {"totals": {"mode": "aligned"}}}, "mode and alignment_timeout of an operator"),
        ({"operators": {"totals": {"checkpoint_interval": "1s"}}}, "is for per-operator mode"),
        ({**PER_OPERATOR, "operators": {"totals": {"replicate_interval": "1s"}}}, "which has no remote tier"),
        (
            {"remote": "s3://b", "durable": "remote", "operators": {"totals": {"replicate_interval": "1s"}}},
            'with durable = "remote"',
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check(settings)
    assert caught.value.next_step and caught.value.where["flow"] == "orders"


def test_what_the_code_sets_for_an_operator_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="checkpoint_interval of an operator") as caught:
        check({}, OperatorOptions(checkpoint_interval_ms=5))
    assert caught.value.where["operator"] == "totals"
