"""Errors of a Hadoop file system: a file that is not there, a refusal, or a server that may answer later."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError, Py4JJavaError

from cutline.base.outages import hadoop_reason
from cutline.errors import NotDone, Refused

_JARS = (
    "give Spark the jars of this file system (spark.jars, spark.jars.packages), on driver and executors; see storage.md"
)
#: Waiting does not help against these; and what does.
_REFUSALS = (
    (r"AccessControlException|AccessDeniedException|AuthenticationException", "grant Spark's user access to it"),
    (r"NoAwsCredentialsException|CredentialInitializationException|NoAuthWithAWSException", "set its credentials"),
    (r"UnknownStoreException|NoSuchBucket", "create the bucket, or correct spark_dirs"),
    (r"UnsupportedFileSystemException|No FileSystem for scheme|ClassNotFoundException|NoClassDefFoundError", _JARS),
    (r"IllegalArgumentException|URISyntaxException|UnknownHostException", "correct spark_dirs or Spark's settings"),
)
#: How py4j reports a call that Cutline should not have made.
_WRONG_CALL = "py4j.Py4JException"


@contextlib.contextmanager
def asking_hadoop(place: str) -> Iterator[None]:
    """Turns the JVM's errors into FileNotFoundError, Refused (a person must act) or NotDone (it may pass)."""
    try:
        yield
    except Py4JJavaError as error:
        text = str(error.java_exception)
        if text.startswith("java.io.FileNotFoundException"):
            raise FileNotFoundError(place) from error
        raise _failure(text, place) from error
    except (Py4JError, ConnectionError, EOFError) as error:
        if _WRONG_CALL in str(error):
            raise
        raise NotDone("Spark's directories cannot be reached through the JVM", path=place, why=error) from error


def _failure(text: str, place: str) -> NotDone:
    line, reason, url = text.partition("\n")[0], hadoop_reason(text), _server(place)
    for classes, next_step in _REFUSALS:
        if re.search(classes, line):
            return Refused(f"Spark's directories are refused: {reason}", next_step=next_step, url=url, path=place)
    return NotDone(f"Spark's directories cannot be used: {reason}", url=url, path=place)


def _server(place: str) -> str:
    scheme, separator, rest = place.partition("://")
    return f"{scheme}{separator}{rest.partition('/')[0]}"
