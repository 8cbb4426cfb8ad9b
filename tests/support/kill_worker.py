"""A process that runs the small payments flow, to be killed.

``python -m tests.support.kill_worker FOLDER MODE [back]``. Without a crash point it runs the flow to its end. With
``back`` it runs for a while first, and is then taken back by a person behind what its sinks have published.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE, PID_VARIABLE
from cutline.config.spark_settings import SparkStart
from cutline.spark.session import jvm_pid, open_session
from tests.support.payments import payments_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.runtime.handle import RunningFlow

CARD_ROWS, UPI_ROWS = 60_000, 20_000
#: A process that is to be killed takes small steps, so that a long chain of them never runs out of rows: without rows
#: some points are never passed. The last one takes large ones.
ROWS_PER_BATCH_BEFORE_A_KILL, ROWS_PER_BATCH = 400, 4_000

_BATCHES_SECONDS = 120.0


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    spark = session_to_kill()
    epoch = published_past(start(spark, folder, mode, interval="1h")) if "back" in sys.argv else None
    run_until_killed(start(spark, folder, mode, restore_to=epoch))


def session_to_kill() -> SparkSession:
    """A session whose JVM may be the victim."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # A killed JVM leaves its temporary files behind: they go where ours go, which is where the test can remove them.
    options = (
        f"-Djdk.lang.Process.launchMechanism=VFORK -XX:TieredStopAtLevel=1 -Djava.io.tmpdir={tempfile.gettempdir()}"
    )
    spark = open_session("kill-test", None, SparkStart(settings={"spark.driver.extraJavaOptions": options}))
    os.environ[PID_VARIABLE] = str(jvm_pid(spark))
    return spark


def run_until_killed(run: RunningFlow) -> None:
    """Without a crash point: until all input is processed."""
    print("it runs:", run.status().recovery.path, flush=True)
    run.process_all_available()
    if is_to_be_killed():
        run.await_termination()  # checkpoints go on until the point is passed
    run.stop()


def is_to_be_killed() -> bool:
    return ENVIRONMENT_VARIABLE in os.environ


def start(
    spark: SparkSession, folder: Path, mode: str, *, interval: str = "400ms", restore_to: int | None = None
) -> RunningFlow:
    flow = payments_flow(
        folder,
        card_rows=CARD_ROWS,
        upi_rows=UPI_ROWS,
        rows_per_batch=ROWS_PER_BATCH_BEFORE_A_KILL if is_to_be_killed() else ROWS_PER_BATCH,
    )
    return flow.start(
        spark=spark,
        storage=str(folder / "storage"),
        restore_to=restore_to,
        checkpoint_interval=interval,
        mode=mode,
        retain_checkpoints=2,
        checkpoint_timeout="20s",
    )


def published_past(run: RunningFlow) -> int:
    """A checkpoint behind which every sink has published rows; the flow is stopped then."""
    epoch = run.trigger_checkpoint(timeout=_BATCHES_SECONDS)
    before = batches_of(run)
    deadline = time.monotonic() + _BATCHES_SECONDS
    while any(batches_of(run)[name] < before[name] + 2 for name in ("cards", "totals")):
        assert time.monotonic() < deadline, f"no two batches after {before}"
        time.sleep(0.05)
    run.trigger_checkpoint(timeout=_BATCHES_SECONDS)
    run.stop()
    return epoch


def batches_of(run: RunningFlow) -> dict[str, int]:
    return {name: operator.batches for name, operator in run.status().operators.items()}


if __name__ == "__main__":
    main()
