"""Credit as messages: an operator tells its inputs' producers how far it has read; its consumers tell it the same.

A message may be lost, repeated or late: positions are cumulative and carry the consumer's generation, a report is
repeated until the producer confirms it, and a new producer asks until every consumer has answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import assert_never

from cutline.base.clock import now_ms
from cutline.model.ids import OperatorId, Position
from cutline.protocol.cut.credits import ConsumptionReports, ConsumptionRequests
from cutline.protocol.messages.wire import Consumed, ConsumptionNoted, ConsumptionRequested, Credit
from cutline.transport.in_process import Wire, operator_address
from cutline.worker.backpressure import Credits


class CreditMessages:
    """Both sides of one operator: consumer of its inputs, producer of its channel. Any thread may call."""

    def __init__(
        self,
        credits: Credits,
        *,
        reports: ConsumptionReports,
        requests: ConsumptionRequests,
        wire: Wire,
        on_credit: Callable[[], None],
    ) -> None:
        """``on_credit`` is called whenever a consumer has reported."""
        self._credits = credits
        self._reports = reports
        self._requests = requests
        self._wire = wire
        self._on_credit = on_credit
        #: Covers both machines. Never held while a message is sent: the receiver answers on the same thread.
        self._lock = threading.Lock()

    def read(self, positions: Mapping[OperatorId, Position]) -> None:
        """The inputs were read up to here."""
        with self._lock:
            reports = self._reports.read(positions, now_ms=now_ms())
        self._report(reports)

    def receive(self, message: Credit) -> None:
        """Handles the message on the sender's thread, so a producer that waits for room continues at once."""
        match message:
            case Consumed():
                if self._credits.reported(message):  # a late one of a former generation does not answer the question
                    with self._lock:
                        self._requests.reported(message.consumer)
                self._wire(
                    operator_address(message.consumer),
                    ConsumptionNoted(
                        channel=message.channel,
                        consumer=message.consumer,
                        generation=message.generation,
                        position=message.position,
                    ),
                )
                self._on_credit()
            case ConsumptionNoted():
                with self._lock:
                    self._reports.noted(message)
            case ConsumptionRequested():
                with self._lock:
                    reports = self._reports.requested(message)
                self._report(reports)
            case _:
                assert_never(message)

    def send_again(self) -> None:
        """Send the reports and questions that are due: unanswered ones, and all of them after the start."""
        with self._lock:
            now = now_ms()
            reports, requests = self._reports.time_passed(now_ms=now), self._requests.time_passed(now_ms=now)
        self._report(reports)
        for request in requests:
            self._wire(operator_address(request.consumer), request)

    def next_deadline_ms(self) -> int | None:
        with self._lock:
            deadlines = (self._reports.next_deadline_ms(), self._requests.next_deadline_ms())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _report(self, reports: list[Consumed]) -> None:
        for report in reports:
            self._wire(operator_address(report.channel), report)
