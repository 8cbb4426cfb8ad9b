"""Which errors mean that a resource is away, and what the flow says of it meanwhile."""

from __future__ import annotations

import errno
import re

import pytest

from cutline.base.outages import Outage, Outages, hadoop_reason, outage_in, outage_of
from cutline.errors import DamagedRecordError, FencedError, MissingObject, NotDone, OutcomeUnknown, Refused

FULL = OSError(errno.ENOSPC, "No space left on device", "entries/7.json")


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (FULL, "the disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk"),
        (NotDone("the server refuses connections", store="s3://bucket"), "s3://bucket"),
        (OutcomeUnknown("no answer", database="host=db"), "host=db"),
        (NotDone("no answer"), "a store"),
    ],
)
def test_what_may_come_back_is_an_outage(error: Exception, resource: str) -> None:
    outage = outage_of(error)
    assert outage is not None
    assert outage.resource == resource


@pytest.mark.parametrize(
    "error",
    [
        # What of earlier writes the disk holds is unknown then: only a start from the logs is safe.
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EROFS, "Read-only file system"),
        MissingObject("there is no such object", store="s3://bucket"),
        Refused("the object cannot be read", store="s3://bucket", why="status 403, AccessDenied"),
        DamagedRecordError("torn"),
        FencedError("another process runs the flow"),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_waiting_does_not_help_against_is_none(error: Exception) -> None:
    assert outage_of(error) is None


def test_the_cause_of_an_error_counts() -> None:
    error = RuntimeError("the record was not stored")
    error.__cause__ = FULL
    assert outage_of(error) == Outage("the disk", "No space left on device (entries/7.json)")


@pytest.mark.parametrize(
    ("text", "resource"),
    [
        ("…\nCaused by: java.io.IOException: No space left on device\n\tat java.base/…", "the disk"),
        ("…\nOSError: [Errno 28] No space left on device: '/data/x.arrow'\n", "the disk"),
        ("…\nOSError: [Errno 122] Error writing bytes to file. Detail: [errno 122] Disk quota exceeded\n", "the disk"),
        ("No space left on device\n=== Streaming Query ===\nIdentifier: o\n", "the disk"),
        ("[STREAM_FAILED] Query [id] terminated with exception: Disk quota exceeded SQLSTATE: XXKST\n", "the disk"),
        (
            "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost task 0.0 "
            "in stage 1.0 (TID 7) (10.0.0.1 executor driver): java.io.IOException: No space left on device\n\tat x",
            "the disk",
        ),
        ("Caused by: java.io.FileNotFoundException: /data/a b/1.tmp (No space left on device)\n", "the disk"),
        ("Caused by: java.nio.file.FileSystemException: /data/a: No space left on device\n", "the disk"),
        ("org.apache.spark.SparkException: org.apache.hadoop.fs.FSError: No space left on device\n", "the disk"),
        ("org.rocksdb.RocksDBException: While appending to file: /x.sst: No space left on device\n", "the disk"),
        ("…\ncutline.errors.NotDone: PostgreSQL cannot be reached: connection refused (database=host=db)\n", "a store"),
        ("…\ncutline.errors.OutcomeUnknown: no answer (store=s3://b)\n", "a store"),
    ],
)
def test_the_text_of_a_failed_query_says_it_too(text: str, resource: str) -> None:
    outage = outage_in(text)
    assert outage is not None
    assert outage.resource == resource


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: no key",
        "cutline.errors.MissingObject: gone",
        "cutline.errors.Refused: the object cannot be read (why=status 403)",
        "SinkError",
        "ValueError: not a date: Jun 1 kernel: write failed: No space left on device",
        'ValueError: cannot parse "java.io.IOException: No space left on device"\n',
        "ValueError: unknown error: OSError: [Errno 28] No space left on device\n",
        "OSError: [Errno 5] after No space left on device\n",
        "Caused by: org.apache.spark.SparkRuntimeException: [USER_RAISED_EXCEPTION] No space left on device in row 7\n",
        "ValueError: row 7 says cutline.errors.NotDone: no answer\n",
    ],
)
def test_a_failed_query_whose_operator_is_to_blame_is_none(text: str) -> None:
    assert outage_in(text) is None


def test_an_outage_shows_no_secret() -> None:
    address = "postgresql://bob:hunter2@db/x"
    assert outage_of(NotDone(f"no answer from {address}", store=address)) == Outage(
        "postgresql://***@db/x", "no answer from postgresql://***@db/x"
    )
    found = outage_in(f"…\ncutline.errors.NotDone: no answer from {address}\n")
    assert found is not None and "hunter2" not in found.problem


