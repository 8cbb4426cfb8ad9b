"""The process that is killed: it runs the torture flow as it is told, life after life.

``python -m tests.support.torture_worker`` reads one order per line (JSON) and starts a copy of itself for each, because
importing everything anew for every life would take longer than the lives. It answers with lines of JSON too.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE
from cutline.ports.sinks import Sink
from tests.support.torture_flow import EVENTS, LATEST, LONG_SECONDS, TortureFlow, rows_at_epochs

_BATCH_PAUSE_SECONDS = 0.004
#: How far back a rollback goes at most.
_EPOCHS_BACK = 4


def main() -> None:
    # The tests kill processes, never the machine: what is written is there without a sync, and much sooner.
    setattr(os, "fsync", lambda _: None)  # noqa: B010 (to mypy a function is not to be replaced)
    say(ready=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        importlib.import_module(order["make"].partition(":")[0])
        child = os.fork()
        if child == 0:
            live(order)
        say(pid=child)
        _, status = os.waitpid(child, 0)
        say(ended=status)


def live(order: dict[str, Any]) -> None:
    """One life, in a copy of the process; it never returns."""
    if order["crash_at"]:
        os.environ[ENVIRONMENT_VARIABLE] = order["crash_at"]
    try:
        Life(order).run()
    except BaseException:  # noqa: BLE001 (the copy must never go on as a second worker)
        Path(order["folder"], "error").write_text(traceback.format_exc())
        os._exit(2)
    os._exit(0)


class Life:
    """Runs until it is killed, or until ``more`` batches of events are published."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._folder = Path(order["folder"])
        self._random = random.Random(order["seed"])
        self._noted: set[int] = set()

    def run(self) -> None:
        flow = self._start()
        if self._order["rollback"]:
            epoch = self._run_past_an_epoch(flow)
            say(rolling_back_to=epoch)
            flow = self._start(restore_to=epoch)
        say(running=True)
        self._run(flow, self._order["more"] and flow.batches() + self._order["more"])
        flow.drain()
        flow.stop()

    def _start(self, restore_to: int | None = None) -> TortureFlow:
        return TortureFlow(
            self._folder,
            make_sinks(self._order),
            only_newest=self._order["only_newest"],
            restore_to=restore_to,
            **self._order["settings"],
        )

    def _run(self, flow: TortureFlow, until: int | None) -> None:
        """Batches and checkpoints, the one beside the other. Without ``until`` it ends when somebody kills it."""
        deadline = time.monotonic() + LONG_SECONDS
        checkpoint = None
        while until is None or flow.batches() < until:
            assert time.monotonic() < deadline, f"nobody has killed it: {self._order}"
            flow.check()
            flow.step(EVENTS)
            if self._random.random() < 0.3 and (checkpoint is None or checkpoint.done()):
                self._note_epochs()
                checkpoint = flow.request(aligned=self._random.random() < 0.3)
            if self._random.random() < 0.7:
                while flow.step(LATEST):
                    pass
            threading.Event().wait(_BATCH_PAUSE_SECONDS * self._random.random())

    def _run_past_an_epoch(self, flow: TortureFlow) -> int:
        """Publish something, stop, and choose an older checkpoint to go back to."""
        for _ in range(2):
            self._run(flow, flow.batches() + self._random.randint(1, 4))
            flow.drain()
        epochs = flow.epochs()
        flow.stop()
        self._note_epochs()
        # Behind what both sinks have published, or there would be nothing to take back.
        rows = {epoch: (events or 0, latest or 0) for epoch, (events, latest) in rows_at_epochs(self._folder).items()}
        last = rows[epochs[-1]]
        older = [epoch for epoch in epochs if rows[epoch][0] < last[0] and rows[epoch][1] < last[1]]
        return int(self._random.choice(older[-_EPOCHS_BACK:]))

    def _note_epochs(self) -> None:
        """Write down what readers may see of the checkpoints that are there now: they are not kept for ever."""
        new = rows_at_epochs(self._folder, but=self._noted)
        self._noted.update(new)
        with (self._folder / "epochs.jsonl").open("a") as notes:
            notes.writelines(json.dumps([epoch, *rows]) + "\n" for epoch, rows in new.items())


def make_sinks(order: dict[str, Any]) -> Mapping[str, Sink]:
    module, _, function = order["make"].partition(":")
    sinks: Mapping[str, Sink] = getattr(importlib.import_module(module), function)(order["config"])
    return sinks


def say(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


if __name__ == "__main__":
    main()
