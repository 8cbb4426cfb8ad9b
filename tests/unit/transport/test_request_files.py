"""Of a shell that withdraws a request and a flow that takes it, one succeeds, and the shell knows which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cutline.errors import RequestFailedError, UnknownEpochError
from cutline.transport.request_files import Answer, RequestFolder, ask, is_unknown_kind, tell


class InterruptedByPersonError(Exception):
    """Ctrl-C."""


def asked(folder: Path, wait: Any) -> list[str]:
    """Ask to stop, and be interrupted; whether the flow has taken the request."""
    taken: list[str] = []
    with pytest.raises(InterruptedByPersonError):
        ask(folder, "stop", {}, seconds=5, wait=wait, on_taken=lambda: taken.append("taken"))
    return taken


def interrupt() -> None:
    raise InterruptedByPersonError


def never() -> dict[str, Any]:
    raise SystemExit("it is performed")


def test_a_request_that_no_flow_has_taken_is_withdrawn(tmp_path: Path) -> None:
    assert asked(tmp_path, interrupt) == []
    RequestFolder(tmp_path, {"stop": never}).take()


def test_a_request_that_the_flow_performs_is_known_to_be_taken(tmp_path: Path) -> None:
    def stop() -> dict[str, Any]:
        return {}

    def take() -> None:
        folder = RequestFolder(tmp_path, {"stop": stop})
        folder._answer = lambda *_: None  # type: ignore[method-assign]
        folder.take()
        raise InterruptedByPersonError

    assert asked(tmp_path, take) == ["taken"]


def test_a_request_that_is_withdrawn_while_it_is_read_is_not_performed(tmp_path: Path) -> None:
    path = tell(tmp_path, "stop", {})
    folder = RequestFolder(tmp_path, {"stop": never})
    real = Path.read_bytes

    def withdrawn(self: Path) -> bytes:
        content = real(self)
        path.unlink()
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", withdrawn)
        folder.take()
    assert list(tmp_path.iterdir()) == []


def test_what_a_flow_raises_reaches_the_shell_whole(tmp_path: Path) -> None:
    def pin() -> dict[str, Any]:
        raise UnknownEpochError("epoch 9 is not kept", next_step="available checkpoints: 1", flow="sales")

    folder = RequestFolder(tmp_path, {"pin": pin})
    with pytest.raises(UnknownEpochError) as refused:
        ask(tmp_path, "pin", {}, seconds=5, wait=folder.take)
    error = refused.value
    assert (error.what, error.next_step, error.where) == (
        "epoch 9 is not kept",
        "available checkpoints: 1",
        {"flow": "sales"},
    )


@pytest.mark.parametrize("kind", ["InvariantViolation", "RewoundError", "annotations", "", "Exception"])
def test_an_error_that_is_not_for_the_shell_is_a_request_that_failed(kind: str) -> None:
    error = Answer(result={}, problem="a whole text", kind=kind, what="a text").error()
    assert (type(error), error.what) == (RequestFailedError, "a text")
    assert Answer(result={}, problem="of a former version").error().what == "of a former version"


def test_a_kind_that_a_former_version_does_not_know_is_told_apart(tmp_path: Path) -> None:
    folder = RequestFolder(tmp_path, {})
    with pytest.raises(RequestFailedError) as refused:
        ask(tmp_path, "hold", {"epoch": 1}, seconds=5, wait=folder.take)
    assert is_unknown_kind(refused.value)
    assert not is_unknown_kind(RequestFailedError("epoch 1 is not kept"))
