"""A generator keeps nothing: it gives the same rows again, or its options have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.connectors.generator.guard import moved
from cutline.connectors.generator.rows import KIND, GeneratorPosition, GeneratorSettings
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import LostInputError
from cutline.model.ids import BatchId
from cutline.model.plan import PlannedSource
from cutline.ports.inspection import FileProblem
from cutline.spark_dir import skip_input, source_check
from cutline.spark_dir.offsets import load_offsets

GUARD = ReplayGuard()

SETTINGS = GeneratorSettings(seed=7, keys=10, rows=1000)


def planned(**changes: Any) -> PlannedSource:
    return PlannedSource(format=KIND, settings=msgspec.json.encode(msgspec.structs.replace(SETTINGS, **changes)))


def at(row: int, **changes: Any) -> bytes:
    position = GeneratorPosition(seed=7, keys=10, first=0, row=row)
    return msgspec.json.encode(msgspec.structs.replace(position, **changes))


def live_dir(folder: Path, *rows: int, committed: int) -> Path:
    """As many batches as there are rows; the last may be planned only."""
    for number, row in enumerate(rows):
        (folder / "offsets").mkdir(parents=True, exist_ok=True)
        (folder / "offsets" / str(number)).write_bytes(b'v1\n{"conf":{}}\n' + at(row))
    (folder / "commits").mkdir(exist_ok=True)
    for number in range(committed + 1):
        (folder / "commits" / str(number)).write_text("v1\n{}")
    return folder


def problems(live: Path, row: int, *sources: PlannedSource) -> list[FileProblem]:
    return list(source_check.check_sources(GUARD, {"0": at(row)}, live, sources).problems)


def test_with_the_same_options_nothing_is_missing(tmp_path: Path) -> None:
    live = live_dir(tmp_path, 300, 600, committed=1)
    assert problems(live, 300, planned()) == problems(live, 300, planned(rows=5000)) == []
    assert problems(live, 300, planned(seed=8), planned()) == [], "another generator beside it"
    assert source_check.check_sources(GUARD, {"0": at(300)}, live) == ([], []), (
        "nobody knows the options; the guard has nothing to note"
    )


def test_other_options_would_be_other_rows(tmp_path: Path) -> None:
    live = live_dir(tmp_path, 300, 600, committed=1)
    (found,) = problems(live, 300, planned(seed=8, keys=20))
    assert (found.path, found.parts) == ("generator with seed 7: rows 300 to 599", 300)
    assert "seed was 7, is 8, keys was 10, is 20" in found.problem
    (found,) = problems(live, 600, planned(first=1))
    assert (found.path, found.parts) == ("generator with seed 7: everything from row 600 on", 0)


def test_rows_that_it_does_not_make_any_more_are_named(tmp_path: Path) -> None:
    live = live_dir(tmp_path, 300, 600, committed=1)
    (found,) = problems(live, 300, planned(rows=450))
    assert (found.path, found.problem, found.parts) == (
        "generator with seed 7: rows 450 to 599",
        "it has only 450 rows now",
        150,
    )
    (found,) = problems(live, 300, planned(rows=100))
    assert found.path == "generator with seed 7: rows 300 to 599"


def test_a_query_that_goes_on_has_its_position_moved_into_the_new_rows(tmp_path: Path) -> None:
    live = live_dir(tmp_path, 300, 600, committed=0)
    source = planned(seed=8)
    assert skip_input.lost_ahead(GUARD, live, [planned()]) == []
    assert [problem.parts for problem in skip_input.lost_ahead(GUARD, live, [source])] == [300]
    skip_input.skip_lost(GUARD, live, live, [source])
    assert [load_offsets(str(live), BatchId(batch)).positions["0"] for batch in (0, 1)] == [
        at(0, seed=8),
        at(300, seed=8),
    ]
    assert skip_input.lost_ahead(GUARD, live, [source]) == []


def test_a_position_is_cut_to_the_rows_there_are() -> None:
    shorter = planned(rows=450).settings
    assert shorter is not None
    assert moved([at(300), at(600)], [shorter]) == [at(300), at(450)]
    assert moved([at(300), at(600)], []) == [at(300), at(600)]


def test_which_of_several_generators_it_was_cannot_be_guessed() -> None:
    others = [one for source in (planned(seed=8), planned(seed=9)) if (one := source.settings) is not None]
    with pytest.raises(LostInputError, match="reads 2 generators"):
        moved([at(300)], others)


@pytest.mark.parametrize(
    ("source", "is_guarded"),
    [
        (planned(), True),
        (PlannedSource(format="cutline_nats"), True),
        (PlannedSource(format="json", folder="/in"), True),
        (PlannedSource(format="json", folder="file:///in"), True),
        (PlannedSource(format="json", folder="s3a://bucket/in"), False),
        (PlannedSource(format="kafka"), True),
        (PlannedSource(format="rate"), False),
    ],
)
def test_whether_a_source_is_guarded_is_known_before_it_reads(source: PlannedSource, is_guarded: bool) -> None:
    assert (GUARD.why_not_guarded(source) is None) == is_guarded
