"""Resources that are away for a while: a full disk, a store or a database that does not answer.

The flow waits for them and continues by itself; its status says what it waits for, since when, and when it tries again.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cutline.base.backoff import Backoff
from cutline.base.clock import now_ms
from cutline.base.logs import get_logger
from cutline.base.redaction import without_secrets
from cutline.base.storage_errors import NO_ROOM
from cutline.errors import StoreError

log = get_logger(__name__)

# The text of a failed query holds errors of executors and of the JVM, each on its own line, and the user's data.
#: How Spark, py4j and Java begin such a line.
_BEFORE = r"^(?:Caused by: |: |.*\(TID \d+\) \(.*?\): |\[STREAM_FAILED\] .* terminated with exception: )?"
_CLASSES = r"(?:(?:[\w$]+\.)+[\w$]+: )*"
#: What some classes say before the reason.
_PLACE = (
    r"(?:java\.io\.FileNotFoundException: .* \(|java\.nio\.file\.FileSystemException: .*: "
    r"|org\.rocksdb\.RocksDBException: .*: |[^:\s]*/[^:]*: )?"
)
_NO_ROOM_IN_JAVA = re.compile(
    rf"{_BEFORE}{_CLASSES}{_PLACE}(No space left on device|Disk quota exceeded)\)?(?: SQLSTATE: \w+)?\s*$", re.MULTILINE
)
_NO_ROOM_IN_PYTHON = re.compile(
    rf"^[ |]*OSError: \[Errno (?:{'|'.join(str(one) for one in sorted(NO_ROOM))})\] (.*)", re.MULTILINE
)
_STORE_TEXT = re.compile(r"^[ |]*cutline\.errors\.(?:NotDone|OutcomeUnknown): (.*)", re.MULTILINE)
#: At least one, except in the first line, which is the query's own error: a message alone may be the user's. A remote
#: error names the server's class too.
_JAVA_CLASSES = r"(?:(?:[\w$]+\.)+[\w$]+(?:\([\w.$]+\))?: )+"
# Hadoop's file systems, in the JVM. Its own words: a connection that a user's function failed to open has others.
_HADOOP_AWAY = re.compile(
    rf"(?:\A|{_BEFORE}{_JAVA_CLASSES})("
    # HDFS: no NameNode answers, or one that may not write yet.
    r"Call From \S+ to \S+ failed on (?:connection exception|socket timeout exception)"
    r"|No Route to Host from|End of File Exception between local host is:"
    r"|DestHost:destPort .*Failed on local exception"
    r"|.*Name node is in safe mode"
    r"|Operation category \w+ is not supported in state standby"
    # HDFS: no DataNode has the block, or takes one.
    r"|File .* could only be written to \d+ of the \d+ minReplication nodes"
    r"|Could not obtain block: |All datanodes \[?.* are bad\. Aborting"
    r"|Unable to close file because the last block"
    # S3A.
    r"|.* on \S+: software\.amazon\.awssdk\.core\.exception"
    r"\.(?:SdkClient|ApiCall(?:Attempt)?Timeout|Abort\w*)Exception: "
    r"|.* on \S+: software\.amazon\.awssdk\.services\.s3\.model\.S3Exception: "
    r".*\(Service: S3, Status Code: (?:5\d\d|429)"
    r").*",
    re.MULTILINE,
)
#: What Hadoop and Amazon's client add to a reason: a page of help, the same once more, what the request was called.
_HADOOP_EXTRAS = re.compile(
    r"; For more details see: .*|:? {2,}.*|:?[^:]*software\.amazon\.awssdk[\w.]*(?=:)| \(SDK Attempt .*"
)
_CLASS_NAMES = re.compile(rf"^{_JAVA_CLASSES}")

#: The resource of an outage for lack of room.
DISK = "the disk"
#: The resource of an outage that the JVM reports.
HADOOP = "a Hadoop file system"
#: After these it is unknown what of earlier writes the disk holds, synced or not: only a start from the logs is safe.
_DISK_FAILED = {errno.EIO, errno.EROFS}

_LONGEST_REASON = 300

_BACKOFF = Backoff(first_s=0.25, limit_s=10.0)


@dataclass(frozen=True, slots=True)
class Outage:
    """What is away, and what is known about it."""

    #: "the disk", "coordinator.sqlite", a store or a database.
    resource: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One part of the flow that waits for a resource."""

    #: The part: the coordinator, an operator, a query, a sink, the remote tier.
    part: str
    outage: Outage
    since_ms: int
    attempts: int
    #: When it tries again; None: with the next checkpoint.
    next_try_ms: int | None


