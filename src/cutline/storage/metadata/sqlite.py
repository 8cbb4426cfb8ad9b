"""Metadata in one SQLite file: write-ahead log, full sync, one connection under one lock."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote

import msgspec

from cutline.base.storage_errors import storage_error
from cutline.errors import DamagedRecordError, FencedError, InvariantViolation, NotDone, UnknownFormatError
from cutline.model.cut import BarrierTerms
from cutline.model.history import Identity
from cutline.model.ids import Epoch, Generation, SinkId
from cutline.ports.metadata import EpochOutcome, PendingRecord

#: What waiting may help against; SQLite rolls the transaction back in each of these cases. After any other I/O error it
#: is unknown what the disk holds: only a start from the logs is safe.
_AWAY = {
    sqlite3.SQLITE_FULL: "there is no room on the disk of the coordinator's records",
    sqlite3.SQLITE_IOERR_SHMSIZE: "there is no room on the disk of the coordinator's records",
    sqlite3.SQLITE_CANTOPEN: "the coordinator's records cannot be opened",
    sqlite3.SQLITE_BUSY: "another process has locked the coordinator's records",
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER PRIMARY KEY, generation INTEGER NOT NULL, started_ms INTEGER NOT NULL,
    alignment_limit_ms INTEGER, is_binding INTEGER NOT NULL DEFAULT 0, ended_ms INTEGER,
    outcome TEXT, reason TEXT, details BLOB, alone TEXT);
CREATE TABLE IF NOT EXISTS pins (epoch INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS published (sink TEXT PRIMARY KEY, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS seen (sink TEXT PRIMARY KEY, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS announced (identity TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS recoveries (path TEXT PRIMARY KEY, count INTEGER NOT NULL);
"""


def address_for_reading(path: Path) -> str:
    """How SQLite opens a database that another process may write, without changing it."""
    # Without a write-ahead log the file is complete, and opening it as immutable leaves no files behind.
    has_log = path.with_name(f"{path.name}-wal").exists()
    return f"file:{quote(str(path.absolute()))}?mode=ro{'' if has_log else '&immutable=1'}"


