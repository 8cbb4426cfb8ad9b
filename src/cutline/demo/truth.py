"""What the published tables must hold, computed from the settings alone, without Spark and Cutline's runtime."""

from __future__ import annotations

from typing import Any

from cutline.demo.settings import DemoSettings

_BLOCK = 1_000_000


def check(settings: DemoSettings) -> dict[str, Any]:
    """Compare ledger and totals with the truth, payment by payment and merchant by merchant."""
    import numpy as np
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

    from cutline.connectors.generator.spark_reader import payments

    counts = np.zeros(settings.keys, dtype=np.int64)
    amounts = np.zeros(settings.keys, dtype=np.int64)
    for first in range(0, settings.rows, _BLOCK):
        block = payments(first, min(first + _BLOCK, settings.rows), keys=settings.keys, seed=settings.seed)
        counts += np.bincount(block["merchant"], minlength=settings.keys)
        np.add.at(amounts, block["merchant"], block["amount"])

    seen = np.zeros(settings.rows, dtype=np.int64)
    ledger = ds.dataset(str(settings.ledger), format="parquet", partitioning="hive")
    for batch in ledger.to_batches(columns=["payment_id"]):
        np.add.at(seen, batch.column("payment_id").to_numpy(), 1)

    published = DeltaTable(str(settings.totals_table)).to_pyarrow_table()
    merchant = published.column("merchant").to_numpy()
    count = published.column("payments").to_numpy()
    amount = published.column("amount").to_numpy()
    # Every update of a merchant has a higher count than the one before: the same pair twice is a row published twice.
    pairs = merchant * (settings.rows + 1) + count
    repeated_updates = len(pairs) - len(np.unique(pairs))
    order = np.lexsort((count, merchant))
    is_last = np.append(merchant[order][1:] != merchant[order][:-1], True) if len(order) else np.array([], dtype=bool)
    last = order[is_last]
    final_counts = np.zeros(settings.keys, dtype=np.int64)
    final_amounts = np.zeros(settings.keys, dtype=np.int64)
    final_counts[merchant[last]] = count[last]
    final_amounts[merchant[last]] = amount[last]

    missing_totals = int(np.maximum(counts - final_counts, 0).sum())
    extra_totals = int(np.maximum(final_counts - counts, 0).sum())
    return {
        "rows_in": settings.rows,
        "rows_counted": int(final_counts.sum()),
        "ledger_rows": int(seen.sum()),
        "lost": int((seen == 0).sum()) + missing_totals,
        "duplicated": int(np.maximum(seen - 1, 0).sum()) + extra_totals + repeated_updates,
        "wrong_amounts": int((final_amounts != amounts).sum()),
        "updates_published": len(pairs),
    }
