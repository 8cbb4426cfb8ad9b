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
    if may_be_behind and planned == NO_BATCH < last_appended:
        return "its folder holds no Spark checkpoint"
    if committed < complete and not may_be_behind:
        # The query would run batches again whose input may be released.
        return f"Spark has committed batch {committed}, but batch {complete} is part of a checkpoint"
    if committed > last_appended or (last_appended > committed + 1 and not may_be_behind):
        return f"Spark has committed batch {committed}, the log ends with batch {last_appended}"
    if not committed <= planned <= committed + 1 or (last_appended > planned and not may_be_behind):
        return f"Spark has planned batch {planned} and committed {committed}, the log ends with {last_appended}"
    return None
