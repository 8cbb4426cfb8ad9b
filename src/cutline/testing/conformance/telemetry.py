"""The suite that every telemetry adapter must pass: any event at any time raises no error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId, SinkId
from cutline.ports.telemetry import Telemetry


class TelemetryConformance:
    """Subclasses have a fixture ``telemetry``."""

    def test_every_event_may_come_at_any_time_and_twice(self, telemetry: Telemetry) -> None:
        for _ in range(2):
            tell_all(telemetry)

    def test_threads_may_share_it(self, telemetry: Telemetry) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: tell_all(telemetry), range(20)))


def tell_all(telemetry: Telemetry) -> None:
    telemetry.checkpoint_completed(Epoch(1), 12)
    telemetry.checkpoint_aborted()
    telemetry.sink_published(SinkId("table"), Epoch(1))
    telemetry.sink_failed(SinkId("table"))
    for is_healthy in (False, True):
        telemetry.health_changed(is_healthy=is_healthy)
    telemetry.query_restarted(OperatorId("totals"))
    telemetry.recovered("resume", 0.5)
    telemetry.input_lost([])
    telemetry.input_lost([LostInput(operator=OperatorId("orders"), what="file", why="deleted", parts=2)])
