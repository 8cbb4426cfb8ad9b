"""A JVM that starts while the flow's file is still being read: the session then waits for less."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from cutline.spark.jvm.gateway import end_jvm, launch_jvm

#: In the settings of the JVM: tells it from others.
_MARK = "spark.cutline.jvm"
_LOOK_SECONDS = 0.05


class EarlyJvm:
    """Started before it is known whether it is of use.

    The flow's file may change what a JVM is started with: its environment, its folder. Then this one is given up.
    """

    def __init__(self, settings: Mapping[str, str], on_line: Callable[[str], None] | None) -> None:
        self._settings = dict(settings)
        self._mark = secrets.token_hex(8)
        self._on_line = on_line or _print
        self._surroundings = _surroundings()
        self._gateway: Any = None
        self._lock = threading.Lock()
        #: What it has printed before it was taken: until then nothing is known of where log lines go.
        self._held: list[str] | None = []
        self._thread = threading.Thread(target=self._launch, name="cutline-early-jvm", daemon=True)
        self._thread.start()

    def _launch(self) -> None:
        try:
            self._gateway = launch_jvm({**self._settings, _MARK: self._mark}, self._hear)
        except Exception:  # noqa: BLE001 (whatever is wrong is reported when the session is opened)
            return

    def _hear(self, line: str) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(line)
                return
        self._on_line(line)

    def take(self, settings: Mapping[str, str]) -> Any:
        """The gateway to the JVM; None if it does not fit, or could not be started. Waits until it answers."""
        if dict(settings) != self._settings or _surroundings() != self._surroundings:
            self.give_up()
            return None
        self._thread.join()
        if self._gateway is None:
            return None
        with self._lock:
            held, self._held = self._held or [], None
        for line in held:
            self._on_line(line)
        return self._gateway

    def give_up(self) -> None:
        """End it: another JVM is used."""
        while self._thread.is_alive():
            end_jvm(self._mark)  # it may be about to be started
            self._thread.join(_LOOK_SECONDS)
        end_jvm(self._mark)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _surroundings() -> tuple[dict[str, str], str]:
    return dict(os.environ), os.getcwd()
