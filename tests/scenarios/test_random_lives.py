"""A flow that is killed again and again at random places, now and then with something lost: each number once.

Every seed is one story; ``CUTLINE_EXPLORE=500`` tells as many. A seed that ever failed stays in ``STORIES``.
"""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutline.base.crashpoints import POINTS
from cutline.config.options import ENVIRONMENT_PREFIX
from cutline.errors import CheckpointFailedError, RecoveryError
from tests.support.killing import is_killed_at
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

#: A row in flight is gone, and its reader fails, as Spark's would; or a file that a pending checkpoint waits for.
FAILING = (FileNotFoundError, ValueError, CheckpointFailedError)
PATIENCE = "3s"
STORIES = range(int(os.environ.get(f"{ENVIRONMENT_PREFIX}EXPLORE", "12")))


def live(storage: Path, seed: int, **more: Any) -> None:
    """One life: a random run, cut short by the kill or ending by itself."""
    chance = random.Random(seed)
    settings: dict[str, Any] = {
        "retain_checkpoints": chance.choice([1, 2, 3]),
        "max_concurrent_checkpoints": chance.choice([1, 2]),
        "mode": chance.choice(["aligned", "unaligned", "auto"]),
        "alignment_timeout": chance.choice(["1ms", "10ms"]),
        "channel_capacity_entries": 1_000,
        **more,
    }
    flow = SparklessFlow(storage, **settings)
    try:
        asked = []
        for _ in range(chance.randint(3, 25)):
            match chance.choice(["number", "number", "count", "count", "ask", "publish"]):
                case "number":
                    flow.step(NUMBERS)
                case "count":
                    flow.step(TOTALS)
                case "ask":
                    asked.append(flow.request(aligned=chance.random() < 0.3))
                case _:
                    flow.checkpoint()
        for future in asked:
            flow.wait(lambda future=future: future.done() or (not flow.step(TOTALS) and future.done()))  # type: ignore[misc]
            with suppress(CheckpointFailedError):  # subsumed by a later one
                future.result(0)
    finally:
        flow.stop()


def lose_something(storage: Path, chance: random.Random) -> None:
    """What checkpoints, logs and generations make good."""
    root = storage / "storage" / "counting"
    match chance.choice(["nothing", "nothing", "numbers", "totals", "both", "pins", "records"]):
        case "numbers" | "totals" as operator:
            shutil.rmtree(root / "spark" / operator, ignore_errors=True)
        case "both":
            shutil.rmtree(root / "spark", ignore_errors=True)
        case "pins":
            shutil.rmtree(root / "pins", ignore_errors=True)
        case "records":
            for path in root.glob("coordinator.sqlite*"):
                path.unlink()
        case _:
            pass


def spoil_something(storage: Path, chance: random.Random) -> None:
    """A lost file anywhere, or a bad block where checksums tell of it (Spark's files have theirs only on Spark)."""
    root = storage / "storage" / "counting"
    checked = ["checkpoints/*/*.json", "blobs/*/*", "channels/*/g*/*.json"]
    pattern = chance.choice([*checked, "channels/*/data/*", "spark/*/*/*/*"])
    files = sorted(path for path in root.glob(pattern) if path.is_file())
    if files:
        path = chance.choice(files)
        content = bytearray(path.read_bytes())
        path.unlink()
        if content and pattern in checked and chance.random() < 0.5:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)


@pytest.mark.parametrize("publish", ["checkpoint", "at_once"])
@pytest.mark.parametrize("seed", STORIES)
def test_whatever_happens_each_number_is_published_once(tmp_path: Path, seed: int, publish: str) -> None:
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 5)):
        point = f"{chance.choice(POINTS)}#{chance.choice([1, 1, 2, 3, 5])}"
        is_killed_at(point, partial(live, tmp_path, chance.randint(0, 10**6), publish=publish))
        lose_something(tmp_path, chance)
    flow = SparklessFlow(tmp_path, publish=publish)
    try:
        flow.emit(2)
        flow.drain()
        rows = flow.sink.rows()
    finally:
        flow.stop()
    assert rows == [[number, number + 1] for number in range(len(rows))]
    assert len(rows) >= 2


@pytest.mark.parametrize("seed", STORIES)
def test_whatever_is_spoiled_nothing_wrong_is_published(tmp_path: Path, seed: int) -> None:
    """A flow that cannot come back without loss says so; what it does publish is right."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 4)):
        point = f"{chance.choice(POINTS)}#{chance.choice([1, 2, 3, 5, 8])}"
        is_killed_at(point, partial(live_if_possible, tmp_path, chance.randint(0, 10**6)))
        lose_something(tmp_path, chance)
        spoil_something(tmp_path, chance)
    try:
        flow = SparklessFlow(tmp_path, checkpoint_timeout=PATIENCE)
    except RecoveryError:
        return
    try:
        with suppress(*FAILING):
            flow.emit(2)
            flow.drain()
        rows = flow.sink.rows()
    finally:
        flow.stop()
    assert rows == [[number, number + 1] for number in range(len(rows))]


def live_if_possible(storage: Path, seed: int) -> None:
    with suppress(RecoveryError, *FAILING):
        live(storage, seed, checkpoint_timeout=PATIENCE)
