"""Cutline: consistent checkpoints, recovery and exactly-once output for streaming pipelines on Apache Spark.

The public names are loaded on first use: Spark's Python workers import this package and need none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cutline.launcher import register_launcher

if TYPE_CHECKING:
    from cutline import errors, sinks
    from cutline.connectors.flow_reading import latest_common_epoch, read
    from cutline.errors import RewoundError, TakenBackError
    from cutline.flow import Flow, Operator
    from cutline.launcher import Launcher
    from cutline.runtime.handle import RunningFlow
    from cutline.spark.distinct import distinct

__version__ = "0.1.0"
__all__ = [
    "Flow",
    "Operator",
    "RewoundError",
    "RunningFlow",
    "TakenBackError",
    "__version__",
    "distinct",
    "errors",
    "latest_common_epoch",
    "read",
    "sinks",
]

_HOMES = {
    "Flow": "cutline.flow",
    "Operator": "cutline.flow",
    "RewoundError": "cutline.errors",
    "RunningFlow": "cutline.runtime.handle",
    "TakenBackError": "cutline.errors",  # the name of earlier versions
    "latest_common_epoch": "cutline.connectors.flow_reading",
    "read": "cutline.connectors.flow_reading",
    "distinct": "cutline.spark.distinct",
}
_MODULES = {"errors": "cutline.errors", "sinks": "cutline.sinks"}


def _load_launcher() -> Launcher:
    from cutline.runtime.launch import start_flow

    return start_flow


register_launcher(_load_launcher)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'cutline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
