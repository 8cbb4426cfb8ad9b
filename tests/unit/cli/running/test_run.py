"""Which flows a command runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cutline.cli.running.run import _check_number, _load_flows
from cutline.errors import ConfigError, FlowDefinitionError


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files with a flow each."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_text(f'import cutline\nflow = cutline.Flow("{path.stem}")\n')
    return paths


def test_each_file_has_its_flow(files: list[Path]) -> None:
    assert list(_load_flows(files, None)) == ["a", "b"]


def test_one_flow_is_not_run_twice(files: list[Path]) -> None:
    files[1].write_text(files[0].read_text())
    with pytest.raises(FlowDefinitionError, match="two files define the flow a"):
        _load_flows(files, None)


@pytest.mark.parametrize(("name", "is_restored"), [("a", False), (None, True)])
def test_options_for_one_flow_are_refused_with_several(files: list[Path], name: str | None, is_restored: bool) -> None:
    with pytest.raises(ConfigError, match="are for one flow"):
        _check_number(files, name, is_restored=is_restored)