def test_pauses_grow_and_the_beginning_is_remembered() -> None:
    outages, full = Outages("shop"), Outage("the disk", "No space left on device")
    pauses = [outages.failed("coordinator", full) for _ in range(8)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    (waiting,) = outages.waiting()
    assert waiting.attempts == 8
    assert waiting.next_try_ms is not None
    assert waiting.next_try_ms >= waiting.since_ms + 10_000
    outages.over("coordinator")
    assert outages.waiting() == []
    assert outages.failed("coordinator", full) == 0.25, "the next outage begins anew"


def test_the_longest_wait_comes_first_and_each_part_ends_its_own() -> None:
    outages, away = Outages(), Outage("s3://bucket", "no answer")
    for part in ("remote tier", "sink table"):
        outages.failed(part, away, is_timed=False)
    assert [one.next_try_ms for one in outages.waiting()] == [None, None]
    outages.postponed("sink table", 77)
    outages.postponed("nothing that waits", 77)
    outages.ended("remote tier")
    assert [(one.part, one.next_try_ms) for one in outages.waiting()] == [("sink table", 77)]


REFUSED_BY_S3 = (
    "java.net.ConnectException: Writing Object on live/.0: software.amazon.awssdk.core.exception.SdkClientException: "
    "Unable to execute HTTP request: Connect to 127.0.0.1:16513 [/127.0.0.1] failed: Connection refused (SDK Attempt "
    "Count: 2):    software.amazon.awssdk.core.exception.SdkClientException: Unable to execute HTTP request: …"
)
#: As Hadoop 3.5 says it, and what a person is told.
HADOOP_AWAY = {
    "java.net.ConnectException: Call From vm/127.0.0.1 to localhost:23933 failed on connection exception: "
    "java.net.ConnectException: Connection refused; For more details see:  http://wiki.apache.org/hadoop/"
    "ConnectionRefused": "Call From vm/127.0.0.1 to localhost:23933 failed on connection exception: "
    "java.net.ConnectException: Connection refused",
    "java.net.SocketTimeoutException: Call From vm/127.0.0.1 to localhost:23933 failed on socket timeout exception: "
    "java.net.SocketTimeoutException: 3000 millis timeout while waiting for channel to be ready for read": "",
    "java.io.EOFException: End of File Exception between local host is: vm; destination host is: localhost:23933; : "
    "java.io.EOFException": "",
    "java.io.IOException: DestHost:destPort localhost:23933 , LocalHost:localPort vm/127.0.0.1:0. Failed on local "
    "exception: java.io.IOException: Connection reset by peer": "",
    "org.apache.hadoop.ipc.RemoteException(org.apache.hadoop.hdfs.server.namenode.SafeModeException): Cannot create "
    "file/live/0. Name node is in safe mode.": "",
    "org.apache.hadoop.ipc.RemoteException(java.io.IOException): File /live/0 could only be written to 0 of the 1 "
    "minReplication nodes. There are 0 datanode(s) running and 0 node(s) are excluded in this operation.": "",
    "org.apache.hadoop.hdfs.BlockMissingException: Could not obtain block: BP-1:blk_107_1 file=/live/0": "",
    REFUSED_BY_S3: "Writing Object on live/.0: Unable to execute HTTP request: Connect to 127.0.0.1:16513 "
    "[/127.0.0.1] failed: Connection refused",
    "org.apache.hadoop.fs.s3a.AWSStatus500Exception: getFileStatus on s3a://bucket/live: software.amazon.awssdk."
    "services.s3.model.S3Exception: Internal error (Service: S3, Status Code: 503, Request ID: 1)": "",
}


@pytest.mark.parametrize("before", ["", "Caused by: ", "Lost task 0.0 in stage 7.0 (TID 9) (10.0.0.7 executor 1): "])
@pytest.mark.parametrize("text", HADOOP_AWAY)
def test_a_hadoop_file_system_that_does_not_answer_is_an_outage(before: str, text: str) -> None:
    outage = outage_in(f"[STREAM_FAILED] Query terminated\n{before}{text}\n\tat java.base/java.lang.Thread.run\n")
    assert outage is not None
    assert outage.resource == "a Hadoop file system"
    assert outage.problem == (HADOOP_AWAY[text] or outage.problem)
    assert outage.problem == hadoop_reason(text)
    assert "\n" not in outage.problem
    # A failed query begins with the message alone.
    message = re.sub(r"^[\w.]+(?:\([\w.]+\))?: ", "", text)
    assert outage_in(f"{message}\n=== Streaming Query ===\nIdentifier: shop.totals\n") == outage
    assert outage_in(f"ValueError: row 7\n{message}\n") is None


@pytest.mark.parametrize(
    "text",
    [
        # The user's own connections, and data that looks like it.
        "java.net.ConnectException: Connection refused",
        "ValueError: a page: software.amazon.awssdk.core.exception.SdkClientException: no answer",
        "ValueError: row 7 says Call From vm to nn failed on connection exception: refused",
        # The server has answered.
        "org.apache.hadoop.security.AccessControlException: Permission denied: user=bob, access=WRITE",
        "java.nio.file.AccessDeniedException: s3a://b/x: getFileStatus on s3a://b/x: software.amazon.awssdk.services."
        "s3.model.S3Exception: Access Denied (Service: S3, Status Code: 403, Request ID: 1):AccessDenied",
    ],
)
def test_other_errors_of_the_jvm_are_none(text: str) -> None:
    assert outage_in(f"Caused by: {text}\n") is None
