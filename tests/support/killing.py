"""Run something in a process of its own that is killed on the way, as kill -9 does it."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE


def is_killed_at(point: str, function: Callable[[], object]) -> bool:
    """Run ``function`` in a copy of this process that dies at a crash point; False: it came to its end alive."""
    child = os.fork()
    if child == 0:
        os.environ[ENVIRONMENT_VARIABLE] = point
        try:
            function()
        except BaseException:  # noqa: BLE001 (the copy must never go on as a second pytest)
            traceback.print_exc()
            os._exit(2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError("the process failed before it was killed; see stderr")
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def is_killed_after(seconds: float, function: Callable[[], object]) -> bool:
    """Run ``function`` in a copy of this process that is killed after a time; False: it came to its end before."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:  # noqa: BLE001 (as above)
            traceback.print_exc()
            os._exit(2)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status != 0:
                raise AssertionError("the process failed before it was killed; see stderr")
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError("the process failed before it was killed; see stderr")
    return True
