"""A flow on Spark that is started with its tables beside its storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.flow import Flow
from tests.support.payments import ledger_ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ledger(tables: Path) -> list[int]:
    return sorted(ledger_ids(tables))


def start(spark: SparkSession, flow: Flow, tmp_path: Path, **more: Any) -> Any:
    return flow.start(
        spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, retain_checkpoints=20, **more
    )
