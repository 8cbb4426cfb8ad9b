"""Checkpoints that lie elsewhere, every kind of their files spoilt in turn: named, and never restored from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.errors import CutlineError
from tests.support.remote import copied, lose_host, remote
from tests.support.running import assert_each_once, drained, running
from tests.support.sparkless import NUMBERS, SparklessFlow

KINDS = {
    "manifest": "checkpoints/*/manifest.json",
    "record": "checkpoints/*/totals.g*.json",
    "blob": "blobs/*/*",
    "entry": "channels/numbers/g*/*.json",
    "segment": "channels/numbers/data/*",
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


SPOIL: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut short": cut_short, "deleted": Path.unlink}


def verify(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, object]]:
    where = ["--flow", "counting", "--storage", str(tmp_path / "storage"), "--json"]
    result = CliRunner().invoke(app, ["verify", *arguments, *where], env={"CUTLINE_REMOTE": str(tmp_path / "remote")})
    return result.exit_code, json.loads(result.stdout) if result.exit_code < 2 else {}


def two_remote_checkpoints(tmp_path: Path) -> None:
    """The newer one with rows in flight, so that it needs entries and segments."""
    with running(tmp_path, **remote(tmp_path)) as flow:
        flow.emit(2)
        copied(flow, flow.checkpoint())
        flow.step(NUMBERS)
        flow.step(NUMBERS)
        future = flow.request()
        flow.wait(future.done)
        copied(flow, future.result())


def newest_only(root: Path, pattern: str) -> Path:
    """A file that only the newest checkpoint needs."""
    if "checkpoints" in pattern:
        return max(root.glob(pattern))
    return max(root.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("how", SPOIL)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_remote_tier_is_named_and_never_restored(tmp_path: Path, kind: str, how: str) -> None:
    two_remote_checkpoints(tmp_path)
    assert verify(tmp_path, "--remote", "--all")[0] == 0
    spoilt = newest_only(tmp_path / "remote" / "counting", KINDS[kind])
    SPOIL[how](spoilt)
    code, report = verify(tmp_path, "--remote", "--all")
    if (kind, how) == ("manifest", "deleted"):
        assert code == 0, "then it is no checkpoint"
    else:
        assert code == 1
        named = json.dumps(report["epochs"])
        assert spoilt.name.removesuffix(".zst") in named or "manifest" in named
        assert '"epoch": 2' in named
    lose_host(tmp_path)
    try:
        flow = SparklessFlow(tmp_path, **remote(tmp_path))
    except CutlineError:
        return  # refused, with its reason: nothing was restored
    try:
        assert (flow.recovered.path, flow.recovered.restored_epoch) == ("remote", 1), "the last good one"
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())
    finally:
        flow.stop()


@pytest.mark.parametrize("how", SPOIL)
@pytest.mark.parametrize("kind", ["manifest", "record", "blob", "entry"])
def test_damage_in_a_savepoint_is_named(tmp_path: Path, kind: str, how: str) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        drained(flow, "good")
    assert verify(tmp_path, "good")[0] == 0
    spoilt = newest_only(flow.layout.savepoint("good"), KINDS[kind])
    SPOIL[how](spoilt)
    code, report = verify(tmp_path, "good")
    assert code == 1
    assert spoilt.name in json.dumps(report["epochs"])


def test_an_unknown_savepoint_cannot_be_looked_at(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        flow.emit(1)
    assert verify(tmp_path, "nothing")[0] == 2
