"""What a Delta table's log says about this sink: its commits, what they published, which version a rewind restores.

The log is read file by file, because deltalake's ``history`` omits commits without commitInfo and then numbers all
older ones wrongly: a rewind based on it could restore the wrong version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from cutline.base.decoding import decoder_of
from cutline.base.durable import fsync_dir, fsync_file
from cutline.base.logs import get_logger
from cutline.errors import InvariantViolation, SinkError
from cutline.model.ids import Epoch

_log = get_logger(__name__)

_APP_PREFIX = "cutline"
#: The key of a Mark in a commit's commitInfo.
MARK_KEY = "cutline"
_VERSION = re.compile(r"\d{20}\.json")
#: Actions that leave the rows and the schema as they are.
_HARMLESS = frozenset({"commitInfo", "txn"})


def app_id(flow: str, sink: str) -> str:
    """The application whose version in the table is the sink's newest epoch."""
    return f"{_APP_PREFIX}/{flow}/{sink}"


def rewound_id(flow: str, sink: str) -> str:
    """The application whose version is the highest epoch that a rewind removed."""
    return f"{app_id(flow, sink)}/rewound"


def claim_id(flow: str, sink: str) -> str:
    """The application whose version is the number of the newest claim: only its holder may publish."""
    return f"{app_id(flow, sink)}/claim"


