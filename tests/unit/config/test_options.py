"""Options: where they come from, which wins, and what makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.config.options import (
    OPTION_NAMES,
    OperatorOptions,
    Options,
    build_options,
    declarations,
    operator_options,
)
from cutline.errors import ConfigError

# ------------------------------------------------------------------------------------------------- layers


def test_without_settings_the_defaults_hold() -> None:
    assert build_options() == Options()


def test_later_layers_win() -> None:
    options = build_options(
        {"checkpoint_interval": "1s", "storage": "file", "retain_checkpoints": 1},
        {"checkpoint_interval": "2s", "storage": "environment"},
        {"checkpoint_interval": "3s"},
    )
    assert (options.checkpoint_interval_ms, options.storage, options.retain_checkpoints) == (3_000, "environment", 1)


def test_none_means_not_set_here() -> None:
    assert build_options({"mode": "aligned"}, {"mode": None}).mode == "aligned"


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"checkpoint_interval": 0}, "checkpoint_interval_ms", 0),
        ({"min_pause": "100ms"}, "min_pause_ms", 100),
        ({"channel_capacity_bytes": "1MB"}, "channel_capacity_bytes", 1 << 20),
        ({"max_concurrent_checkpoints": "2"}, "max_concurrent_checkpoints", 2),
        ({"state_backend": "heap"}, "state_backend", "heap"),
        ({"storage": Path("/data")}, "storage", "/data"),
        ({"restart_limit": 0}, "restart_limit", 0),
        ({"checkpoint_every_batches": 5}, "checkpoint_every_batches", 5),
        ({"checkpoint_every_rows": "1000"}, "checkpoint_every_rows", 1_000),
        ({"checkpoint_event_time": "1h"}, "checkpoint_event_time_ms", 3_600_000),
        ({"checkpoint_interval_backlog": "1m"}, "checkpoint_interval_backlog_ms", 60_000),
        ({"tolerable_failures": 0}, "tolerable_failures", 0),
        ({"retain_age": "1d"}, "retain_age_ms", 86_400_000),
        ({"operator_timeout": "5s"}, "operator_timeout_ms", 5_000),
        ({"message_retry": "100ms"}, "message_retry_ms", 100),
        ({"message_retry_limit": 3}, "message_retry_limit", 3),
    ],
)
def test_every_kind_of_option_can_be_set(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(build_options(given), field) == value


def test_every_option_can_be_written_by_its_name() -> None:
    """A field of Options that nobody can set would be a promise that is not kept."""
    fields = {field.name.removesuffix("_ms") for field in msgspec.structs.fields(Options)}
    assert fields == {name.removesuffix("_ms") for name in OPTION_NAMES}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"checkpoint_intervall": "1s"}, "unknown option 'checkpoint_intervall'"),
        ({"checkpoint_interval_ms": 5}, "unknown option"),
        ({"mode": "sideways"}, "mode: 'sideways' is not known"),
        ({"state_backend": "mongodb"}, "state_backend"),
        ({"retain_checkpoints": 0}, "retain_checkpoints: 0 is too small"),
        ({"retain_checkpoints": "many"}, "not a whole number"),
        ({"retain_checkpoints": 2.5}, "not a whole number"),
        ({"retain_checkpoints": [3]}, "not a whole number"),
        ({"max_concurrent_checkpoints": 0}, "too small"),
        ({"channel_capacity_entries": 0}, "too small"),
        ({"restart_limit": -1}, "too small"),
        ({"channel_capacity_bytes": 0}, "channel_capacity_bytes: 0 is too small"),
        ({"checkpoint_timeout": 0}, "checkpoint_timeout"),
        ({"storage": 7}, "storage"),
        ({"storage": ""}, "storage"),
        ({"mode": ["auto"]}, "mode"),
        ({"tolerable_failures": -1}, "tolerable_failures: -1 is too small"),
        ({"operator_timeout": 0}, "operator_timeout"),
        ({"message_retry": "0s"}, "message_retry"),
        ({"operators": 7}, "operators: 7 is not a table"),
        ({"operators": {"totals": "aligned"}}, r"operators\.totals: 'aligned' is not a table"),
        ({"operators": {"totals": {"modus": "aligned"}}}, r"operators\.totals: unknown option 'modus'"),
        ({"operators": {"totals": {"retain_checkpoints": 1}}}, r"operators\.totals: unknown option"),
        ({"operators": {"totals": {"mode": "sideways"}}}, r"operators\.totals: mode: 'sideways' is not known"),
        ({"operators": {"totals": {"checkpoint_timeout": 0}}}, r"operators\.totals: checkpoint_timeout"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_its_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_options(given)


def test_an_unknown_option_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        build_options({"colour": "red"})
    assert all(name in caught.value.next_step for name in OPTION_NAMES)


def test_a_slip_in_the_name_of_an_option_is_answered_with_what_was_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        build_options({"chekpoint_timeout": "1s"})
    assert caught.value.next_step.startswith("did you mean checkpoint_timeout")


@pytest.mark.parametrize(("mode", "limit"), [("aligned", None), ("unaligned", 0), ("auto", 70)])
def test_the_mode_says_how_long_to_wait_for_alignment(mode: str, limit: int | None) -> None:
    assert build_options({"mode": mode, "alignment_timeout": "70ms"}).alignment_limit_ms() == limit


# ------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize(
    ("flow", "own", "limit"),
    [
        ({"mode": "aligned"}, {"mode": "unaligned"}, 0),
        ({"mode": "unaligned"}, {"mode": "aligned"}, None),
        ({"mode": "aligned", "alignment_timeout": "70ms"}, {"mode": "auto"}, 70),
        ({"mode": "aligned"}, {"mode": "auto", "alignment_timeout": "2s"}, 2_000),
        ({"mode": "auto"}, {"alignment_timeout": "2s"}, 2_000),
        ({"mode": "unaligned"}, {"alignment_timeout": "2s"}, 0),
    ],
)
def test_an_operator_may_wait_longer_or_shorter_than_the_flow(
    flow: dict[str, Any], own: dict[str, Any], limit: int | None
) -> None:
    options = operator_options(own, where="operator totals")
    assert options.sets_alignment()
    assert options.alignment_limit_ms(build_options(flow)) == limit


def test_an_operator_without_settings_does_as_the_flow() -> None:
    assert not OperatorOptions(checkpoint_timeout_ms=5).sets_alignment()


def test_settings_of_one_operator_are_merged_one_by_one() -> None:
    options = build_options(
        {"operators": {"totals": {"mode": "aligned", "checkpoint_timeout": "5s"}, "cards": {"mode": "auto"}}},
        {},
        {"operators": {"totals": {"mode": "unaligned"}}},
    )
    assert options.operators == {
        "totals": OperatorOptions(mode="unaligned", checkpoint_timeout_ms=5_000),
        "cards": OperatorOptions(mode="auto"),
    }


# ------------------------------------------------------------------------------------------------- declarations


def test_an_operator_has_the_options_that_are_declared_per_operator() -> None:
    declared = {one.field: one for one in declarations().values() if one.is_per_operator}
    assert set(declared) == {field.name for field in msgspec.structs.fields(OperatorOptions)}
    assert all(getattr(OperatorOptions(), name) is None for name in declared)


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_every_option_says_what_it_means_in_whole_sentences(name: str) -> None:
    doc = declarations()[name].doc
    assert doc[0].isupper() and doc.endswith(".")


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_a_default_that_is_shown_can_be_written(name: str) -> None:
    option = declarations()[name]
    shown = option.shown_default()
    if shown and shown != "0":
        assert option.kind.parse(name, shown) == option.default
