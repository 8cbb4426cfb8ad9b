"""What a replaced host, whose generation has grown in a region of its own, does to its successor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cutline.errors import FencedError
from cutline.protocol.history import remote_claims
from tests.support.remote import copied, remote
from tests.support.running import running
from tests.support.sparkless import NUMBERS, SparklessFlow


@pytest.mark.parametrize("has_same_number", [False, True])
def test_a_replaced_host_overwrites_nothing_that_its_successor_has_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_same_number: bool
) -> None:
    """Not even if it has begun more generations for its regions than its successor leaves room for."""
    if has_same_number:
        monkeypatch.setattr(remote_claims, "_LOST_WITH_A_HOST", 1)
    settings = remote(tmp_path)
    old = SparklessFlow(tmp_path, **settings)
    try:
        old.emit(2)
        copied(old, old.checkpoint())
        shutil.rmtree(old.layout.spark_dirs / NUMBERS)
        old.fail(NUMBERS)  # a generation more, of which the remote tier has not heard
        other = tmp_path / "other"
        other.mkdir()
        (other / "table").symlink_to(tmp_path / "table")
        with running(other, **settings) as new:
            assert new.recovered.path == "remote"
            assert (new.recovered.generation == old.coordinator.generation()) is has_same_number
            new.emit(2)
            for _ in range(4):
                new.step(NUMBERS)  # in flight at the checkpoint
            future = new.request()
            new.wait(future.done)
            copied(new, future.result())
            there = (tmp_path / "remote/counting/channels").rglob("*")
            sealed = {path: path.read_bytes() for path in there if path.is_file()}
            # The old host does not know yet.
            for _ in range(8):
                old.step(NUMBERS)
            old.request()
            with pytest.raises(FencedError):
                old.run.await_termination(20)
            changed = [str(path) for path, content in sealed.items() if path.read_bytes() != content]
            assert not changed
    finally:
        old.stop()
