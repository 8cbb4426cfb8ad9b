"""The lag of sources as the status shows it; against servers: tests/torture/test_source_lag.py."""

from __future__ import annotations

from cutline.ports.inspection import Expiry, PartitionProgress, SourceProgress
from cutline.runtime.measures.sources import lag_of


def test_lag_is_summed_and_the_first_expiry_counts() -> None:
    progress = SourceProgress(
        "topic orders",
        [PartitionProgress("orders/0", 5, 9), PartitionProgress("orders/1", 7, 7)],
        [Expiry(None), Expiry(2_000, "retention.bytes"), Expiry(1_000, "retention.ms")],
    )
    lag = lag_of(progress)
    assert (lag.source, lag.lag, [one.lag for one in lag.partitions]) == ("topic orders", 4, [4, 0])
    assert (lag.restorable_until_ms, lag.limited_by) == (1_000, "retention.ms")
    assert lag_of(SourceProgress("x", [], [Expiry(None)])).restorable_until_ms is None
