"""Requests of a command to the process that runs the flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutline.errors import ConfigError, CutlineError
from cutline.model.layout import Layout

_ANSWER_SECONDS = 600.0


def ask_running(
    layout: Layout, kind: str, arguments: dict[str, Any], what: str, *, on_taken: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Send a request to the running flow, and show a spinner while waiting; ``what``: beside the spinner.

    ``on_taken``: called if this is interrupted when the flow performs the request already.
    """
    from rich.console import Console
    from rich.markup import escape

    from cutline.cli.places import is_running
    from cutline.transport.request_files import ask

    def check_running() -> None:
        if not is_running(layout):
            raise ConfigError("the flow does not run any more", next_step="see cutline status", flow=layout.flow)

    try:
        with Console(stderr=True).status(escape(what)):
            answer: dict[str, Any] = ask(
                layout.requests, kind, arguments, seconds=_ANSWER_SECONDS, wait=check_running, on_taken=on_taken
            )
    except CutlineError as error:
        error.add_where(flow=layout.flow)
        raise
    return answer
