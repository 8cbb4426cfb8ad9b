"""The status of a flow with some of everything that the live view shows, at one fixed moment."""

from __future__ import annotations

from typing import Any

import msgspec

from cutline.model.status import FlowStatus

#: When the status was taken.
AT_MS = 1_767_225_600_000
_HOUR_MS = 3_600_000
_TRACE = "cutline-data/payments/traces/fraud_scores-3f0c9a1b.txt"


def _operator(inputs: list[str], **own: Any) -> dict[str, Any]:
    usual = {
        "inputs": inputs,
        "sources": [] if inputs else [{"source": "json", "guarded": True}],
        "active": True,
        "batches": 900,
        "backlog_rows": {},
        "waiting_for_room": False,
        "aligning": {},
        "restarts": 0,
    }
    return {**usual, **own}


def _outcome(epoch: int, ago_ms: int, **own: Any) -> dict[str, Any]:
    details = {
        "duration_ms": 48 + epoch % 7,
        "new_bytes": 1_180_000 + 3_000 * (epoch % 5),
        "size_bytes": 412_500_000,
        "in_flight_rows": 1_250 * (epoch % 3),
    }
    usual = {
        "epoch": epoch,
        "generation": 3,
        "started_ms": AT_MS - ago_ms - 50,
        "ended_ms": AT_MS - ago_ms,
        "outcome": "completed",
        "reason": "",
        "details": details,
        "code": "9c41d07be2",
    }
    return {**usual, **own}


_WRITTEN: dict[str, Any] = {
    "flow": "payments",
    "pid": 4711,
    "state": "unhealthy",
    "generation": 3,
    "recovery": {
        "path": "resume",
        "epoch": None,
        "reason": "",
        "problems": [],
        "lost_input": [],
        "operators": [],
        "counts": {"fresh": 1, "resume": 2},
    },
    "operators": {
        "cards": _operator(
            [], batch=4_810, rows=14_832_110, rows_per_second=1_648.2, batch_ms=212.0, backlog_rows={"totals": 1_320}
        ),
        "upi": _operator(
            [],
            batch=4_655,
            rows=61_210_480,
            rows_per_second=6_801.4,
            batch_ms=388.0,
            backlog_rows={"totals": 0, "fraud_scores": 482_300},
            backlog_ms={"totals": 0, "fraud_scores": 71_000},
            waiting_for_room=True,
        ),
        "totals": _operator(
            ["cards", "upi"],
            batch=4_790,
            rows=9_420_077,
            rows_per_second=1_011.8,
            batch_ms=461.0,
            state_bytes=391_400_000,
        ),
        "fraud_scores": _operator(
            ["upi"],
            batch=4_601,
            rows=410_220,
            batch_ms=1_874.0,
            restarts=2,
            failures=2,
            problem="ValueError: no model for currency 'XTS' (payments.py, line 41, in score)",
            trace=_TRACE,
            state_bytes=20_900_000,
        ),
    },
    "sinks": {
        "merchant_totals": {
            "operator": "totals",
            "published_epoch": 812,
            "published_epoch_ms": AT_MS - 6_000,
        },
        "fraud_alerts": {
            "operator": "fraud_scores",
            "published_epoch": 808,
            "published_epoch_ms": AT_MS - 46_000,
            "lag_ms": 36_000,
            "failures": 3,
            "problem": "connection to the database was refused",
        },
    },
    "health": {
        "healthy": False,
        "failures": 0,
        "reason": "fraud_alerts has failed to publish 3 times: connection to the database was refused",
    },
    "checkpoints": {
        "last_epoch": 812,
        "min_epoch": 640,
        "pins": [],
        "complete": [808, 809, 811, 812],
        "pending": {},
        "last_completed_ms": AT_MS - 6_000,
        "next_ms": AT_MS + 4_000,
        "interval_ms": 10_000,
    },
    "messages": {"links": {}, "acknowledgements": {}},
    "remote": None,
    "history": [
        _outcome(812, 6_000),
        _outcome(811, 16_000),
        _outcome(
            810,
            26_000,
            outcome="aborted",
            reason="snapshot of totals failed: OSError: no space left on device",
            details={"duration_ms": 1_204},
            code="",
        ),
        *(_outcome(epoch, 36_000 + 10_000 * (809 - epoch)) for epoch in range(809, 804, -1)),
    ],
    "code": {
        "hash": "9c41d07be2",
        "since_ms": AT_MS - 2 * _HOUR_MS,
        "python": "3.11.2",
        "pyspark": "4.3.0",
        "cutline": "0.1.0",
        "change": "code changed since epoch 640: function of fraud_scores",
        "savepoint": "auto-20251231-215959",
    },
    "started_ms": AT_MS - 2 * _HOUR_MS - 14 * 60_000,
    "at_ms": AT_MS,
}

SAMPLE: FlowStatus = msgspec.convert(_WRITTEN, FlowStatus)
