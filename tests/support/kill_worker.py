"""A process that runs the small payments flow, to be killed: ``python -m tests.support.kill_worker FOLDER MODE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cutline.crashpoints import PID_VARIABLE
from cutline.spark.session import jvm_pid, open_session
from tests.support.payments import payments_flow

CARD_ROWS, UPI_ROWS = 60_000, 20_000


def main() -> None:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    restore_to = int(sys.argv[3]) if len(sys.argv) > 3 else None
    options = "-Djdk.lang.Process.launchMechanism=VFORK -XX:TieredStopAtLevel=1"
    spark = open_session("kill-test", None, {"spark.driver.extraJavaOptions": options})
    os.environ[PID_VARIABLE] = str(jvm_pid(spark))
    run = payments_flow(folder, card_rows=CARD_ROWS, upi_rows=UPI_ROWS, rows_per_batch=2_000).start(
        spark=spark,
        storage=str(folder / "storage"),
        restore_to=restore_to,
        checkpoint_interval="400ms",
        mode=mode,
        retain_checkpoints=2,
        checkpoint_timeout="20s",
    )
    print("recovered", run.status()["recovery"]["path"], flush=True)
    run.process_all_available()
    run.stop()


if __name__ == "__main__":
    main()
