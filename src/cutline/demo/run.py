"""A whole demo: run, kill, check, report."""

from __future__ import annotations

from typing import Any

from cutline.demo.settings import FLOW_NAME, DemoSettings
from cutline.demo.supervise import DemoRun, Watcher
from cutline.demo.truth import check
from cutline.model.layout import Layout
from cutline.storage.metadata.sqlite import SqliteMetadata

_HISTORY = 100_000


def run_demo(settings: DemoSettings, kills: int, watch: Watcher, *, loses_host: bool = False) -> dict[str, Any]:
    """Run the demo and return its report; ``ok``: everything was published exactly once."""
    demo = DemoRun(settings, kills, watch, loses_host=loses_host)
    demo.run()
    report = check(settings)
    metadata = SqliteMetadata(Layout(settings.storage, FLOW_NAME).metadata)
    history = metadata.history(_HISTORY)
    metadata.close()
    durations = sorted(item.details["duration_ms"] for item in history if item.outcome == "completed")
    ok = report["lost"] == report["duplicated"] == report["wrong_amounts"] == 0
    return {
        "ok": ok,
        **report,
        "mode": settings.mode,
        "seed": settings.seed,
        "kills": demo.kills,
        "hosts_lost": demo.kills if loses_host else 0,
        "remote": settings.remote,
        "recoveries": demo.recoveries,
        "checkpoints_completed": len(durations),
        "checkpoints_aborted": sum(1 for item in history if item.outcome == "aborted"),
        "checkpoint_ms": {"p50": _percentile(durations, 0.50), "p99": _percentile(durations, 0.99)},
    }


def _percentile(values: list[int], share: float) -> int | None:
    return values[min(int(len(values) * share), len(values) - 1)] if values else None
