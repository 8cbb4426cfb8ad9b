"""Random stories of one flow on two hosts, with real sinks and real kills: nothing is lost, nothing comes twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import cutline
from cutline.errors import CutlineError
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Parquet, SQLite
from tests.support.hosts import Kind, Story, Worker, a_worker
from tests.support.torture_flow import EVENTS, LATEST, Row


def parquet(config: dict[str, Any]) -> dict[str, Sink]:
    return {name: Parquet(Path(config["folder"], name)) for name in (EVENTS, LATEST)}


def delta(config: dict[str, Any]) -> dict[str, Sink]:
    return {name: Delta(Path(config["folder"], name)) for name in (EVENTS, LATEST)}


def upsert(config: dict[str, Any]) -> dict[str, Sink]:
    folder = Path(config["folder"])
    return {EVENTS: Delta(folder / EVENTS), LATEST: Delta(folder / LATEST, mode="upsert", key=["key"])}


def sqlite(config: dict[str, Any]) -> dict[str, Sink]:
    return {name: SQLite(Path(config["folder"], "tables.sqlite"), name) for name in (EVENTS, LATEST)}


def read_with(make: Any) -> Any:
    def read(targets: Path) -> Mapping[str, Sequence[Row]]:
        return {name: _rows(sink) for name, sink in make({"folder": str(targets)}).items()}

    return read


def _rows(sink: Sink) -> list[Row]:
    try:
        found = cutline.read(sink).to_arrow().to_pylist()
    except (CutlineError, OSError):
        return []  # nothing was published yet
    return [(row["id"], row["key"], row["value"]) for row in found]


KINDS = {
    "parquet": Kind(make=f"{__name__}:parquet", read=read_with(parquet)),
    "delta": Kind(make=f"{__name__}:delta", read=read_with(delta)),
    "upsert": Kind(make=f"{__name__}:upsert", read=read_with(upsert), only_newest=True),
    "sqlite": Kind(make=f"{__name__}:sqlite", read=read_with(sqlite)),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with a_worker() as one:
        yield one


def story(seed: int, tmp_path: Path, worker: Worker) -> Story:
    """The kinds of sinks, durabilities and ways to publish take turns."""
    kind = list(KINDS)[seed % 4]
    has_remote = seed // 4 % 3 != 0
    settings = {"durable": "remote"} if seed // 4 % 3 == 2 else {}
    publish = "at_once" if seed // 12 % 3 == 2 else "checkpoint"
    return Story(
        seed=seed,
        folder=tmp_path / "story",
        kind=KINDS[kind],
        worker=worker,
        has_remote=has_remote,
        settings=settings,
        publish=publish,
    )


@pytest.mark.kill
@pytest.mark.parametrize("seed", [0, 5, 6, 11, 27, 30])  # of each kind of sink, durability and way to publish
def test_a_story(seed: int, tmp_path: Path, worker: Worker) -> None:
    story(seed, tmp_path, worker).run(6)


@pytest.mark.soak
@pytest.mark.kill
@pytest.mark.parametrize("seed", range(12, 212))
def test_more_stories(seed: int, tmp_path: Path, worker: Worker) -> None:
    story(seed, tmp_path, worker).run(9)
