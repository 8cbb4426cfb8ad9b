"""The status of a flow as it is stored in ``status.json``."""

from __future__ import annotations

from typing import Any

#: As version 0.1.0 wrote it.
WRITTEN: dict[str, Any] = {
    "flow": "counting",
    "pid": 2005,
    "state": "running",
    "generation": 2,
    "recovery": {
        "path": "local",
        "epoch": 4,
        "reason": "the directory of totals is gone",
        "problems": ["epoch 5: damaged"],
        "lost_input": [{"operator": "numbers", "what": "two.txt", "why": "gone", "parts": 1}],
        "operators": [{"fate": "kept", "was": "numbers", "now": "numbers", "note": "continues from epoch 4"}],
        "counts": {"fresh": 1, "local": 1},
    },
    "operators": {
        "numbers": {
            "inputs": [],
            "sources": [{"source": "text", "guarded": True, "note": ""}],
            "active": True,
            "batch": 7,
            "batches": 2,
            "rows": 2,
            "batch_ms": 7.9,
            "backlog_rows": {"totals": 3},
            "waiting_for_room": False,
            "aligning": {"6": ["slow"]},
            "restarts": 0,
        },
    },
    "sinks": {"table": {"operator": "numbers", "published_epoch": 5}},
    "health": {"healthy": True, "failures": 0, "reason": ""},
    "checkpoints": {
        "last_epoch": 6,
        "min_epoch": 4,
        "pins": [4],
        "complete": [4, 5],
        "pending": {"6": {"state": "collecting", "since_ms": 12, "missing": {"numbers": [0]}}},
    },
    "messages": {"links": {"repeated": 1}, "acknowledgements": {"accepted": 2}},
    "remote": {
        "url": "file:///remote/counting",
        "epoch": 4,
        "behind": 1,
        "last_ms": 148.9,
        "problem": "",
        "epochs": 1,
        "files": 6,
        "size_bytes": 593,
        "sent_bytes": 593,
        "ahead_bytes": 0,
        "failures": 0,
    },
    "history": [
        {
            "epoch": 5,
            "generation": 2,
            "started_ms": 100,
            "ended_ms": 170,
            "outcome": "completed",
            "reason": "",
            "details": {"duration_ms": 70, "operators": {"numbers": {"batch": 7}}},
        }
    ],
}

#: What later versions tell besides, as long as nothing is wrong.
_FINE: dict[str, Any] = {"failures": 0, "problem": ""}
_OPERATOR: dict[str, Any] = {
    "source_lag": [],
    "busy_ms": 0.0,
    "rows_per_second": 0.0,
    "backlog_ms": {},
    "trace": "",
    "state_bytes": None,
}
_SINK: dict[str, Any] = {"published_epoch_ms": None, "lag_ms": 0}
#: The same as this version reads and writes it.
AS_NOW: dict[str, Any] = {
    **WRITTEN,
    "operators": {name: {**one, **_FINE, **_OPERATOR} for name, one in WRITTEN["operators"].items()},
    "sinks": {name: {**one, **_FINE, **_SINK} for name, one in WRITTEN["sinks"].items()},
    "checkpoints": {**WRITTEN["checkpoints"], "last_completed_ms": None, "next_ms": None, "interval_ms": 0},
    "history": [{**one, "code": ""} for one in WRITTEN["history"]],
    "waiting": [],
    "failure": "",
    "code": None,
    "started_ms": 0,
    "at_ms": 0,
    "restore_requested": "",
    "starting": None,
    "cloned_from": None,
}
