"""A flow folder that version 0.1.0 wrote runs on: killed with -9 in mid-batch, with an epoch pending.

The sample holds storage, ledger and totals of ``tests/support/payments.py`` as that version left them. It is never made
again: it is what users of 0.1.0 have on their disks.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.payments import assert_exactly_once, payments_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SAMPLE = Path(__file__).parent / "samples" / "payments-0.1.0.tar.xz"
CARD_ROWS, UPI_ROWS = 400, 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(SAMPLE) as sample:
        sample.extractall(tmp_path, filter="data")
    return tmp_path


def finish(spark: SparkSession, folder: Path) -> str:
    """Start the flow on what is there and let it process everything; the recovery path it took."""
    flow = payments_flow(folder, card_rows=CARD_ROWS, upi_rows=UPI_ROWS, rows_per_batch=40)
    run = flow.start(spark=spark, storage=str(folder / "storage"), checkpoint_interval="500ms")
    try:
        path = str(run.status().recovery.path)
        run.process_all_available()
    finally:
        run.stop()
    return path


def test_a_flow_of_the_former_version_resumes_and_publishes_each_row_once(spark: SparkSession, folder: Path) -> None:
    assert finish(spark, folder) == "resume"
    assert_exactly_once(folder, card_rows=CARD_ROWS, upi_rows=UPI_ROWS)


def test_a_checkpoint_of_the_former_version_is_restored(spark: SparkSession, folder: Path) -> None:
    shutil.rmtree(folder / "storage" / "payments" / "spark" / "totals")
    assert finish(spark, folder) == "regional"
    assert_exactly_once(folder, card_rows=CARD_ROWS, upi_rows=UPI_ROWS)
