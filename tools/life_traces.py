"""Counts the modules that one batch, one checkpoint and one restore after a host loss pass through.

    python tools/life_traces.py [--json] [--list]
    python tools/life_traces.py --draw docs/lives.md

Each life runs on real storage without Spark, with every thread profiled. A hop is a call from one module of cutline
into another. An upward pair is a call against the layers of pyproject.toml: a callback. A two-way pair is two modules
that call one another within the same life: a story that does not read in one direction.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

#: Background threads finish what a step has set off within this time.
_SETTLE_SECONDS = 0.3


class Trace:
    """Who called whom, by module."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.hops: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("cutline.") or frame.f_code.co_name in ("<module>", "<lambda>"):
            return
        self.modules.add(module)
        caller = _calling_module(frame)
        if caller is not None and caller != module:
            self.hops[caller, module] += 1

    def rooms(self) -> Counter[tuple[str, str]]:
        """Calls between rooms (packages of cutline)."""
        found: Counter[tuple[str, str]] = Counter()
        for (caller, called), times in self.hops.items():
            if room_of(caller) != room_of(called):
                found[room_of(caller), room_of(called)] += times
        return found

    def two_way(self) -> set[tuple[str, str]]:
        """Modules that call one another."""
        return {(a, b) for a, b in self.hops if a < b and (b, a) in self.hops}

    def figures(self) -> dict[str, int]:
        pairs, rank = set(self.hops), _ranks()
        return {
            "modules": len(self.modules),
            "module_pairs": len(pairs),
            "hops": sum(self.hops.values()),
            "upward_pairs": sum(rank.get(room_of(b), 0) < rank.get(room_of(a), 0) for a, b in pairs),
            "two_way_pairs": len(self.two_way()),
        }


def room_of(module: str) -> str:
    return module.split(".")[1]


def _ranks() -> dict[str, int]:
    """The layer of every room, counted from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [one["layers"] for one in settings["contracts"] if one["id"] == "layers"]
    return {name: rank for rank, line in enumerate(layers) for name in re.findall(r"\w+", line)}


def _calling_module(frame: FrameType) -> str | None:
    caller = frame.f_back
    while caller is not None:
        module = str(caller.f_globals.get("__name__", ""))
        if module.startswith("cutline."):
            return module
        if module.startswith(("tests.", "__main__")):
            return None
        caller = caller.f_back
    return None


@contextmanager
def traced() -> Iterator[Trace]:
    """Calls of every thread that is started from now on, and of this one."""
    trace = Trace()
    # From Python 3.12 on, threads that run already are traced too.
    getattr(threading, "setprofile_all_threads", threading.setprofile)(trace)
    sys.setprofile(trace)
    try:
        yield trace
        time.sleep(_SETTLE_SECONDS)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def lives(folder: Path) -> dict[str, Trace]:
    """Threads that were started before tracing are seen only on Python 3.12; so each life has a flow of its own."""
    settings: dict[str, Any] = {"remote": str(folder / "remote"), "retain_checkpoints": 2}
    idle = _of_idle(folder / "idle")
    with traced() as batch:
        flow = SparklessFlow(folder / "batch")
        flow.step(NUMBERS)
        flow.wait(lambda: flow.step(TOTALS))
    _without(batch, idle)
    flow.stop()
    with traced() as started:
        flow = SparklessFlow(folder / "checkpoint")
        flow.emit(1)
        flow.checkpoint()
        flow.emit(1)
        time.sleep(_SETTLE_SECONDS)
        started.hops.clear()
        started.modules.clear()
        flow.run.trigger_checkpoint(mode="unaligned")  # it releases the one before
    checkpoint = started
    flow.stop()
    host = folder / "host"
    flow = SparklessFlow(host, **settings)
    flow.emit(2)
    epoch = flow.checkpoint()
    flow.wait(lambda: flow.run.wait_remote(epoch, timeout=0.01))
    flow.stop()
    shutil.rmtree(host / "storage")
    with traced() as restore:
        flow = SparklessFlow(host, **settings)
    flow.stop()
    return {"batch": batch, "checkpoint": checkpoint, "restore after host loss": restore}


def _of_idle(folder: Path) -> Trace:
    with traced() as trace:
        flow = SparklessFlow(folder)
    flow.stop()
    return trace


def _without(trace: Trace, idle: Trace) -> None:
    """What merely starting a flow does is no part of the batch's life."""
    trace.hops -= idle.hops
    trace.modules = {module for pair in trace.hops for module in pair}


#: Rooms without a life of their own: every module uses them.
_FOUNDATIONS = {"base", "model", "errors", "config", "ports"}


def drawn(found: dict[str, Trace]) -> str:
    """The lives as Mermaid flowcharts: rooms, and how many of their functions call one another."""
    parts = [
        "# The three lives, as they run\n\nDrawn by `tools/life_traces.py` from real runs without Spark. "
        "An arrow says that code of one room calls code of another; foundations (base, model, ports) are left out.\n"
    ]
    for name, trace in found.items():
        arrows = [
            f"    {a} --> {b}"
            for a, b in sorted(trace.rooms(), key=lambda pair: (_ranks().get(pair[0], 0), pair))
            if not {a, b} & _FOUNDATIONS
        ]
        parts.append(f"## {name.capitalize()}\n\n```mermaid\nflowchart TD\n" + "\n".join(arrows) + "\n```\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="name the modules, and the pairs that go both ways")
    parser.add_argument("--draw", type=Path, help="write the pictures to this file")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = lives(Path(folder))
    if wanted.draw:
        wanted.draw.write_text(drawn(found))
    if wanted.json:
        print(json.dumps({name: trace.figures() for name, trace in found.items()}, indent=1))
        return
    for name, trace in found.items():
        print(name, *(f"{key}={value}" for key, value in trace.figures().items()))
        if wanted.list:
            print("  ", *sorted(trace.modules))
            for a, b in sorted(trace.two_way()):
                print("   two ways:", a, "<->", b)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of stopped flows must not hold the process up
