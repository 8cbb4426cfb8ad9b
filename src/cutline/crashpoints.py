"""Named places where a test may kill the process, so that "what if it dies between these two lines?" has a test.

In production every point is one dictionary look-up. A test sets ``CUTLINE_CRASH_AT=after-append:totals#3``: the third
time the process reaches the point ``after-append`` for ``totals`` it receives SIGKILL, as real as any other kill -9.
"""

from __future__ import annotations

import os
import signal
import threading

ENVIRONMENT_VARIABLE = "CUTLINE_CRASH_AT"

#: Every point that exists, in the order a batch and a checkpoint pass them. Tests iterate over this.
POINTS: tuple[str, ...] = (
    "after-stage",  # executors have written segments and staged sink output; no entry names them yet
    "after-append",  # the batch's entry is in the log; Spark has not committed the batch
    "after-barrier",  # the cut is in the log; nothing is pinned
    "after-pin",  # files are linked; nothing is hashed or recorded
    "after-record",  # the operator's record is stored; the coordinator has not heard of it
    "after-ack",  # the coordinator has counted an acknowledgement
    "after-pending",  # the pending epoch is recorded; no barrier was injected
    "before-manifest",  # everyone has acknowledged; no manifest
    "after-manifest",  # the checkpoint exists; no sink was told
    "sink-commit-begun",
    "sink-commit-half",
    "sink-commit-done",  # the sink has published; the coordinator does not know
    "sink-rewind-half",  # some of a sink's given-up epochs are taken back
    "after-sink-commits",  # all sinks have published; nothing was collected
    "mid-truncate",  # some entries of a channel are deleted
    "mid-collect",  # some files of an expired checkpoint are deleted
    "restore-dirs-built",  # new Spark directories exist; the generation that uses them does not
    "restore-generation",  # the new generation exists; sinks were not yet rewound, nothing runs
)

_lock = threading.Lock()
_passes = 0


def crashpoint(name: str, scope: str = "") -> None:
    """Die here if the environment says so. ``scope`` is the operator or sink, when there is one."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE)
    if wanted:
        _maybe_die(wanted, name, scope)


def _maybe_die(wanted: str, name: str, scope: str) -> None:
    global _passes  # noqa: PLW0603 (one process dies once: a counter of the process is what is meant)
    target, _, count = wanted.partition("#")
    point, _, wanted_scope = target.partition(":")
    if point != name or (wanted_scope and wanted_scope != scope):
        return
    with _lock:
        _passes += 1
        if _passes >= int(count or "1"):
            os.kill(os.getpid(), signal.SIGKILL)
