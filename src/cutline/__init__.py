"""Cutline: consistent checkpoints, recovery and exactly-once output for streaming pipelines on Apache Spark.

The public names are loaded when first used: Spark's Python workers import this package and need none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutline import sinks
    from cutline.connectors.reading import read
    from cutline.errors import TakenBackError
    from cutline.flow import Flow, Operator
    from cutline.runtime.handle import RunningFlow
    from cutline.spark.distinct import distinct

__version__ = "0.1.0"
__all__ = ["Flow", "Operator", "RunningFlow", "TakenBackError", "__version__", "distinct", "read", "sinks"]

_HOMES = {
    "Flow": "cutline.flow",
    "Operator": "cutline.flow",
    "RunningFlow": "cutline.runtime.handle",
    "TakenBackError": "cutline.errors",
    "read": "cutline.connectors.reading",
    "distinct": "cutline.spark.distinct",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "sinks":
        return importlib.import_module("cutline.sinks")
    raise AttributeError(f"module 'cutline' has no attribute {name!r}")
