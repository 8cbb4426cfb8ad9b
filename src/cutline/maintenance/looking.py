"""Gathers the findings about one epoch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cutline.errors import CutlineError
from cutline.maintenance.findings import OTHER_EPOCH, EpochReport, Finding
from cutline.model.ids import OperatorId
from cutline.model.layout import Layout


class Look:
    """Records problems and counts what was read."""

    def __init__(self, report: EpochReport, on_read: Callable[[int], None], layout: Layout) -> None:
        self.report = report
        self._on_read = on_read
        self._layout = layout

    def problem(
        self, path: Path, text: str, operator: OperatorId | None = None, *, next_step: str = OTHER_EPOCH
    ) -> None:
        finding = Finding(
            epoch=self.report.epoch,
            operator=operator,
            path=name_below(self._layout, path),
            problem=text,
            next_step=next_step,
        )
        if finding not in self.report.problems:
            self.report.problems.append(finding)

    def count(self, path: Path) -> None:
        """Count a record that was read."""
        try:
            self.add(path.stat().st_size)
        except OSError:
            self.add(0)

    def add(self, size_bytes: int) -> None:
        self.report.checked_files += 1
        self.report.checked_bytes += size_bytes
        self._on_read(size_bytes)


def name_below(layout: Layout, path: Path) -> str:
    """The path relative to the flow's folder if it is in there."""
    return str(path.relative_to(layout.root)) if path.is_relative_to(layout.root) else str(path)


def text_of(error: CutlineError | OSError) -> str:
    """The error's text without the path, which the finding names anyway."""
    return error.what if isinstance(error, CutlineError) else f"it cannot be read: {error.strerror}"


def names_in_folder(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
