"""Named places where a test may kill the process, so that "what if it dies between these two lines?" has a test.

In production every point is one dictionary look-up. A test sets ``CUTLINE_CRASH_AT=after-append:totals#3``: the third
time the process reaches the point ``after-append`` for ``totals`` it receives SIGKILL, as real as any other kill -9.

With ``CUTLINE_CRASH_VICTIM=jvm`` the process whose id is in ``CUTLINE_CRASH_PID`` is killed instead: the JVM that runs
the queries. This process continues without it, and passes the point only once the JVM is dead.
"""

from __future__ import annotations

import os
import select
import signal
import threading

ENVIRONMENT_VARIABLE = "CUTLINE_CRASH_AT"
VICTIM_VARIABLE = "CUTLINE_CRASH_VICTIM"
PID_VARIABLE = "CUTLINE_CRASH_PID"

#: What may be killed: this process, or the JVM.
VICTIMS: tuple[str, ...] = ("python", "jvm")

#: What a process that has reached the point writes to its output, with point and victim.
REACHED = "cutline crash point reached"

#: The kernel ends a killed process immediately; if it takes longer than this, the machine hangs.
_DEATH_SECONDS = 30.0

#: Every point that exists, in the order a batch and a checkpoint pass them. Tests iterate over this.
POINTS: tuple[str, ...] = (
    "after-stage",  # executors have written segments and staged sink output; no entry names them yet
    "after-append",  # the batch's entry is in the log; Spark has not committed the batch
    "after-barrier",  # the cut is in the log; no file is held
    "after-pin",  # files are held; nothing is hashed or recorded
    "after-record",  # the operator's record is stored; the coordinator has not heard of it
    "after-ack",  # the coordinator has counted an acknowledgement
    "after-pending",  # the pending epoch is recorded; no barrier was injected
    "before-manifest",  # all operators have acknowledged; no manifest
    "after-manifest",  # the checkpoint exists; no sink was told
    "sink-commit-begun",
    "sink-commit-half",
    "sink-commit-done",  # the sink has published; the coordinator does not know
    "sink-rewind-half",  # some of a sink's abandoned epochs are rewound
    "after-sink-commits",  # all sinks have published; nothing was collected
    "mid-truncate",  # some entries of a channel are deleted
    "mid-collect",  # some files of an expired checkpoint are deleted
    "restore-dirs-built",  # new Spark directories exist; the generation that uses them does not
    "restore-generation",  # the new generation exists; sinks were not yet rewound, nothing runs
)
#: Passed only with a remote tier, with Spark's directories elsewhere, or when a savepoint is taken.
REMOTE_POINTS: tuple[str, ...] = (
    "remote-announced",  # the early upload is recorded in the remote tier; nothing is uploaded
    "remote-sent",  # all that a checkpoint needs is in the remote tier, but not its manifest
    "remote-sealed",  # the checkpoint is in the remote tier; the coordinator has not recorded it
    "remote-fetched-records",  # manifests and records are downloaded; no content is
    "remote-told",  # the restore is recorded in the remote tier; it has not happened
    "remote-fetched",  # everything is downloaded; nothing is decided
    "live-dir-half",  # a directory built here is copied to Spark's place; no mark says that it is whole
    "savepoint-sent",  # the content of a savepoint is in its folder; no record makes it a savepoint
    "aside-saved",  # what this storage did alone is a savepoint; its state is still in place
    "aside-moved",  # a part of its state is set aside
    "remote-carried",  # a checkpoint under new names is in the remote tier; its generation is not known there
)
#: Passed only when a flow restores a checkpoint whose operators differ from its own.
EVOLUTION_POINTS: tuple[str, ...] = (
    "carry-logs",  # the logs under the new names are there; no record of the new checkpoint is
    "carry-manifest",  # the checkpoint under the new names is there; the generation that it counts from is not
)
#: Passed only when older checkpoints are kept without logs, and when one of them is restored.
DETACH_POINTS: tuple[str, ...] = (
    "detached",  # what a checkpoint had in flight is stored with it; no card says that it is whole
    "put-back",  # a part of it is back in the logs; the generation that reads it does not exist
    "downloaded-aside",  # a savepoint, or a copy of the remote tier, has put it into the logs; it is not stored apart
)
#: Passed only by a start whose code differs from what the flow last ran; before it, "savepoint-sent".
DEPLOY_POINTS: tuple[str, ...] = (
    "deploy-saved",  # the savepoint of what the former code left exists; the generation of the new code does not
    "deploy-collected",  # an automatic savepoint beyond the number to keep is removed; nothing runs
)

#: Passed only by ``cutline restore --now``.
RESTORE_NOW_POINTS: tuple[str, ...] = (
    "restore-requested",  # the request is stored; the flow still runs
    "restore-stopped",  # the flow has stopped; nothing is restored
)

_lock = threading.Lock()
_passes = 0


def crashpoint(name: str, scope: str = "") -> None:
    """Die or kill here if the environment says so. ``scope`` is the operator or sink, when there is one."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE)
    if wanted:
        _maybe_die(wanted, name, scope)


def _maybe_die(wanted: str, name: str, scope: str) -> None:
    global _passes  # noqa: PLW0603 (a process dies or kills once: a counter of the process is what is meant)
    target, _, count = wanted.partition("#")
    point, _, wanted_scope = target.partition(":")
    if point != name or (wanted_scope and wanted_scope != scope):
        return
    with _lock:
        _passes += 1
        if _passes == int(count or "1"):  # once only: a process that kills the JVM continues and passes here again
            _kill(os.environ.get(VICTIM_VARIABLE, VICTIMS[0]), wanted)


def _kill(victim: str, point: str) -> None:
    if victim not in VICTIMS:
        raise ValueError(f"{VICTIM_VARIABLE}: {victim!r} is none of {', '.join(VICTIMS)}")
    pid = int(os.environ[PID_VARIABLE]) if victim == "jvm" else os.getpid()
    process = os.pidfd_open(pid)
    try:
        os.write(2, f"{REACHED}: {point} kills {victim}\n".encode())
        signal.pidfd_send_signal(process, signal.SIGKILL)
        if not select.select([process], [], [], _DEATH_SECONDS)[0]:
            raise TimeoutError(f"process {pid} was killed at {point} and still runs")
    finally:
        os.close(process)