def parts_of_app_id(app: str) -> tuple[str, str]:
    _, flow, sink = app.split("/")
    return flow, sink


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit of a Cutline sink did, stored in that commit."""

    app: str
    kind: Literal["publish", "rewind"]
    #: Newest published epoch before and after the commit.
    before: Epoch
    after: Epoch
    #: Identifies the published files; empty for a rewind.
    digest: str = ""
    format: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCommit:
    """One version of the table: what a sink needs to know of it."""

    version: int
    mark: Mark | None
    operation: str
    timestamp_ms: int
    #: Whether it may have changed rows or schema.
    is_change: bool
    #: Files it added to the table, relative to the table's folder, as named on disk.
    added: frozenset[str]
    #: Files it removed from the table; they are on disk until a vacuum.
    removed: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeltaLog:
    """The ``_delta_log`` folder of a table on a mounted file system."""

    folder: Path

    def commits(self, newest: int) -> Iterator[LoggedCommit]:
        """From version ``newest`` down, as far back as the log reaches. Lists no folder: a log can be very long."""
        for version in range(newest, -1, -1):
            try:
                text = self.file_of(version).read_text()
            except FileNotFoundError:  # log cleanup deleted the versions before a checkpoint
                return
            yield _parse(version, text)

    def find_publish(self, newest: int, app: str, published: Epoch, epoch: Epoch) -> LoggedCommit | None:
        """The commit that published this epoch, if it was not rewound and the log still reaches back to it.

        ``published``: the newest epoch. From there each publication names the one before it; this chain leaves out
        those that a rewind removed.
        """
        if epoch > published:
            return None
        standing = published
        for commit in self.commits(newest):
            mark = commit.mark
            if mark is None or mark.app != app or mark.kind != "publish" or mark.after != standing:
                continue
            if standing == epoch:
                return commit
            standing = mark.before
            if standing < epoch:
                return None
        return None

    def newest_of(self, newest: int, app: str) -> int | None:
        """The newest version that this sink made; None if it made none that the log still has."""
        marks = ((commit.version, commit.mark) for commit in self.commits(newest))
        own = (version for version, mark in marks if mark is not None and mark.app == app)
        return next(own, None)

    def rewind_target(self, newest: int, app: str, published: Epoch, epoch: Epoch) -> tuple[int, Epoch]:
        """The newest version in which no epoch above ``epoch`` was published, and the newest epoch in it.

        Raises SinkError if another writer changed the table since: that change would be lost.
        """
        current = published
        for commit in self.commits(newest):
            if current <= epoch:
                return commit.version, current
            mark = commit.mark
            if mark is not None and mark.app == app:
                if mark.after != current:
                    raise InvariantViolation(
                        f"version {commit.version} says it published {mark.after}, expected {current}", path=self.folder
                    )
                current = mark.before
            elif commit.is_change:
                raise SinkError(
                    f"another writer changed the table since (version {commit.version}, {commit.operation})",
                    next_step="restore the flow without rewinding this sink and delete the duplicate rows by hand, "
                    "or undo the other change first",
                    epoch=epoch,
                    path=self.folder.parent,
                )
        raise SinkError(
            "the table's log no longer reaches back to that epoch",
            next_step="rewind to a newer epoch; raise delta.logRetentionDuration to keep more for the next time",
            epoch=epoch,
            path=self.folder.parent,
        )

    def oldest_rewind(self, newest: int, app: str, published: Epoch) -> Epoch:
        """The oldest epoch for which ``rewind_target`` has an answer, and whose files no vacuum has deleted."""
        current = reachable = published
        #: Files that the version in question has and the disk has not.
        gone: set[str] = set()
        for commit in self.commits(newest):
            if current < reachable and gone:
                break
            reachable = min(reachable, current)
            mark = commit.mark
            if mark is not None and mark.app == app:
                current = mark.before
            elif commit.is_change:
                break
            deleted = {path for path in commit.removed if not (self.folder.parent / path).exists()}
            gone = (gone - commit.added) | deleted
        return reachable

    def named_since(self, newest: int, timestamp_ms: int) -> set[str]:
        """Every file that a commit since this time has added to the table, even if it was removed again."""
        named: set[str] = set()
        for commit in self.commits(newest):
            if commit.timestamp_ms < timestamp_ms:
                break
            named |= commit.added
        return named

    def make_durable(self, after: int, through: int) -> None:
        """Sync the versions in (after, through] and the folder. deltalake itself syncs nothing."""
        for version in range(after + 1, through + 1):
            path = self.file_of(version)
            if path.exists():
                fsync_file(path)
        fsync_dir(self.folder)

    def _newest_checkpoint(self) -> list[Path]:
        """The files of the newest checkpoint; none if there is no checkpoint."""
        checkpoints: dict[str, list[Path]] = {}
        for path in self.folder.glob("*.checkpoint*"):
            checkpoints.setdefault(path.name.partition(".")[0], []).append(path)
        return checkpoints[max(checkpoints)] if checkpoints else []

    def make_newest_checkpoint_durable(self) -> None:
        """The process that wrote it may have died before it was durable."""
        for path in self._newest_checkpoint()[:1]:
            self.make_checkpoint_durable(int(path.name.partition(".")[0]))

    def make_checkpoint_durable(self, version: int) -> None:
        """Sync the checkpoint of a version: a torn one would make the table unreadable."""
        for path in self.folder.glob(f"{version:020}.checkpoint*"):
            fsync_file(path)
        pointer = self.folder / "_last_checkpoint"
        if pointer.exists():
            fsync_file(pointer)
        fsync_dir(self.folder)

    def remove_torn_end(self) -> None:
        """Remove the newest versions and the newest checkpoint as far as a power cut has torn them.

        deltalake names a file before it is synced. Nothing rests on such a version: this sink syncs a version before
        its epoch counts as published. It must go, because no reader can read the table as long as it is there.
        """
        if not self.folder.is_dir():
            return
        removed = []
        names = sorted(path for path in self.folder.iterdir() if _VERSION.fullmatch(path.name))
        for path in reversed(names):
            if not _is_torn(path.read_bytes()):
                break
            removed.append(path)
        newest = self._newest_checkpoint()
        pointer = self.folder / "_last_checkpoint"
        if any(_is_torn_checkpoint(path) for path in newest):
            removed += newest
        if pointer.exists() and (set(newest) & set(removed) or _is_torn(pointer.read_bytes())):
            removed.append(pointer)  # readers list the folder instead
        for path in removed:
            _log.warning("torn_delta_file_removed", path=str(path))
            path.unlink(missing_ok=True)  # not synced: what reappears is removed at the next start

    def file_of(self, version: int) -> Path:
        """The file whose existence makes the version."""
        return self.folder / f"{version:020}.json"


def _is_torn(content: bytes) -> bool:
    """Whether a file of JSON lines is not as it was written."""
    try:
        actions: list[dict[str, Any]] = [msgspec.json.decode(line) for line in content.splitlines()]
        if not actions or not all(isinstance(action, dict) for action in actions):
            return True
        infos = (action["commitInfo"] for action in actions if "commitInfo" in action)
        found: Any = next((info.get(MARK_KEY) for info in infos), None)
        mark = _mark(found) if found is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True
    # deltalake writes the mark first and the sink's epoch after the files: without it, the end is missing.
    versions = {txn["appId"]: txn["version"] for action in actions if (txn := action.get("txn"))}
    return mark is not None and versions.get(mark.app) != mark.after


def _is_torn_checkpoint(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        return _is_torn(path.read_bytes())
    try:
        with open(path, "rb") as file:
            pq.ParquetFile(file).read()
    except (pa.ArrowException, OSError):
        return True
    return False


def _moves_rows_only(action: dict[str, Any]) -> bool:
    """As OPTIMIZE does: the same rows in other files."""
    return all(kind in ("add", "remove") and not body.get("dataChange", True) for kind, body in action.items())


def _mark(found: Any) -> Mark:
    return decoder_of(Mark).decode(msgspec.json.encode(found))


def _parse(version: int, text: str) -> LoggedCommit:
    actions: list[dict[str, Any]] = [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
    info: dict[str, Any] = {}
    added: set[str] = set()
    removed: set[str] = set()
    is_change = False
    for action in actions:
        info = action.get("commitInfo") or info
        if add := action.get("add"):
            added.add(unquote(add["path"]))
        if remove := action.get("remove"):
            removed.add(unquote(remove["path"]))
        is_change = is_change or not (_HARMLESS.issuperset(action) or _moves_rows_only(action))
    mark = info.get(MARK_KEY)
    return LoggedCommit(
        version=version,
        mark=_mark(mark) if mark is not None else None,
        operation=info.get("operation", "unknown operation"),
        # Without a time it must count as recent.
        timestamp_ms=info.get("timestamp", 1 << 62),
        is_change=is_change,
        added=frozenset(added),
        removed=frozenset(removed),
    )
