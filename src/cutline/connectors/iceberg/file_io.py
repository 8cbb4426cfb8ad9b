"""Files of a table's metadata, durable before a catalog names them.

pyiceberg syncs nothing that it writes, and a catalog's database syncs what it stores. So after a power cut the catalog
could name a file that is empty, and no reader could read the table.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from cutline.base.durable import fsync_dir, make_dir
from cutline.errors import SinkError

#: How a catalog is told to use ``SyncedFileIO``.
IMPLEMENTATION = f"{__name__}.SyncedFileIO"


def folder_of(location: str) -> Path:
    """The folder of a table, which the driver and all executors share."""
    scheme, netloc, path = urlparse(location)[:3] if "://" in location else ("file", "", location)
    path = path.removeprefix("file:")
    if scheme != "file" or netloc or not path.startswith("/"):
        raise SinkError(
            "the Iceberg sink writes to a mounted file system only, for now",
            next_step="give the table a location, or the catalog a warehouse, that the driver and all executors share",
            location=location,
        )
    return Path(path)


class SyncedFileIO(PyArrowFileIO):
    """As pyiceberg's own, but what is written to a mounted file system is durable when it is closed."""

    def new_output(self, location: str) -> PyArrowFile:
        scheme, _, path = self.parse_location(location, self.properties)
        if scheme != "file":
            return super().new_output(location)
        return _SyncedFile(location, path, self.fs_by_scheme("file", ""))


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        """Exclusive, unless it may overwrite: two writers never share a file."""
        path = Path(self._path)
        make_dir(path.parent)
        return _SyncedStream(io.FileIO(path, "w" if overwrite else "x"), path.parent)


class _SyncedStream(io.BufferedWriter):
    def __init__(self, raw: io.FileIO, folder: Path) -> None:
        super().__init__(raw)
        self._folder = folder

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.flush()
        os.fsync(self.fileno())
        super().close()
        fsync_dir(self._folder)
