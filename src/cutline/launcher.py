"""How ``Flow.start`` reaches the code that runs flows: a flow is declared without importing its runtime.

The package registers a loader when it is imported; the first start calls it. Spark's Python workers import the package
too and start nothing, so nothing else may be imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

    from cutline.flow import Flow
    from cutline.runtime.handle import RunningFlow


class Launcher(Protocol):
    """Runs a flow; see ``Flow.start``."""

    def __call__(
        self,
        flow: Flow,
        *,
        spark: SparkSession | None,
        settings: Mapping[str, Any],
        restore_to: int | str | None = None,
        rename: Mapping[str, str] | None = None,
        allow_dropped: bool = False,
        rejoin: bool = False,
    ) -> RunningFlow: ...


_loaders: dict[str, Callable[[], Launcher]] = {}


def register_launcher(load: Callable[[], Launcher]) -> None:
    """``load`` is called at each start; the last registered loader is used."""
    _loaders["flow"] = load


def load_launcher() -> Launcher:
    return _loaders["flow"]()
