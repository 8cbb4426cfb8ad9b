"""The sinks a flow can publish to. Names are loaded on first use: Spark workers import only the sinks they write to."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutline.connectors.delta.sink import Delta
    from cutline.connectors.foreach.sink import Foreach
    from cutline.connectors.iceberg.sink import Iceberg
    from cutline.connectors.kafka.sink import Kafka
    from cutline.connectors.nats.sink import JetStream
    from cutline.connectors.parquet.sink import Parquet
    from cutline.connectors.postgres.sink import Postgres
    from cutline.connectors.sqlite.sink import SQLite

__all__ = ["Delta", "Foreach", "Iceberg", "JetStream", "Kafka", "Parquet", "Postgres", "SQLite"]

_HOMES = {
    "Delta": "cutline.connectors.delta.sink",
    "Foreach": "cutline.connectors.foreach.sink",
    "Iceberg": "cutline.connectors.iceberg.sink",
    "JetStream": "cutline.connectors.nats.sink",
    "Kafka": "cutline.connectors.kafka.sink",
    "Parquet": "cutline.connectors.parquet.sink",
    "Postgres": "cutline.connectors.postgres.sink",
    "SQLite": "cutline.connectors.sqlite.sink",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
