"""What each operator reads from outside of the flow, and whether the replay guard looks after it, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cutline.base.logs import get_logger
from cutline.model.ids import FlowName, OperatorId
from cutline.ports import OperatorPlan, PlannedSource

log = get_logger(__name__)

SourceViews = Mapping[OperatorId, list[dict[str, Any]]]


def source_views(
    plans: Mapping[OperatorId, OperatorPlan], why_not_guarded: Callable[[PlannedSource], str | None]
) -> SourceViews:
    """As they stand in the status; ``note`` says why a source is not guarded."""
    views: dict[OperatorId, list[dict[str, Any]]] = {}
    for name, plan in plans.items():
        notes = [(source, why_not_guarded(source)) for source in plan.sources]
        views[name] = [{"source": source.format, "guarded": note is None, "note": note or ""} for source, note in notes]
    return views


def report_unguarded(flow: FlowName, views: SourceViews) -> None:
    """Once at the start: nobody will say it when a restore silently lacks rows."""
    for operator, sources in views.items():
        for one in sources:
            if not one["guarded"]:
                log.warning("source_not_guarded", flow=flow, operator=operator, source=one["source"], note=one["note"])
