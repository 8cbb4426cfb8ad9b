"""Inspects the coordinator's database without changing it, also while another process writes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from cutline.base.retry import Retry
from cutline.model.ids import Epoch, Generation, OperatorId, SinkId
from cutline.ports.inspection import CompletedEpoch, CoordinatorRecords
from cutline.storage.metadata.sqlite import address_for_reading

#: Between two reads a writer may have started or ended, and the write-ahead log with it.
_READS = Retry(limit=3)


class _Details(msgspec.Struct, frozen=True):
    operators: dict[OperatorId, msgspec.Raw] = {}


_DETAILS = msgspec.json.Decoder(_Details)


def inspect_coordinator(path: Path) -> CoordinatorRecords:
    """What the database says, or what is wrong with it."""
    if not path.exists():
        return CoordinatorRecords(problem="the coordinator's database is missing")
    problem = ""
    for _ in _READS.attempts():
        try:
            return _inspect(path)
        except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            problem = f"the coordinator's database cannot be read: {error}"
    return CoordinatorRecords(problem=problem)


def _inspect(path: Path) -> CoordinatorRecords:
    with closing(sqlite3.connect(address_for_reading(path), uri=True, timeout=30)) as database:
        found = [line for (line,) in database.execute("PRAGMA integrity_check(5)")]
        if found != ["ok"]:
            raise sqlite3.DatabaseError("; ".join(found))
        epochs = database.execute(
            "SELECT epoch, generation, details FROM epochs WHERE outcome = 'completed' ORDER BY epoch"
        ).fetchall()
        # An earlier version, which had fewer tables, may have written the file; the next start adds them.
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        pins = database.execute("SELECT epoch FROM pins").fetchall() if "pins" in tables else []
        published = database.execute("SELECT sink, epoch FROM published").fetchall() if "published" in tables else []
        seen = database.execute("SELECT sink, epoch FROM seen").fetchall() if "seen" in tables else []
        recoveries = database.execute("SELECT coalesce(sum(count), 0) FROM recoveries").fetchone()[0]
        open_from = database.execute(
            "SELECT coalesce(min(CASE WHEN outcome IS NULL THEN epoch END), max(epoch) + 1, 1) FROM epochs"
        ).fetchone()[0]
        taken = database.execute("SELECT value FROM counters WHERE name = 'generation'").fetchone()
    return CoordinatorRecords(
        completed=[
            CompletedEpoch(Epoch(epoch), Generation(generation), frozenset(_DETAILS.decode(details or b"{}").operators))
            for epoch, generation, details in epochs
        ],
        pins=frozenset(Epoch(epoch) for (epoch,) in pins),
        recoveries=recoveries,
        open_from=Epoch(open_from),
        generation=Generation(taken[0] if taken else 0),
        published={SinkId(sink): Epoch(epoch) for sink, epoch in published},
        seen={SinkId(sink): Epoch(epoch) for sink, epoch in seen},
    )
