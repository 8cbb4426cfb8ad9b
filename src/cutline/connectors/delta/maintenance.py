"""Periodic checkpoints of a Delta table's log, as Delta's writers make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.base.logs import get_logger

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from cutline.connectors.delta.log import DeltaLog

#: Versions between two checkpoints of the log, unless the table says otherwise.
CHECKPOINT_INTERVAL = 100

_log = get_logger(__name__)


def write_log_checkpoint(table: DeltaTable, log: DeltaLog, seen: int) -> bool:
    """Write a checkpoint of the log if one is due since version ``seen``. Only reading gets slower if it fails."""
    from deltalake.exceptions import DeltaError

    configuration = table.metadata().configuration
    interval = int(configuration.get("delta.checkpointInterval") or CHECKPOINT_INTERVAL)
    if table.version() // interval == seen // interval:
        return False
    try:
        table.create_checkpoint()
        log.make_checkpoint_durable(table.version())
        if configuration.get("delta.enableExpiredLogCleanup", "true") != "false":
            table.cleanup_metadata()
    except (DeltaError, OSError) as error:
        _log.warning("delta_checkpoint_failed", path=str(log.folder), version=table.version(), error=str(error))
    return True
