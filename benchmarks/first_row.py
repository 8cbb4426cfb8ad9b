"""How long a person waits for the first published row of the README's flow: from ``cutline run`` to a readable table.

The phases are watched from outside, by what appears on the disk, so that versions can be compared:

Python      until the JVM's process exists: imports, the flow's file, options
Java        until the JVM answers Python: the connection file of the gateway is gone
Spark       until the session is open: the flow's lock names the JVM
recovery    until the generation is entered: planning of the queries, stores, recovery path
batches     until the operator with the sink has appended its first batch
checkpoint  until a manifest exists that is newer than this batch
publishing  until the Delta table holds rows

CPU seconds are those of all processes of the command, up to the first row. With ``--against SRC`` the same is measured
for another version's ``src`` folder, alternately.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOOK_SECONDS = 0.01
DEADLINE_SECONDS = 240.0
PHASES = ("Python", "Java", "Spark", "recovery", "batches", "checkpoint", "publishing")

#: As in README.md.
FLOW = """\
import cutline
from pyspark.sql import functions as F

flow = cutline.Flow("payments")


@flow.operator()
def cards(spark):
    return spark.readStream.schema("merchant string, amount long").json("in/cards")


@flow.operator()
def upi(spark):
    return spark.readStream.schema("merchant string, amount long").json("in/upi")


@flow.operator(inputs=[cards, upi], subtasks=4)
def totals(cards, upi):
    return cards.union(upi).groupBy("merchant").agg(F.sum("amount").alias("amount"))


flow.sink(totals, cutline.sinks.Delta("out/totals", mode="upsert", key=["merchant"]), output_mode="update")
"""

#: What the command ``cutline`` does; former versions had no ``__main__``.
COMMAND = """\
import importlib, importlib.util, sys
name = "cutline.__main__" if importlib.util.find_spec("cutline.__main__") else "cutline.cli.main"
sys.exit(importlib.import_module(name).main())
"""


# ------------------------------------------------------------------------------------------------- one run


def measured(source: Path) -> dict[str, float]:
    """One run: the seconds of every phase, of all, and of the processors."""
    folder = Path(tempfile.mkdtemp(prefix="cutline-first-row-"))
    try:
        _prepare(folder)
        return _run(folder, source)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder: Path) -> None:
    (folder / "flow.py").write_text(FLOW)
    for source in ("cards", "upi"):
        (folder / "in" / source).mkdir(parents=True)
        rows = [{"merchant": f"m{number % 20}", "amount": number} for number in range(1_000)]
        (folder / "in" / source / "rows.json").write_text("\n".join(map(json.dumps, rows)))


def _run(folder: Path, source: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "run", "flow.py", "--storage", "storage"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("wb"),
        start_new_session=True,
    )
    try:
        ends = [_wait(process, folder, is_over) for is_over in _ends_of_phases(folder, process.pid)]
        processors = _cpu_seconds(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _kill_session(process.pid)
        process.wait()
    seconds = [end - start for start, end in zip([began, *ends], ends, strict=False)]
    return {**dict(zip(PHASES, seconds, strict=True)), "all": ends[-1] - began, "CPU": processors}


def _ends_of_phases(folder: Path, pid: int) -> list[Callable[[], bool]]:
    flow = folder / "storage" / "payments"
    batch_ns: list[int] = []
    return [
        lambda: _jvm(pid) is not None,
        lambda: _has_connected(pid),
        lambda: (jvm := _jvm(pid)) is not None and str(jvm) in _text(flow / "lock"),
        lambda: any((flow / "generations").glob("*.json")),
        lambda: _note_first(batch_ns, (flow / "channels" / "totals").glob("g*/*.json")),
        lambda: any(_changed_ns(path) > batch_ns[0] for path in (flow / "checkpoints").glob("*/manifest.json")),
        lambda: any('"add"' in _text(path) for path in (folder / "out/totals/_delta_log").glob("*.json")),
    ]


def _note_first(found_ns: list[int], entries: Iterable[Path]) -> bool:
    """Whether there is a batch, and not only the barrier of a checkpoint that the timer began before it."""
    found_ns += [_changed_ns(path) for path in entries if '"type":"data"' in _text(path)]
    return bool(found_ns)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _wait(process: subprocess.Popen[bytes], folder: Path, is_over: Callable[[], bool]) -> float:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_over():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no first row:\n{_text(folder / 'stderr')[-4000:]}")
        time.sleep(LOOK_SECONDS)
    return time.monotonic()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------- processes


def _session(pid: int) -> list[tuple[int, list[str]]]:
    """The processes of the command, with the fields of their ``stat`` after the name."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := _text(folder / "stat")):
            fields = stat.rpartition(")")[2].split()
            if fields[3] == str(pid):
                found.append((int(folder.name), fields))
    return found


def _jvm(pid: int) -> int | None:
    for one, _ in _session(pid):
        if "org.apache.spark.deploy.SparkSubmit" in _text(Path(f"/proc/{one}/cmdline")):
            return one
    return None


def _has_connected(pid: int) -> bool:
    """Python has a connection over TCP; before, it has none."""
    tables = _text(Path(f"/proc/{pid}/net/tcp")) + _text(Path(f"/proc/{pid}/net/tcp6"))
    open_here = {fields[9] for line in tables.splitlines() if (fields := line.split())[3] == "01"}
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(handle)
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in open_here:
            return True
    return False


def _cpu_seconds(pid: int) -> float:
    ticks = sum(sum(map(int, fields[11:15])) for _, fields in _session(pid))
    return ticks / os.sysconf("SC_CLK_TCK")


def _kill_session(pid: int) -> None:
    for one, _ in _session(pid):
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue


# ------------------------------------------------------------------------------------------------- all runs


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="the src folder of another version, measured alternately")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the flow under way is ended too
    versions = {"this": ROOT / "src"} | ({"other": arguments.against.resolve()} if arguments.against else {})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for number in range(arguments.runs):
        # Alternately, and in turn each first: the machine's speed changes while the benchmark runs.
        for name in sorted(versions, reverse=bool(number % 2)):
            runs[name].append(measured(versions[name]))
            print(name, {key: round(value, 2) for key, value in runs[name][-1].items()}, file=sys.stderr)
    result: dict[str, Any] = {"benchmark": "first_row", "runs": arguments.runs}
    result |= {
        name: {"median": medians(own), "all": [round(run["all"], 2) for run in own]} for name, own in runs.items()
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
