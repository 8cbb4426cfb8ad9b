"""How a shell sends a request to a running flow: one file holds the request, another the answer.

Both files appear with their whole content. The shell withdraws an unanswered request, so that the flow does not perform
it later, when the answer is no longer expected.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cutline import errors
from cutline.base import durable
from cutline.base.decoding import decoder_of
from cutline.base.logs import get_logger
from cutline.errors import CutlineError, InvariantViolation, RequestFailedError, RewoundError

log = get_logger(__name__)

_LOOK_SECONDS = 0.05
_ANSWER = ".answer.json"
_STALE_SECONDS = 900.0
#: A bug is reported where it is; and what has more fields than every error is not raised a second time.
_NOT_OF_THE_CALLER = (InvariantViolation, RewoundError)
_UNKNOWN_KIND = "this flow does not know requests of kind"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the flow."""

    kind: str
    arguments: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a request."""

    result: dict[str, Any]
    #: The whole text, which is all that former versions send and read.
    problem: str = ""
    #: The parts of an error that Cutline raises on purpose.
    kind: str = ""
    what: str = ""
    next_step: str = ""
    where: dict[str, str] = {}

    @classmethod
    def of_error(cls, error: CutlineError) -> Answer:
        return cls(
            result={},
            problem=str(error),
            kind=type(error).__name__,
            what=error.what,
            next_step=error.next_step,
            where={key: str(value) for key, value in error.where.items()},
        )

    def error(self) -> CutlineError:
        """The error that the flow raised; one that it cannot be asked to explain is a request that failed."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, CutlineError)) or kind in _NOT_OF_THE_CALLER:
            kind = RequestFailedError
        return kind(self.what or self.problem, next_step=self.next_step, **self.where)


def ask(
    folder: Path,
    kind: str,
    arguments: dict[str, Any],
    *,
    seconds: float,
    wait: Callable[[], None],
    on_taken: Callable[[], None] = lambda: None,
) -> Any:
    """Send a request and wait for the answer; ``wait`` is called between polls.

    Raises what the flow raises, or RequestFailedError.

    ``on_taken``: called before an error passes if the flow has taken the request all the same, and performs it. If it
    is not called, the request is withdrawn.
    """
    path = tell(folder, kind, arguments)
    answer_path = _answer_of(path)
    deadline = time.monotonic() + seconds
    is_answered = False
    try:
        while not answer_path.exists():
            if time.monotonic() > deadline:
                raise RequestFailedError(
                    f"the flow has not answered within {seconds:.0f} s",
                    next_step="it may still be working on it: see its status",
                )
            wait()
            time.sleep(_LOOK_SECONDS)
        answer = decoder_of(Answer).decode(answer_path.read_bytes())
        is_answered = True
    finally:
        try:
            path.unlink()  # also after a timeout: the answer is no longer expected
        except FileNotFoundError:
            if not is_answered:
                on_taken()
        answer_path.unlink(missing_ok=True)
    if answer.problem:
        raise answer.error()
    return answer.result


def tell(folder: Path, kind: str, arguments: dict[str, Any]) -> Path:
    """Send a request and do not wait. Its answer, if one comes, is removed by a later start of the flow."""
    durable.make_dir(folder)
    path = folder / f"{time.time_ns():020d}-{secrets.token_hex(3)}.json"
    durable.replace(path, msgspec.json.encode(Request(kind=kind, arguments=arguments)), sync=False)
    return path


def is_unknown_kind(error: RequestFailedError) -> bool:
    """Whether the flow, of another version, does not know such requests."""
    return error.what.startswith(_UNKNOWN_KIND)


class RequestFolder:
    """The flow's side: performs requests one at a time, in order of arrival."""

    def __init__(self, folder: Path, handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
        self._folder = folder
        self._handlers = handlers
        durable.make_dir(folder)
        for leftover in folder.iterdir():  # no caller waits this long; younger ones came while the flow started
            with contextlib.suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                    leftover.unlink()

    def take(self) -> None:
        """Perform the waiting requests, if there are any."""
        names = (path for path in self._folder.glob("*.json") if not path.name.endswith(_ANSWER))
        for path in sorted(path for path in names if not durable.is_temporary(path.name)):
            try:
                request = decoder_of(Request).decode(path.read_bytes())
            except FileNotFoundError:
                continue  # withdrawn
            except msgspec.MsgspecError as error:
                self._answer(path, Answer(result={}, problem=f"not a request: {error}"))
                continue
            try:
                path.unlink()  # of the shell that withdraws it and the flow that takes it, one succeeds
            except FileNotFoundError:
                continue
            self._answer(path, self._handle(request))

    def _handle(self, request: Request) -> Answer:
        handler = self._handlers.get(request.kind)
        if handler is None:
            return Answer(result={}, problem=f"{_UNKNOWN_KIND} {request.kind!r}")
        try:
            return Answer(result=handler(**request.arguments))
        except CutlineError as error:
            return Answer.of_error(error)
        except TypeError as error:
            return Answer(result={}, problem=str(error))
        except Exception as error:  # a request must never end the flow
            log.error("request_failed", kind=request.kind, exc_info=True)
            return Answer(result={}, problem=f"{type(error).__name__}: {error}")

    def _answer(self, path: Path, answer: Answer) -> None:
        path.unlink(missing_ok=True)
        durable.replace(_answer_of(path), msgspec.json.encode(answer), sync=False)


def _answer_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}{_ANSWER}")
