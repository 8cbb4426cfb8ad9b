"""Unit tests stand where their module stands: ``src/cutline/a/b.py`` is tested in ``tests/unit/a/test_b.py``.

A module with many tests has several files, ``test_b_topic.py``. Stories of several modules are in tests/scenarios.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES = TESTS.parents[1] / "src" / "cutline"
#: Tests of the repository as a whole, which have no module.
OF_THE_REPOSITORY = {
    "test_architecture.py",
    "test_cli_reference.py",
    "test_house.py",
    "test_live_screens.py",
    "test_mirror.py",
    "test_options_table.py",
    "test_pictures.py",
    "test_ports.py",
    "test_public_names.py",
    "test_samples.py",
    "test_state_diagrams.py",
    "test_words.py",
}

FILES = sorted(
    path.relative_to(TESTS)
    for path in TESTS.rglob("*.py")
    if path.name != "conftest.py" and str(path.relative_to(TESTS)) not in OF_THE_REPOSITORY
)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_unit_test_stands_where_its_module_stands(path: Path) -> None:
    folder = SOURCES / path.parent
    assert folder.is_dir(), f"there is no src/cutline/{path.parent}: is this a scenario?"
    words = path.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    assert path.stem.startswith("test_"), "what tests share is in tests/support"
    modules = [name for name in names if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()]
    assert modules, f"src/cutline/{path.parent} has no module {' or '.join(names)}"
