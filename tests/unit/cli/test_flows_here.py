"""Which flow a command is about when it is not named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.cli.flows_here import flow_here, flows_in
from cutline.config.options import Options
from cutline.errors import ConfigError, FlowDefinitionError, StorageError
from cutline.runtime.lock import FlowLock


def storage(folder: Path, *flows: str) -> str:
    for name in flows:
        (folder / name).mkdir()
        (folder / name / "flow.json").touch()
    return str(folder)


def test_the_only_flow_is_meant(tmp_path: Path) -> None:
    where = storage(tmp_path, "shop")
    (tmp_path / "other").mkdir()  # no flow has anything in it
    (tmp_path / "file").touch()
    assert flow_here(None, where, None).flow == "shop"
    assert [one.flow for one in flows_in(Options(storage=where))] == ["shop"]


def test_of_several_flows_none_is_guessed(tmp_path: Path) -> None:
    where = storage(tmp_path, "shop", "bank")
    with pytest.raises(ConfigError, match="has 2 flows: bank, shop"):
        flow_here(None, where, None)
    assert flow_here("bank", where, None).flow == "bank"


def test_a_storage_without_flows_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no flow in"):
        flow_here(None, str(tmp_path / "nosuch"), None)
    with pytest.raises(ConfigError, match="there is no flow 'shop'"):
        flow_here("shop", str(tmp_path), None)
    assert flow_here("shop", str(tmp_path), None, must_have_run=False).flow == "shop"


def test_a_relative_storage_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"in {tmp_path}/cutline-data, which does not exist") as refused:
        flow_here(None, None, None)
    assert "working folder" in refused.value.next_step


def test_a_wrong_name_is_answered_with_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no flow 'shpo'") as refused:
        flow_here("shpo", storage(tmp_path, "shop", "bank"), None)
    assert refused.value.next_step == "did you mean shop? its flows are: bank, shop"
    assert refused.value.where == {"flow": "shpo"}
    with pytest.raises(ConfigError) as refused:
        flow_here("quite-another", str(tmp_path), None)
    assert refused.value.next_step == "its flows are: bank, shop"


def test_a_flow_that_starts_for_the_first_time_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    lock = FlowLock(tmp_path / "shop" / "lock", "shop")
    lock.acquire()
    with pytest.raises(ConfigError, match="is starting for the first time") as refused:
        flow_here(None, str(tmp_path), None)
    lock.release()
    assert refused.value.next_step == f"wait until it runs: cutline status shop --storage {tmp_path}"
    with pytest.raises(ConfigError, match="there is no flow in"):
        flow_here(None, str(tmp_path), None)


def test_a_name_that_no_flow_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlowDefinitionError, match="cannot be the name of a flow"):
        flow_here("../x", storage(tmp_path), None)


def test_a_file_is_no_storage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flow in (None, "shop"):
        with pytest.raises(StorageError, match="is a file, not a folder"):
            flow_here(flow, str(tmp_path / "file"), None)


def test_the_configuration_file_names_the_storage(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    where = storage(tmp_path / "data", "shop")
    (tmp_path / "own.toml").write_text(f'storage = "{where}"\n')
    assert flow_here(None, None, tmp_path / "own.toml").flow == "shop"
