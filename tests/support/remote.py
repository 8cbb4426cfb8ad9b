"""A remote tier for flows without Spark: its options, the loss of a host, faults of its store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutline.objects import open_store
from cutline.ports.objects import ObjectStore
from cutline.tiers.remote_tier import RemoteTier
from tests.support.sparkless import SparklessFlow


def remote(tmp_path: Path) -> dict[str, Any]:
    return {"remote": str(tmp_path / "remote"), "retain_checkpoints": 2}


def lose_host(tmp_path: Path) -> None:
    """Everything but what is elsewhere: the remote tier and the published table."""
    shutil.rmtree(tmp_path / "storage")


def replica_of(flow: SparklessFlow, tmp_path: Path) -> RemoteTier:
    return RemoteTier.open(open_store(str(tmp_path / "remote" / "counting")), flow.layout)


def copied(flow: SparklessFlow, epoch: int) -> None:
    flow.wait(lambda: flow.run.wait_remote(epoch, timeout=0.01))


class Faults:
    """Stands between the flow and its object store, and fails what the test says."""

    def __init__(self) -> None:
        #: (operation, path) → the error it ends with, before or after it has taken effect.
        self.failing: Callable[[str, str], Exception | None] | None = None
        self.failing_after: Callable[[str, str], Exception | None] | None = None

    def injected(self, opener: str = "cutline.objects.open_store") -> Any:
        def opened(url: str, options: Any = None) -> ObjectStore:
            return _Faulty(open_store(url, options or {}), self)

        patch = pytest.MonkeyPatch()
        patch.setattr(opener, opened)
        return _Undone(patch)


class _Undone:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


class _Faulty:
    def __init__(self, store: ObjectStore, faults: Faults) -> None:
        self._store = store
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._store, name)
        if not callable(inner):
            return inner

        def call(*values: Any) -> Any:
            path = str(values[0]) if values else ""
            before, after = self._faults.failing, self._faults.failing_after
            if before is not None and (error := before(name, path)) is not None:
                raise error
            result = inner(*values)
            if after is not None and (error := after(name, path)) is not None:
                raise error
            return result

        return call
