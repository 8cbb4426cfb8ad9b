"""Where a flow's rows go. Names are loaded on first use: Spark workers import only what they write with."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutline.sinks.delta import Delta
    from cutline.sinks.foreach import Foreach
    from cutline.sinks.jetstream import JetStream
    from cutline.sinks.kafka import Kafka
    from cutline.sinks.parquet import Parquet
    from cutline.sinks.postgres import Postgres
    from cutline.sinks.sqlite import SQLite

__all__ = ["Delta", "Foreach", "JetStream", "Kafka", "Parquet", "Postgres", "SQLite"]

_HOMES = {
    "Delta": "cutline.sinks.delta",
    "Foreach": "cutline.sinks.foreach",
    "JetStream": "cutline.sinks.jetstream",
    "Kafka": "cutline.sinks.kafka",
    "Parquet": "cutline.sinks.parquet",
    "Postgres": "cutline.sinks.postgres",
    "SQLite": "cutline.sinks.sqlite",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
