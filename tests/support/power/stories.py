"""The stories that are recorded: one for each mode, and short ones in which a life ends badly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import cutline
from tests.support.power.living import LIVES
from tests.support.power.recording import Recording, record


@dataclass(frozen=True)
class Story:
    """Lives of one flow, one after the other on the same disk."""

    mode: str
    lives: tuple[str, ...] = LIVES
    #: What happens to the first life: see ``living.Trouble``.
    trouble: str = ""
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.mode} {self.trouble or '-'.join(self.lives)} {self.seed}".strip()

    def recorded(self, folder: Path) -> Recording:
        """Run it under strace in this folder, which is new."""
        disk = folder / "disk"
        disk.mkdir(parents=True)
        paths = os.pathsep.join([str(Path(cutline.__file__).parents[1]), os.getcwd()])  # the source under test
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
        command = ["-m", "tests.support.power.living", str(disk), self.mode, str(self.seed), self.trouble, *self.lives]
        traces = record(command, folder / "trace", environment=environment)
        assert len(traces) == len(self.lives)
        return Recording.read(disk, traces)
