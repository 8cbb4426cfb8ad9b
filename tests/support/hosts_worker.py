"""One life of one host of the torture flow, in a process that may be killed: see ``tests.support.hosts``.

``python -m tests.support.hosts_worker`` reads one order per line (JSON), and lives it in a copy of itself.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE
from cutline.errors import CutlineError, FencedError, OtherHistoryError
from tests.support.torture_flow import EVENTS, LATEST, TortureFlow
from tests.support.torture_worker import make_sinks, say


def main() -> None:
    # Processes are killed here, never the machine: what is written is there without a sync, and much sooner.
    setattr(os, "fsync", lambda _: None)  # noqa: B010 (to mypy a function is not to be replaced)
    say(ready=os.getpid())
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            live(json.loads(line))
        say(pid=child)
        _, status = os.waitpid(child, 0)
        say(ended=status)


def live(order: dict[str, Any]) -> None:
    if order["crash_at"]:
        os.environ[ENVIRONMENT_VARIABLE] = order["crash_at"]
    try:
        _run(order)
    except OtherHistoryError as error:
        _note(order, refused=str(error), can_rejoin=error.can_rejoin, restorable=error.restorable)
    except FencedError as error:
        _note(order, fenced=str(error))
    except CutlineError as error:
        _note(order, error=str(error), kind=type(error).__name__)
    except BaseException:  # noqa: BLE001 (the copy must never go on as a second worker)
        _note(order, error=traceback.format_exc(), kind="bug")
    os._exit(0)


def _note(order: dict[str, Any], **what: Any) -> None:
    Path(order["answer"]).write_text(json.dumps(what))


def _run(order: dict[str, Any]) -> None:
    chance = random.Random(order["seed"])
    flow = TortureFlow(
        Path(order["folder"]),
        make_sinks(order),
        only_newest=order["only_newest"],
        restore_to=order["restore_to"],
        rejoin=order["rejoin"],
        publish=order["publish"],
        **order["settings"],
    )
    until = flow.batches() + order["more"]
    try:
        _work(flow, until, chance)
    except Exception:
        flow.check()  # what ended the flow, rather than what the harness noticed of it
        raise
    path = flow.run.status().recovery.path
    flow.stop()
    _note(order, path=path, batches=until)


def _work(flow: TortureFlow, until: int, chance: random.Random) -> None:
    checkpoint = None
    while flow.batches() < until:
        flow.check()
        flow.step(EVENTS)
        if chance.random() < 0.4 and (checkpoint is None or checkpoint.done()):
            checkpoint = flow.request(aligned=chance.random() < 0.3)
        if chance.random() < 0.7:
            while flow.step(LATEST):
                pass
        threading.Event().wait(0.003 * chance.random())
    flow.drain()


if __name__ == "__main__":
    main()
