"""Whether a query can continue in its directory, given how far the directory and the operator's log are."""

from __future__ import annotations

from cutline.model.ids import NO_BATCH, BatchId


def mismatch(
    *, planned: BatchId, committed: BatchId, last_appended: BatchId, complete: BatchId, may_be_behind: bool
) -> str | None:
    """Why the directory does not match the log, as text; None if it does.

    ``planned``, ``committed``: the last batches that Spark has planned and finished in the directory.
    ``last_appended``: the last batch in the log. ``complete``: the operator's cut batch in the newest complete epoch.
    ``may_be_behind``: the directory may lack any number of batches, which the query runs again from its log.
    """
    if planned == NO_BATCH < last_appended and (may_be_behind or committed == NO_BATCH):
        return f"the directory is missing or empty, and the log ends with {_name(last_appended)}"
    if committed < complete and not may_be_behind:
        # The query would run batches again whose input may be released.
        return f"Spark has committed {_name(committed)}, but {_name(complete)} is part of a checkpoint"
    if committed > last_appended or (last_appended > committed + 1 and not may_be_behind):
        return f"Spark has committed {_name(committed)}, the log ends with {_name(last_appended)}"
    if not committed <= planned <= committed + 1 or (last_appended > planned and not may_be_behind):
        has = f"Spark has planned {_name(planned)} and committed {_name(committed)}"
        return f"{has}, the log ends with {_name(last_appended)}"
    return None


def _name(batch: BatchId) -> str:
    return "no batch" if batch == NO_BATCH else f"batch {batch}"
