"""The three lives run as ARCHITECTURE.md tells them, and in one direction: no module calls back into its caller."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.layer_picture import PAGE
from tools.life_traces import Trace, lives

#: A retry calls what it repeats; a collection asks the checkpoints which blobs they need when no blob is being added.
CALLED_BACK = {
    ("cutline.base.retry", "cutline.objects.folder"),
    ("cutline.storage.blobs", "cutline.storage.checkpoints"),
    # Asks before each deletion whether another process runs the flow, or the flow stops.
    ("cutline.coordinator.retention", "cutline.storage.checkpoints"),
    # What an epoch holds is read when it is new; how far a download is, a person sees.
    ("cutline.storage.checkpoints", "cutline.storage.reached"),
    ("cutline.tiers.download", "cutline.tiers.driver_transfer"),
    # A decorator that checks the arguments of the public API.
    ("cutline.config.arguments", "cutline.flow"),
}
CHAPTERS = {
    "batch": "Life of a batch",
    "checkpoint": "Life of a checkpoint",
    "restore after host loss": "Life of a recovery",
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder: Path = tmp_path_factory.mktemp("lives")
    return lives(folder)


def stops(life: str) -> list[str]:
    """The modules that the first lines of the chapter name, less Spark's: these lives run without it."""
    _, _, chapter = PAGE.read_text().partition(f"## {CHAPTERS[life]}\n\n")
    named = re.findall(r"`([a-z_/]+)`", chapter.partition("\n\n")[0])
    return [name for name in named if not name.startswith("spark/")]


@pytest.mark.parametrize("life", CHAPTERS)
def test_a_life_passes_through_every_stop_that_the_architecture_names(life: str, traces: dict[str, Trace]) -> None:
    assert len(stops(life)) >= 5
    passed = {name.removeprefix("cutline.").replace(".", "/") for name in traces[life].modules}
    assert [stop for stop in stops(life) if stop not in passed] == []


@pytest.mark.parametrize("life", CHAPTERS)
def test_a_life_goes_in_one_direction(life: str, traces: dict[str, Trace]) -> None:
    assert traces[life].two_way() <= CALLED_BACK
