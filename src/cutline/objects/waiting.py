"""Waits for an object store that is briefly unavailable and that a flow cannot start without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cutline.base.backoff import Backoff
from cutline.base.logs import get_logger
from cutline.base.retry import Retry
from cutline.errors import StoreError
from cutline.model.ids import FlowName

log = get_logger(__name__)

STORE_RETRY = Retry(deadline_s=60.0, backoff=Backoff(first_s=1.0, factor=1.0))

T = TypeVar("T")


def wait_for_store(request: Callable[[], T], *, flow: FlowName) -> T:
    """The answer to an idempotent request. Raises StoreError when retries are exhausted or cannot help."""

    def report(error: Exception, pause_s: float) -> None:
        log.warning("waiting_for_store", flow=flow, reason=str(error), pause_s=pause_s)

    def is_final(error: Exception) -> bool:
        return isinstance(error, StoreError) and not error.may_pass

    return STORE_RETRY.call(request, on=StoreError, is_final=is_final, before_pause=report)
