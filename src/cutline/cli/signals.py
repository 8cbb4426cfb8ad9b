"""How Ctrl-C and SIGTERM end a command."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: How long a command may take to hear a signal.
_HEARING_SECONDS = 3.0
#: Within this time a signal counts as the same one again: a shell and a wrapper may both pass on one Ctrl-C.
_SAME_SECONDS = 1.0
#: How long a start may take to release what it holds once it is interrupted.
_START_SECONDS = 0.8
_heard = threading.Event()
#: This process is a command of ours, and does nothing else.
is_command = threading.Event()
#: Set by a command that starts flows, while none runs yet.
is_starting = threading.Event()


class Interrupted(SystemExit):
    """A signal ends the command."""


def interrupted_by(error: BaseException) -> Interrupted | None:
    one: BaseException | None = error
    while one is not None and not isinstance(one, Interrupted):
        one = one.__context__
    return one


def end_on_signals() -> None:
    """Let SIGTERM and Ctrl-C end any command: what it holds is released, and a request to a flow is withdrawn.

    Python hears a signal only between two of its own steps. A command that does not hear it, because it waits inside a
    library for a store that does not answer, ends without that: every step of every command may be its last one. So
    does a command that is told a second time while it still releases what it holds.
    """
    is_command.set()
    heard = on_signals(_interrupt)
    ringing, bell = socket.socketpair()
    bell.setblocking(False)
    signal.set_wakeup_fd(bell.fileno())

    def watch(ringing: socket.socket, _: socket.socket) -> None:
        first_s: float | None = None
        while number := ringing.recv(1):
            if number[0] not in _SIGNALS:
                continue
            is_second = first_s is not None and time.monotonic() - first_s > _SAME_SECONDS
            first_s = time.monotonic() if first_s is None else first_s
            if is_starting.is_set():
                # Nothing runs yet, and every step of a start may be its last one. What it holds may take longer.
                time.sleep(_START_SECONDS)
                end_spark()
                _end_now(number[0])
            if is_second or not heard.wait(_HEARING_SECONDS):
                _end_now(number[0])

    # The thread keeps both ends open.
    threading.Thread(target=watch, args=(ringing, bell), name="cutline-signals", daemon=True).start()


def _end_now(number: int) -> None:
    if sys.stderr is not None and os.isatty(2):
        os.write(2, b"\x1b[?25h\r\n")  # a view may have hidden the cursor
    if number == signal.SIGINT:
        os.write(2, b"error: interrupted\n")
    os._exit(128 + number)


def end_spark() -> None:
    """A start ends: the next one need not wait until the JVM has noticed that this process is gone."""
    gateway = sys.modules.get("cutline.spark.jvm.gateway")
    if gateway is not None:
        gateway.end_jvm()


def _interrupt(number: int) -> None:
    raise Interrupted(128 + number)


def on_signals(act: Callable[[int], object]) -> threading.Event:
    """Act when a signal is heard; the returned event is set then."""

    def hear(number: int, _: object) -> None:
        _heard.set()
        act(number)

    for number in _SIGNALS:
        signal.signal(number, hear)
    return _heard
