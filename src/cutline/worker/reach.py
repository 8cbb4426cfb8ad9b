"""Tells a sink how far it has come without rows: its ledger does not show it, and readers of several tables ask."""

from __future__ import annotations

from cutline.base.logs import get_logger
from cutline.model.ids import Epoch, SinkId
from cutline.ports.sinks import RecordsReach, Sink
from cutline.worker.immediate_publishing import ImmediateSink

log = get_logger(__name__)


def record_reach(sink: Sink, name: SinkId, epoch: Epoch, *, is_per_operator: bool, at_start: bool = False) -> None:
    """Call it when the sink has everything up to ``epoch``. A failure makes readers see an older epoch, no more."""
    if isinstance(sink, ImmediateSink) or not isinstance(sink, RecordsReach):
        return
    try:
        sink.record_reach(epoch, is_per_operator=is_per_operator, at_start=at_start)
    except Exception:  # a sink may raise anything; what is published does not depend on it
        log.warning("sink_reach_not_recorded", sink=name, epoch=epoch, exc_info=True)
