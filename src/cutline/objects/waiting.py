"""Asking a store again that is away for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from cutline.base.logs import get_logger
from cutline.errors import MissingObject, StoreError
from cutline.model.ids import FlowName

log = get_logger(__name__)

#: A store that does not answer is asked again for so long when the flow cannot come back without it.
PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 1.0

T = TypeVar("T")


def patiently(ask: Callable[[], T], *, flow: FlowName) -> T:
    """The answer; ``ask`` may be asked as often as one likes. Raises StoreError when the patience is over."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except StoreError as error:
            if time.monotonic() > deadline or isinstance(error, MissingObject):
                raise
            log.warning("waiting_for_store", flow=flow, reason=str(error))
            time.sleep(PAUSE_SECONDS)
