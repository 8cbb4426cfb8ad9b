"""Classifies failed requests of obstore: did the request certainly not happen, and is a retry worthwhile?

obstore raises one class for most failures, so the text must be parsed. A failure is certain only if the text clearly
says so; every other failure counts as "may have happened".
"""

from __future__ import annotations

import re
from typing import NamedTuple

from obstore import exceptions

#: What obstore's functions raise.
RAISED = (exceptions.BaseError, OSError, ValueError)

_REFUSALS = (
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.InvalidPathError,
    exceptions.NotSupportedError,
    exceptions.PreconditionError,
    ValueError,
)
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
#: Reasons of status 400 that say nothing about the request.
_SLOW = {"RequestTimeout", "InternalError", "SlowDown"}
_TRANSPORT = re.compile(r"HttpError \{\s*kind: (\w+),")
_TRANSPORT_IN_WORDS = {
    "Connect": "could not connect",
    "Timeout": "no answer in time",
    "Interrupted": "the connection broke",
}


class Failure(NamedTuple):
    """One failed request."""

    #: Human-readable. Built from known words, never from the server's text, which may hold secrets.
    why: str
    #: The request certainly had no effect (if obstore sent it only once).
    had_no_effect: bool
    #: A retry may succeed.
    may_pass: bool
    is_missing: bool = False

    @property
    def is_refusal(self) -> bool:
        """The store has answered, and will answer the same again."""
        return self.had_no_effect and not self.may_pass


def understand(error: Exception) -> Failure:
    """Classify the failure of one request that was sent at most once."""
    text = str(error)
    status = status_of(error)
    code = _CODE.search(text)
    if status is not None:
        why = f"status {status}" + (f", {code[1]}" if code else "")
        missing = isinstance(error, FileNotFoundError) and (code is None or code[1] != "NoSuchBucket")
        # 408 is the server's view of a timeout. 409 and 429: a concurrent request, or too many of them.
        refused = 300 <= status < 500 and status != 408
        is_slow = code is not None and code[1] in _SLOW
        return Failure(why, refused, is_slow or status in (408, 409, 429) or status >= 500, missing)
    if isinstance(error, FileNotFoundError):
        return Failure("no such object", True, False, True)
    if isinstance(error, _REFUSALS):
        return Failure(f"refused, {type(error).__name__}", True, False)
    if "Received redirect without LOCATION" in text:
        return Failure("the bucket is in another region; is the region right?", True, False)
    transport = _TRANSPORT.search(text)
    if transport is not None:
        why = _TRANSPORT_IN_WORDS.get(transport[1], f"transport error, {transport[1]}")
        return Failure(why, transport[1] == "Connect", True)
    return Failure(type(error).__name__, False, False)


def status_of(error: Exception) -> int | None:
    """The HTTP status that the server answered with, if it answered."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None
