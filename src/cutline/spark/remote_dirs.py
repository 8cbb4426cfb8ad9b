"""Spark's live directories on a file system that Spark opens: HDFS, an object store, any other of its Hadoop client.

Executors on several machines write state there. Cutline works on a mirror in the flow's folder: the mirror is updated
before it is read, and published before a query starts on a directory that was built here. A file beside each directory
marks it as completely published; from then on Spark's directory is authoritative, before that the mirror is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.errors import DamagedRecordError, NotDone
from cutline.model.ids import FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.objects.waiting import wait_for_store
from cutline.spark.hadoop_errors import asking_hadoop

#: Files that Spark writes atomically under a name that no other content ever gets, if state files have unique names.
#: RocksDB's tables are not among them: Spark copies them gradually.
_FINAL = re.compile(r"\d+(_[0-9a-f-]+)?(\.changelog|\.zip)?(\.crc)?")
_KIND = "live-dirs"
#: In a mirror that was published.
_PUBLISHED = ".cutline-in-place"
_GENERATION = re.compile(r"g\d{6}")
#: How much older than this machine's clock a whole second must be to say that a file has not changed since.
_SETTLED_SECONDS = 3.0
#: Stored times may differ by rounding.
_CLOCK_SECONDS = 0.001


class _Listing(dict[str, int]):
    """Names in a folder, each with its index in the file system's listing."""

    def __init__(self, found: Any, indexes: dict[str, int]) -> None:
        super().__init__(indexes)
        self.found = found


class _Home(msgspec.Struct, frozen=True, kw_only=True):
    """Where the directories of a flow's folder are. Each newly created folder gets its own place: a flow that starts
    over, or a replaced host, must not find directories of the same names that belong to another one.
    """

    base: str
    url: str


def settle_live_dirs(
    session: SparkSession, layout: Layout, base: str, flow: FlowName, *, are_names_final: bool
) -> HadoopDirs | None:
    """The directories below ``base``; None if it is empty: then they are in the flow's folder.

    If they were elsewhere so far, they are downloaded first; after a kill, the next start repeats that.
    """
    path, base = layout.live_home, base.rstrip("/")
    before = records.load(_KIND, path, _Home) if path.exists() else _Home(base="", url="")
    home = before
    if base != before.base:
        former = HadoopDirs(session, before.url, layout.spark_dirs, are_names_final=False) if before.url else None
        if former is not None:
            for mirror in layout.spark_dirs.glob("*/g??????"):
                # A directory that is gone keeps its mark: its mirror is out of date and must not be published.
                with contextlib.suppress(DamagedRecordError):
                    former.fetch(mirror)
                    (mirror / _PUBLISHED).unlink(missing_ok=True)
        home = _Home(base=base, url=f"{base}/{flow}/{secrets.token_hex(4)}" if base else "")
        durable.replace(path, records.encode(_KIND, home))
        if former is not None:
            former.remove()
    if not home.url:
        return None
    dirs = HadoopDirs(session, home.url, layout.spark_dirs, are_names_final=are_names_final)
    wait_for_store(dirs.check, flow=flow)
    return dirs