class SqliteMetadata:
    """See ``cutline.ports.MetadataStore`` for what each method promises."""

    def __init__(self, path: Path, *, is_copy: bool = False) -> None:
        """``is_copy``: a copy in memory of the records as they are now; the file, and its writer, are left alone."""
        self._lock = threading.Lock()
        self._generation = Generation(0)
        with _explained():
            place = ":memory:" if is_copy else path
            self._db = sqlite3.connect(place, isolation_level=None, check_same_thread=False, timeout=30)
            if is_copy and path.exists():
                with contextlib.closing(sqlite3.connect(address_for_reading(path), uri=True, timeout=30)) as original:
                    original.backup(self._db)
                found = [line for (line,) in self._db.execute("PRAGMA integrity_check(1)")]
                if found != ["ok"]:
                    raise _damaged("; ".join(found))
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise UnknownFormatError(f"coordinator records have format {version}", path=path)
        with self._transaction():  # two processes may open it at the same time
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            # By the columns, not by the version: format 1 stored its number after it had created the tables.
            columns = {name for _, name, *_ in self._db.execute("PRAGMA table_info(epochs)")}
            if "alone" not in columns:
                self._db.execute("ALTER TABLE epochs ADD COLUMN alone TEXT")
            self._db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")

    def _read(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, _explained():
            return cast("list[tuple[Any, ...]]", self._db.execute(sql, values).fetchall())

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; a failed statement leaves neither a partial change nor a lock behind."""
        with self._lock, _explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def next_generation(self, at_least: Generation) -> Generation:
        with self._transaction():
            generation = Generation(max(self._counter("generation") + 1, at_least))
            self._take_generation(generation)
        return generation

    def advance_generation(self) -> Generation:
        with self._transaction():
            self._refuse_if_fenced()
            generation = Generation(self._counter("generation") + 1)
            self._take_generation(generation)
        return generation

    def _take_generation(self, generation: Generation) -> None:
        """Inside the transaction and its lock: no other thread may write for the old generation in between."""
        self._db.execute("INSERT OR REPLACE INTO counters VALUES ('generation', ?)", (generation,))
        self._generation = generation

    def check_fence(self) -> None:
        with self._lock, _explained():
            self._refuse_if_fenced()

    def _refuse_if_fenced(self) -> None:
        newest = self._counter("generation")
        if newest > self._generation:
            raise FencedError(
                f"generation {newest} has taken over",
                next_step="stop this process: another one runs the flow",
                generation=self._generation,
            )

    def _counter(self, name: str) -> int:
        row = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def _write_fenced(self, sql: str, values: tuple[Any, ...]) -> None:
        """One statement, which takes effect only while no process has claimed a newer generation."""
        with self._transaction():
            self._refuse_if_fenced()
            self._db.execute(sql, values)

    def last_epoch(self) -> Epoch:
        return Epoch(self._read("SELECT coalesce(max(epoch), 0) FROM epochs")[0][0])

    def last_completed(self) -> Epoch:
        ((newest,),) = self._read("SELECT max(epoch) FROM epochs WHERE outcome = 'completed'")
        return Epoch(newest or 0)

    def store_pending(self, record: PendingRecord) -> None:
        try:
            self._write_fenced(
                "INSERT INTO epochs (epoch, generation, started_ms, alignment_limit_ms, is_binding, alone) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    record.epoch,
                    record.generation,
                    record.terms.started_ms,
                    record.terms.alignment_limit_ms,
                    record.terms.is_binding,
                    record.terms.alone,
                ),
            )
        except sqlite3.IntegrityError as error:
            raise InvariantViolation("an epoch was used twice", epoch=record.epoch) from error

    def pending(self) -> list[PendingRecord]:
        rows = self._read(
            "SELECT epoch, generation, started_ms, alignment_limit_ms, is_binding, alone FROM epochs "
            "WHERE outcome IS NULL ORDER BY epoch"
        )
        return [
            PendingRecord(
                epoch=Epoch(epoch),
                generation=Generation(generation),
                terms=BarrierTerms(
                    alignment_limit_ms=limit_ms, is_binding=bool(is_binding), started_ms=started_ms, alone=alone
                ),
            )
            for epoch, generation, started_ms, limit_ms, is_binding, alone in rows
        ]

    def store_outcome(self, outcome: EpochOutcome) -> None:
        # If this file was lost, an epoch may be known only from its manifest: then its row is created here.
        self._write_fenced(
            "INSERT INTO epochs (epoch, generation, started_ms, ended_ms, outcome, reason, details) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (epoch) DO UPDATE SET "
            "ended_ms = excluded.ended_ms, outcome = excluded.outcome, reason = excluded.reason, "
            "details = excluded.details WHERE epochs.outcome IS NULL",
            (
                outcome.epoch,
                outcome.generation,
                outcome.started_ms,
                outcome.ended_ms,
                outcome.outcome,
                outcome.reason,
                msgspec.json.encode({**outcome.details, "code": outcome.code} if outcome.code else outcome.details),
            ),
        )

    def history(self, limit: int) -> list[EpochOutcome]:
        rows = self._read(
            "SELECT epoch, generation, started_ms, ended_ms, outcome, reason, details FROM epochs "
            "WHERE outcome IS NOT NULL ORDER BY epoch DESC LIMIT ?",
            limit,
        )
        return [_outcome(*row) for row in rows]

    def store_pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        sql = "INSERT OR IGNORE INTO pins VALUES (?)" if is_pinned else "DELETE FROM pins WHERE epoch = ?"
        self._write_fenced(sql, (epoch,))

    def pins(self) -> frozenset[Epoch]:
        return frozenset(Epoch(epoch) for (epoch,) in self._read("SELECT epoch FROM pins"))

    def store_published(self, sink: SinkId, epoch: Epoch) -> None:
        self._write_fenced("INSERT OR REPLACE INTO published VALUES (?, ?)", (sink, epoch))

    def store_seen(self, sink: SinkId, epoch: Epoch) -> None:
        self._write_fenced("INSERT OR REPLACE INTO seen VALUES (?, ?)", (sink, epoch))

    def seen(self) -> dict[SinkId, Epoch]:
        return {SinkId(sink): Epoch(epoch) for sink, epoch in self._read("SELECT sink, epoch FROM seen")}

    def published(self) -> dict[SinkId, Epoch]:
        return {SinkId(sink): Epoch(epoch) for sink, epoch in self._read("SELECT sink, epoch FROM published")}

    def store_announced(self, identity: Identity) -> None:
        self._write_fenced("INSERT OR IGNORE INTO announced VALUES (?)", (identity,))

    def announced(self) -> frozenset[Identity]:
        return frozenset(identity for (identity,) in self._read("SELECT identity FROM announced"))

    def issued(self) -> Generation:
        with self._lock:
            return Generation(self._counter("generation"))

    def note_run(self) -> None:
        self._write_fenced("INSERT OR REPLACE INTO counters VALUES ('has_run', ?)", (1,))

    def has_run(self) -> bool:
        with self._lock:
            return bool(self._counter("has_run"))

    def count_recovery(self, path: str) -> None:
        self._write_fenced(
            "INSERT INTO recoveries VALUES (?, 1) ON CONFLICT (path) DO UPDATE SET count = count + 1", (path,)
        )

    def recoveries(self) -> dict[str, int]:
        return dict(self._read("SELECT path, count FROM recoveries"))

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _damaged(why: str) -> DamagedRecordError:
    return DamagedRecordError(
        f"the coordinator's database cannot be read: {why}",
        next_step="see what else is damaged: cutline verify; then use a copy of the file from a backup",
        store="coordinator.sqlite",
    )


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns the errors that end when a resource is back into NotDone, and a damaged file into DamagedRecordError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0)  # errors of the Python module itself have none
        if code & 0xFF in _DAMAGED:
            raise _damaged(str(error)) from error
        if not isinstance(error, sqlite3.OperationalError):
            raise
        why = _AWAY.get(code) or _AWAY.get(code & 0xFF)
        if why is None:
            raise
        known = storage_error(error)
        raise NotDone(
            f"{why}: {error}", next_step=known.next_step if known is not None else "", store="coordinator.sqlite"
        ) from error


def change_pin(path: Path, epoch: Epoch, *, is_pinned: bool) -> None:
    """Pin or unpin an epoch. The caller holds the lock of a flow that does not run."""
    sql = "INSERT OR IGNORE INTO pins VALUES (?)" if is_pinned else "DELETE FROM pins WHERE epoch = ?"
    with contextlib.closing(sqlite3.connect(path, timeout=30)) as database, database:
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE IF NOT EXISTS pins (epoch INTEGER PRIMARY KEY)")
        database.execute(sql, (epoch,))


def forget_seen(path: Path, sink: SinkId) -> None:
    """Accept a sink's present content. The caller holds the lock of a flow that does not run."""
    with contextlib.closing(sqlite3.connect(path, timeout=30)) as database, database:
        database.execute("DELETE FROM seen WHERE sink = ?", (sink,))


def _outcome(
    epoch: int, generation: int, started: int, ended: int, outcome: Literal["completed", "aborted"], *more: Any
) -> EpochOutcome:
    reason, encoded = more
    details = msgspec.json.decode(encoded)
    return EpochOutcome(
        epoch=Epoch(epoch),
        generation=Generation(generation),
        started_ms=started,
        ended_ms=ended,
        outcome=outcome,
        reason=reason,
        code=details.pop("code", ""),
        details=details,
    )
