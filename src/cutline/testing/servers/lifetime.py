"""Child processes that end when the process that started them ends, also by kill -9."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: Asks the kernel to kill this process with its parent, checks that the parent is still alive, then executes the
#: program. Not done between fork and exec (preexec_fn): that may hang in a process with threads.
_BECOME = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)
parent, user, *program = sys.argv[1:]
if user:
    os.setreuid(int(user), int(user))  # first: a change of the user cancels the request
if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
    sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
if os.getppid() != int(parent):
    sys.exit("the parent has ended already")
os.execvp(program[0], program)
"""

_launchers: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def start_child(command: Sequence[str], *, user: int | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Start a program that the kernel kills when this process ends; ``options`` are those of ``subprocess.Popen``.

    ``user``: the uid that the program runs as; it need not be able to run Python.

    The kernel sends its signal when the thread that started the child ends, so a dedicated thread, which lasts as long
    as the process, starts all children. On systems other than Linux the child is an ordinary one.
    """
    if not sys.platform.startswith("linux"):
        return subprocess.Popen(command, user=user, **options)
    wrapped = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), "" if user is None else str(user), *command]
    start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen
    return _launcher().submit(start, wrapped, **options).result()


def _launcher() -> ThreadPoolExecutor:
    with _lock:
        pid = os.getpid()  # a forked process has none of its parent's threads
        if pid not in _launchers:
            _launchers[pid] = ThreadPoolExecutor(1, thread_name_prefix="cutline-children")
        return _launchers[pid]
