"""What a running flow counts."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, FlowName, OperatorId, SinkId
from cutline.ports.telemetry import NoTelemetry, Telemetry
from cutline.runtime.metrics import Metrics


def report_everything(to: Telemetry) -> None:
    to.checkpoint_completed(Epoch(3), 250)
    to.checkpoint_aborted()
    to.sink_published(SinkId("table"), Epoch(3))
    to.sink_failed(SinkId("table"))
    to.health_changed(is_healthy=False)
    to.query_restarted(OperatorId("totals"))
    to.recovered("regional", 0.5)
    to.input_lost([LostInput(operator=OperatorId("numbers"), what="two.txt", why="gone", parts=2)])


@pytest.mark.parametrize("telemetry", [Metrics(FlowName("f")), NoTelemetry()])
def test_every_event_is_taken(telemetry: Telemetry) -> None:
    report_everything(telemetry)


def test_every_event_shows_in_the_registry() -> None:
    metrics = Metrics(FlowName("f"))
    report_everything(metrics)
    metrics.follow("messages", "By kind", "kind", lambda: {"repeated": 4})
    shown = generate_latest(metrics.registry).decode().splitlines()
    for line in (
        'cutline_checkpoints_completed_total{flow="f"} 1.0',
        'cutline_checkpoints_aborted_total{flow="f"} 1.0',
        'cutline_checkpoint_seconds_sum{flow="f"} 0.25',
        'cutline_last_complete_epoch{flow="f"} 3.0',
        'cutline_sink_published_epoch{flow="f",sink="table"} 3.0',
        'cutline_sink_commit_failures_total{flow="f",sink="table"} 1.0',
        'cutline_healthy{flow="f"} 0.0',
        'cutline_query_restarts_total{flow="f",operator="totals"} 1.0',
        'cutline_recovery_total{flow="f",path="regional"} 1.0',
        'cutline_recovery_seconds{flow="f",path="regional"} 0.5',
        'cutline_lost_input_total{flow="f",operator="numbers"} 2.0',
        'cutline_messages_total{flow="f",kind="repeated"} 4.0',
    ):
        assert line in shown, line
