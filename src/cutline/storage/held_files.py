"""Holds files of a live directory by hard links: the part of a snapshot that the query waits for."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from cutline.base import durable
from cutline.base.names import are_relative, is_relative, shown
from cutline.errors import DamagedRecordError
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import HeldFiles
from cutline.ports.query_dir import FileSet


class FileHolder:
    """Held files belong to one process: those of an earlier process protect nothing and are removed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def prepare_folder(self) -> None:
        durable.make_dir(self._layout.pins)
        for leftover in self._layout.pins.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)

    def hold(self, operator: OperatorId, epoch: Epoch, spark_checkpoint_dir: Path, files: FileSet) -> HeldFiles:
        folder = self._layout.pin(epoch, operator)
        if not are_relative(files.names()):
            # The record could not be read again.
            strange = next((name for name in files.names() if not is_relative(name)), "")
            raise DamagedRecordError("a file of the snapshot has an odd name", path=shown(strange), operator=operator)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        paths: dict[str, Path] = {}
        for number, name in enumerate(files.names()):
            target = folder / str(number)
            try:
                os.link(spark_checkpoint_dir / name, target)
            except FileNotFoundError as error:
                raise DamagedRecordError("a file of the snapshot is gone", path=name, operator=operator) from error
            except OSError:
                shutil.copyfile(spark_checkpoint_dir / name, target)
            paths[name] = target
        return HeldFiles(operator=operator, epoch=epoch, files=files, paths=paths)

    def release(self, held: HeldFiles) -> None:
        """Their content is stored."""
        shutil.rmtree(self._layout.pin(held.epoch, held.operator), ignore_errors=True)

    def discard(self, epoch: Epoch) -> None:
        """Remove all files held for the epoch."""
        shutil.rmtree(self._folder(epoch), ignore_errors=True)

    def remove_empty(self, epoch: Epoch) -> None:
        with contextlib.suppress(OSError):
            self._folder(epoch).rmdir()

    def _folder(self, epoch: Epoch) -> Path:
        return self._layout.pins / f"{epoch:012d}"
