"""What a failed call of a Hadoop file system means."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JJavaError

from cutline.base.outages import outage_of
from cutline.errors import NotDone, Refused
from cutline.spark.hadoop_errors import asking_hadoop

PLACE = "hdfs://nn:8020/live/flow/op"


class JavaError(Py4JJavaError):  # type: ignore[misc]
    """An error of the JVM, without a JVM."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self.java_exception: Any = text

    def __str__(self) -> str:
        return str(self.java_exception)


def ask(text: str) -> None:
    with asking_hadoop(PLACE):
        raise JavaError(text)


def test_a_missing_file_is_no_failure() -> None:
    with pytest.raises(FileNotFoundError):
        ask("java.io.FileNotFoundException: File does not exist: /live/flow/op")


def test_a_server_that_is_away_is_an_outage_that_names_it() -> None:
    with pytest.raises(NotDone) as failed:
        ask("java.net.ConnectException: Call From vm/1.2.3.4 to nn:8020 failed on connection exception: no\n\tat x")
    outage = outage_of(failed.value)
    assert outage is not None
    assert outage.resource == "hdfs://nn:8020"
    assert "\n" not in outage.problem
    assert outage.problem.endswith("Call From vm/1.2.3.4 to nn:8020 failed on connection exception: no")


@pytest.mark.parametrize(
    ("text", "next_step"),
    [
        ("org.apache.hadoop.security.AccessControlException: Permission denied: user=bob", "access"),
        ("java.nio.file.AccessDeniedException: s3a://b/x: Access Denied (Status Code: 403)", "access"),
        ("org.apache.hadoop.fs.s3a.UnknownStoreException: `s3a://b/': Bucket does not exist", "bucket"),
        ('org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "s4a"', "jars"),
        (
            "java.lang.RuntimeException: java.lang.ClassNotFoundException: "
            "Class org.apache.hadoop.fs.s3a.S3AFileSystem not found",
            "jars",
        ),
        ("java.lang.IllegalArgumentException: java.net.UnknownHostException: nn", "spark_dirs"),
    ],
)
def test_what_a_person_must_change_is_not_waited_for(text: str, next_step: str) -> None:
    with pytest.raises(Refused) as failed:
        ask(text)
    assert outage_of(failed.value) is None
    assert next_step in failed.value.next_step


def test_a_wrong_call_is_no_outage() -> None:
    with pytest.raises(Py4JError, match="does not exist"), asking_hadoop(PLACE):
        raise Py4JError("An error occurred. Trace:\npy4j.Py4JException: Method stat2Paths([…]) does not exist")


def test_a_lost_jvm_is_named() -> None:
    with pytest.raises(NotDone, match="through the JVM"), asking_hadoop(PLACE):
        raise Py4JError("Answer from Java side is empty")
