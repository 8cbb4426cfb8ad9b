"""Whether a failed query is restarted, and after which pause."""

from __future__ import annotations

from cutline.base.backoff import Backoff

#: While a resource is away, a query is restarted at least this often: it must notice that the resource is back.
_LONGEST_PAUSE_S = 10.0


class QueryRestarts:
    """Counts the failures of one operator's query since its last finished batch.

    Progress is a finished batch, nothing else. A failure for lack of a resource (a full disk, a store or database that
    does not answer) says nothing about the operator: it is retried without a limit, and does not count.
    """

    def __init__(self, *, limit: int, backoff_ms: int) -> None:
        """``limit``: how many restarts in a row without a finished batch."""
        self._limit = limit
        self._backoff = Backoff(first_s=backoff_ms / 1000)
        self._outage_backoff = Backoff(first_s=backoff_ms / 1000, limit_s=_LONGEST_PAUSE_S)
        #: Consecutive failures without a finished batch, and how many were for lack of a resource.
        self.failures = 0
        self.outages = 0
        #: How many batches were finished at the last failure.
        self._finished = -1

    def failed(self, finished: int, *, is_outage: bool) -> int | None:
        """The query has failed after ``finished`` batches in all. The pause in ms; None: restarting it is futile."""
        if finished > self._finished:
            self.failures = self.outages = 0
        self._finished = finished
        if is_outage:
            self.outages += 1
            return round(self._outage_backoff.pause_s(self.outages) * 1000)
        self.outages = 0
        self.failures += 1
        if self.failures > self._limit:
            return None
        return round(self._backoff.pause_s(self.failures) * 1000)

    def has_ended_outage(self, finished: int) -> bool:
        """Whether the query, which lacked a resource, has finished a batch since. Says so once."""
        if not self.outages or finished <= self._finished:
            return False
        self.outages = 0
        return True

    def failures_since(self, finished: int) -> int:
        """How often it has failed in a row without finishing a batch; ``finished``: how many it has finished now."""
        return 0 if finished > self._finished else self.failures
