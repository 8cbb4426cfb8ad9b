"""Options from the environment and from ``cutline.toml``, and which of them win."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.config.loading import environment_layer, file_layer, load_options
from cutline.config.options import OPTION_NAMES, OperatorOptions, build_options
from cutline.errors import ConfigError


def test_settings_win_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('checkpoint_interval = "1s"\nmin_pause = "1s"\nalignment_timeout = "1s"\n')
    monkeypatch.setenv("CUTLINE_CHECKPOINT_INTERVAL", "2s")
    monkeypatch.setenv("CUTLINE_MIN_PAUSE", "2s")
    options = load_options({"checkpoint_interval": "3s", "min_pause": None}, config_file=path)
    found = (options.checkpoint_interval_ms, options.min_pause_ms, options.alignment_timeout_ms)
    assert found == (3_000, 2_000, 1_000)


def test_the_file_of_the_working_directory_is_read_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_options({}).retain_checkpoints == 3
    (tmp_path / "cutline.toml").write_text("retain_checkpoints = 9")
    assert load_options({}).retain_checkpoints == 9


def test_a_file_that_is_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml does not exist"):
        load_options({}, config_file=tmp_path / "mine.toml")


def test_operators_have_tables_of_their_own_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cutline.toml"
    path.write_text('mode = "aligned"\n[operators.totals]\nmode = "auto"\nalignment_timeout = "2s"\n')
    options = build_options(file_layer(path))
    assert options.operators == {"totals": OperatorOptions(mode="auto", alignment_timeout_ms=2_000)}


def test_the_environment_sets_options_by_their_names() -> None:
    environment = {
        "CUTLINE_CHECKPOINT_INTERVAL": "2s",
        "CUTLINE_STORAGE": "/data",
        "PATH": "/bin",
        "CUTLINE_CRASH_AT": "",
    }
    assert environment_layer(environment) == {"checkpoint_interval": "2s", "storage": "/data"}


def test_options_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cutline.toml"
    path.write_text('checkpoint_interval = "2s"\nretain_checkpoints = 7\nmode = "aligned"\n')
    options = build_options(file_layer(path))
    assert (options.checkpoint_interval_ms, options.retain_checkpoints, options.mode) == (2_000, 7, "aligned")


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cutline.toml"
    path.write_text("checkpoint_interval = 2s")
    with pytest.raises(ConfigError, match=r"cutline\.toml is not valid TOML"):
        file_layer(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        file_layer(tmp_path / "mine.toml")


def test_a_table_in_the_file_is_no_option(tmp_path: Path) -> None:
    path = tmp_path / "cutline.toml"
    path.write_text("[payments]\nmode = 'auto'\n")
    with pytest.raises(ConfigError, match="unknown option 'payments'"):
        build_options(file_layer(path))


@pytest.mark.parametrize("value", ["nan", "inf", "[1]", "{a = 1}", "true", "1979-05-27", "-3"])
def test_whatever_toml_can_say_is_either_an_option_or_an_error_of_ours(tmp_path: Path, value: str) -> None:
    path = tmp_path / "cutline.toml"
    for name in OPTION_NAMES:
        path.write_text(f"{name} = {value}")
        with pytest.raises(ConfigError, match=name):
            build_options(file_layer(path))