class HadoopDirs:
    """See ``cutline.ports.LiveDirs``."""

    def __init__(self, session: SparkSession, base: str, mirrors: Path, *, are_names_final: bool) -> None:
        """``base``: a URL below which every operator gets a folder. ``mirrors``: the folder of all mirrors.

        ``are_names_final``: the state backend never writes other content under a name that it has used.
        """
        self._are_names_final = are_names_final
        self._jvm: Any = session._jvm
        self._gateway: Any = session.sparkContext._gateway
        context: Any = session.sparkContext._jsc
        self._configuration = context.hadoopConfiguration()
        self._base = base.rstrip("/")
        self._mirrors = mirrors
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        with asking_hadoop(base):
            self._files = self._path(self._base).getFileSystem(self._configuration)

    # ------------------------------------------------------------------ see the port

    def url(self, mirror: Path) -> str:
        return f"{self._base}/{mirror.relative_to(self._mirrors).as_posix()}"

    def read(self, mirror: Path, name: str) -> bytes:
        # Not through the mirror: a concurrent fetch would remove the file from it as unknown.
        with tempfile.TemporaryDirectory(prefix="cutline-live-") as folder:
            self._copy(f"{self.url(mirror)}/{name}", held := Path(folder) / "file")
            return held.read_bytes()

    def has(self, mirror: Path, name: str) -> bool:
        return self._exists(f"{self.url(mirror)}/{name}")

    def fetch(self, mirror: Path) -> None:
        with self._locks[mirror]:
            if self._is_in_place(mirror):
                self._fetch(self.url(mirror), mirror)

    def publish(self, mirror: Path) -> None:
        with self._locks[mirror]:
            if not self._is_in_place(mirror):
                self._publish(mirror)
            self._drop_others(mirror)

    def _is_in_place(self, mirror: Path) -> bool:
        """A published directory is never published again: Spark has continued in it, and the mirror is out of date."""
        if self._exists(self._note(mirror)):
            if not (mirror / _PUBLISHED).exists() and mirror.is_dir():  # killed before it could be marked
                durable.replace(mirror / _PUBLISHED, b"")
            return True
        if (mirror / _PUBLISHED).exists():
            raise DamagedRecordError("Spark's published directory is gone", path=self.url(mirror))
        return False

    def keep(self, operators: Collection[OperatorId]) -> None:
        with contextlib.suppress(NotDone, FileNotFoundError):
            for name in self._listed(self._base):
                if name not in operators:
                    with asking_hadoop(name):
                        self._files.delete(self._path(f"{self._base}/{name}"), True)

    def check(self) -> None:
        """Ask the file system anything. Raises StoreError if it does not answer."""
        self._exists(self._base)

    def remove(self) -> None:
        """Remove all directories, if the file system can be reached."""
        with contextlib.suppress(NotDone, FileNotFoundError), asking_hadoop(self._base):
            self._files.delete(self._path(self._base), True)

    # ------------------------------------------------------------------ inside

    def _publish(self, mirror: Path) -> None:
        place = self.url(mirror)
        if not mirror.is_dir():
            raise DamagedRecordError("there is no mirror from which to publish Spark's directory", path=place)
        with asking_hadoop(place):
            self._files.delete(self._path(place), True)
            self._files.mkdirs(self._path(place))
            for name in sorted(os.listdir(mirror)):
                source, target = self._path(f"file://{mirror / name}"), self._path(f"{place}/{name}")
                if not name.startswith("."):  # Hadoop's twins: the file system there has its own
                    self._files.copyFromLocalFile(False, True, source, target)
            crashpoint("live-dir-half")
            self._files.create(self._path(self._note(mirror)), True).close()
        durable.replace(mirror / _PUBLISHED, b"")

    def _drop_others(self, mirror: Path) -> None:
        """Removes the directories of generations that no operator runs on."""
        folder = self.url(mirror).rpartition("/")[0]
        for name in self._listed(folder):
            if _GENERATION.match(name) and name.partition(".")[0] != mirror.name:
                with contextlib.suppress(NotDone, FileNotFoundError), asking_hadoop(folder):
                    self._files.delete(self._path(f"{folder}/{name}"), True)

    def _fetch(self, place: str, mirror: Path) -> None:
        """Updates the mirror with what is new, changed or gone."""
        mirror.mkdir(parents=True, exist_ok=True)
        try:
            there = self._listed(place)
        except FileNotFoundError:  # removed meanwhile, by Spark
            there = _Listing(None, {})
        here = {name for name in os.listdir(mirror) if not durable.is_temporary(name) and name != _PUBLISHED}
        for name in here - set(there):
            _remove(mirror / name)
        # Commits last: everything that a commit relies on must be in the mirror. After a failure, it is fetched again.
        for name, index in sorted(there.items(), key=lambda item: item[0] == "commits"):
            if name not in here or not self._is_final(mirror / name):
                with contextlib.suppress(FileNotFoundError):
                    self._fetch_one(f"{place}/{name}", mirror / name, there.found[index])

    def _is_final(self, path: Path) -> bool:
        return self._are_names_final and bool(_FINAL.fullmatch(path.name)) and not path.is_dir()

    def _fetch_one(self, source: str, target: Path, there: Any) -> None:
        """Every property of a file costs one call to the JVM, so only the needed ones are read."""
        with asking_hadoop(source):
            if there.isDirectory():
                self._fetch(source, target)
                return
            size_bytes, changed_s = int(there.getLen()), int(there.getModificationTime()) / 1000
        if not _is_same(target, size_bytes, changed_s):
            self._copy(source, target)
            # An object store tells whole seconds: a file that has just been written may be written again in this one.
            if changed_s % 1 or time.time() - changed_s > _SETTLED_SECONDS:
                os.utime(target, (changed_s, changed_s))

    def _copy(self, source: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        spool = durable.temporary_beside(target)
        with asking_hadoop(source):
            self._files.copyToLocalFile(False, self._path(source), self._path(f"file://{spool}"), True)
        os.replace(spool, target)

    def _listed(self, folder: str) -> _Listing:
        """Names that Spark itself sees, with as few calls to the JVM as possible."""
        with asking_hadoop(folder):
            found = self._files.listStatus(self._path(folder))
            # S3A returns an array of a class of its own, for which py4j finds no method.
            statuses = self._gateway.new_array(self._jvm.org.apache.hadoop.fs.FileStatus, count := len(found))
            self._jvm.java.lang.System.arraycopy(found, 0, statuses, 0, count)
            paths = self._jvm.org.apache.hadoop.fs.FileUtil.stat2Paths(statuses)
            text: str = self._jvm.org.apache.commons.lang3.ArrayUtils.toString(paths)
        names = [one.rpartition("/")[2] for one in text.strip("{}").split(",") if one]
        return _Listing(found, {name: index for index, name in enumerate(names) if not _is_hidden(name)})

    def _exists(self, place: str) -> bool:
        with asking_hadoop(place):
            return bool(self._files.exists(self._path(place)))

    def _note(self, mirror: Path) -> str:
        return f"{self.url(mirror)}.in-place"

    def _path(self, place: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(place)


def _is_hidden(name: str) -> bool:
    """Being written: Spark renames a file when it is whole."""
    return name.startswith(".") or name.endswith(".tmp")


def _is_same(path: Path, size_bytes: int, changed_s: float) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_size == size_bytes and abs(status.st_mtime - changed_s) < _CLOCK_SECONDS


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