def outage_of(error: BaseException) -> Outage | None:
    """The outage that an error stands for; None: it is a failure, and waiting would not help."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in NO_ROOM:
            where = f" ({one.filename})" if one.filename else ""
            return Outage(DISK, f"{one.strerror}{where}")
        if isinstance(one, StoreError) and one.may_pass:
            names = (str(one.where[key]) for key in ("store", "database", "url") if key in one.where)
            return Outage(without_secrets(next(names, "a store")), without_secrets(one.what))
    return None


def is_disk_failure(error: BaseException) -> bool:
    """Whether an error leaves in doubt what the disk holds: the process must not go on with what it remembers."""
    return any(isinstance(one, OSError) and one.errno in _DISK_FAILED for one in _chain(error))


def outage_in(text: str) -> Outage | None:
    """The same of a query's error, of which there is only the text."""
    if (found := _NO_ROOM_IN_JAVA.search(text) or _NO_ROOM_IN_PYTHON.search(text)) is not None:
        return Outage(DISK, without_secrets(found[1]))
    if (found := _STORE_TEXT.search(text)) is not None:
        return Outage("a store", without_secrets(found[1]))
    if (found := _HADOOP_AWAY.search(text)) is not None:
        return Outage(HADOOP, hadoop_reason(found[0]))
    return None


def hadoop_reason(text: str) -> str:
    """What a Java error of a Hadoop file system says, in one short line."""
    line = re.sub(_BEFORE, "", text.strip().partition("\n")[0])
    line = _HADOOP_EXTRAS.sub("", _CLASS_NAMES.sub("", line)).strip(": ")
    return without_secrets(line)[:_LONGEST_REASON]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors that caused it."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


class Outages:
    """What the parts of one flow wait for. Any thread may call."""

    def __init__(self, flow: str = "") -> None:
        self._flow = flow
        self._lock = threading.Lock()
        self._waiting: dict[str, Waiting] = {}

    def failed(self, part: str, outage: Outage, *, pause_s: float | None = None, is_timed: bool = True) -> float:
        """A part has tried in vain. Returns the pause before it tries again, growing unless ``pause_s`` is given.

        ``is_timed=False``: it tries again not after a pause but with the next checkpoint.
        """
        with self._lock:
            before = self._waiting.get(part)
            attempts = before.attempts + 1 if before is not None else 1
            pause_s = _BACKOFF.pause_s(attempts) if pause_s is None else pause_s
            self._waiting[part] = Waiting(
                part=part,
                outage=outage,
                since_ms=before.since_ms if before is not None else now_ms(),
                attempts=attempts,
                next_try_ms=now_ms() + round(pause_s * 1000) if is_timed else None,
            )
        if before is None or before.outage.resource != outage.resource:
            log.error("resource_away", flow=self._flow, part=part, resource=outage.resource, problem=outage.problem)
        return pause_s

    def postponed(self, part: str, next_try_ms: int) -> None:
        """The next try was decided elsewhere."""
        with self._lock:
            if (before := self._waiting.get(part)) is not None:
                self._waiting[part] = replace(before, next_try_ms=next_try_ms)

    def ended(self, part: str) -> None:
        """A part waits no longer because it has ended."""
        with self._lock:
            self._waiting.pop(part, None)

    def over(self, part: str) -> None:
        """A part has succeeded."""
        with self._lock:
            before = self._waiting.pop(part, None)
        if before is not None:
            waited_ms = now_ms() - before.since_ms
            log.warning("resource_back", flow=self._flow, part=part, resource=before.outage.resource, ms=waited_ms)

    def waiting(self) -> list[Waiting]:
        """The longest first."""
        with self._lock:
            return sorted(self._waiting.values(), key=lambda one: one.since_ms)
