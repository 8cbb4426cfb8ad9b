"""``cutline checkpoints``, ``pin``, ``unpin`` and ``flows``: of running and of stopped flows, on real storage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutline.base import clock
from cutline.cli.flows_here import FlowHere
from cutline.cli.history.past import past_of
from cutline.cli.main import app
from cutline.config.options import Options
from cutline.errors import ConfigError, UnknownEpochError
from cutline.model.ids import Epoch
from cutline.runtime.lock import FlowLock
from cutline.storage.metadata.inspector import inspect_coordinator
from tests.support.running import running
from tests.support.sparkless import FolderSink, SparklessFlow
from tests.support.stored_flow import ORDERS, TOTALS, StoredFlow

Cli = Callable[..., Any]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs a command on the storage; its output, decoded if it is JSON."""

    def run(*arguments: str, columns: int = 80) -> Any:
        told = CliRunner().invoke(
            app, [*arguments, "--storage", str(tmp_path / "storage")], env={"COLUMNS": str(columns), "TZ": "UTC"}
        )
        if told.exception is not None and not isinstance(told.exception, SystemExit):
            raise told.exception
        assert told.exit_code == 0, told.output
        return json.loads(told.output) if "--json" in arguments else told.output

    return run


@contextmanager
def up(storage: Path, **settings: Any) -> Iterator[SparklessFlow]:
    """A running flow that other processes see as running."""
    with running(storage, **settings) as flow:
        lock = FlowLock(flow.layout.lock, "counting")
        lock.acquire()
        try:
            yield flow
        finally:
            lock.release()


def take(flow: SparklessFlow, count: int, rows: int = 2) -> None:
    for _ in range(count):
        flow.emit(rows)
        flow.checkpoint()


def test_each_checkpoint_of_a_stopped_flow_with_its_figures(tmp_path: Path, cli: Cli) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 3)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "storage").rglob("*")}
    told = cli("checkpoints", "--json")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "storage").rglob("*")} == before, "it only reads"
    assert (told["flow"], told["is_running"]) == ("counting", False)
    assert [one["epoch"] for one in told["epochs"]] == [1, 2, 3]
    first, second, _ = told["epochs"]
    assert first["new_bytes"] == first["size_bytes"] > 0
    assert 0 < second["new_bytes"] < second["size_bytes"], "it shares files with the one before"
    assert (second["sink_rows"], second["published_rows"]) == ({"table": 2}, 2)
    assert second["code"] == flow.checkpoints.load_manifest(Epoch(2)).code
    assert second["completed"].endswith("Z") and not second["is_pinned"] and second["why_not"] == []


def test_all_that_a_restore_needs_counts_as_its_size(tmp_path: Path, cli: Cli) -> None:
    with running(tmp_path, retain_checkpoints=5) as flow:
        take(flow, 1)
        record = flow.checkpoints.load_record(flow.checkpoints.load_manifest(Epoch(1)), flow.graph.names[1])
    files = {file.sha256: file.size_bytes for file in record.files()}
    assert cli("checkpoints", "--json")["epochs"][0]["size_bytes"] > sum(files.values()) > 0


def test_retention_by_the_options_of_the_running_flow(tmp_path: Path, cli: Cli) -> None:
    with up(tmp_path, retain_checkpoints=2, retain_age="1h", checkpoint_interval="1h") as flow:
        take(flow, 3)
        told = cli("checkpoints", "--json")
    assert told["is_running"]
    first, second, third = told["epochs"][-3:]  # the first checkpoint of a flow does not wait for the interval
    assert first["until_ms"] == first["completed_ms"] + 3_600_000, "by its age"
    assert second["until_ms"] == third["completed_ms"] + 3_600_000, "when the next checkpoint replaces it"
    assert third["until_ms"] == third["completed_ms"] + 7_200_000
    assert [one["limited_by"] for one in (first, second, third)] == [
        "its age",
        "the newest 2 stay",
        "the newest 2 stay",
    ]


def test_the_rung_that_keeps_a_checkpoint_is_named(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    begins_ms = 86_400_000 - clock.now_ms() % 86_400_000 + 1_000  # no minute ends while it runs
    monkeypatch.setattr(clock, "_STARTED_WALL_NS", clock._STARTED_WALL_NS + begins_ms * 1_000_000)
    with up(tmp_path, retain_checkpoints=1, retain="10min, 2h/1min, 2d/1h", checkpoint_interval="1h") as flow:
        take(flow, 3)
        told, shown = cli("checkpoints", "--json")["epochs"], cli("checkpoints", "--wide")
    first, second, third = told[0], told[-2], told[-1]
    assert (first["limited_by"], first["until_ms"]) == ("one per hour", first["completed_ms"] + 172_800_000)
    assert second["limited_by"] == "all of them", "the first of its minute and hour is older"
    assert second["until_ms"] == second["completed_ms"] + 600_000
    assert third["limited_by"] == "the newest stays", "for an hour, until there is another"
    assert "one per hour until" in " ".join(shown.split())


def test_a_pin_holds_while_the_flow_runs_and_when_it_has_stopped(tmp_path: Path, cli: Cli) -> None:
    with up(tmp_path, retain_checkpoints=1) as flow:
        take(flow, 1)
        assert "epoch 1 of flow counting is pinned" in cli("pin", "1")
        assert cli("checkpoints", "--json")["epochs"][0]["limited_by"] == "pinned"
        take(flow, 2)
        flow.wait(lambda: flow.checkpoints.epochs() == [1, 3])
        with pytest.raises(UnknownEpochError, match="epoch 2 is not a complete checkpoint") as refused:
            cli("pin", "counting", "2")
        assert refused.value.next_step == "available checkpoints: 1, 3" and "Next" not in refused.value.what
        assert refused.value.where == {"flow": "counting"}
    assert cli("pin", "counting", "3", "--json") == {"flow": "counting", "epoch": 3, "is_pinned": True}
    assert cli("unpin", "1", "--json") == {"flow": "counting", "epoch": 1, "is_pinned": False}
    assert inspect_coordinator(flow.layout.metadata).pins == {3}
    with pytest.raises(UnknownEpochError, match="epoch 1 is not pinned"):
        cli("unpin", "1")
    with pytest.raises(UnknownEpochError, match="available checkpoints: 1, 3"):
        cli("pin", "7")
    with pytest.raises(ConfigError, match="'x' is not the number of a checkpoint"):
        cli("pin", "x")
    with up(tmp_path, retain_checkpoints=1) as flow:
        take(flow, 1)
        flow.wait(lambda: flow.checkpoints.epochs() == [3, 4])
        cli("unpin", "counting", "3")
        flow.wait(lambda: flow.checkpoints.epochs() == [4])


class ShortSink(FolderSink):
    """Can be rewound to its second epoch, and no further."""

    def oldest_rewind(self) -> Epoch:
        return Epoch(2)


class ShortFlow(SparklessFlow):
    def sinks(self, storage: Path) -> dict[str, Any]:
        self.sink = ShortSink(storage / "table")
        return {"table": self.sink}


def test_what_a_sink_cannot_be_rewound_to_cannot_be_restored(tmp_path: Path, cli: Cli) -> None:
    flow = ShortFlow(tmp_path, retain_checkpoints=5)
    lock = FlowLock(flow.layout.lock, "counting")
    lock.acquire()
    try:
        take(flow, 3)
        told = cli("checkpoints", "--json")
        shown = cli("checkpoints")
    finally:
        lock.release()
        flow.stop()
    assert [one["why_not"] for one in told["epochs"]] == [
        ["sink table cannot be rewound further than epoch 2"],
        [],
        [],
    ]
    assert "epoch 1 cannot be restored: sink table cannot be rewound further than epoch 2" in " ".join(shown.split())
    note = next(one for one in cli("checkpoints", "--json")["notes"] if "stopped" in one)
    assert note == "the flow is stopped: how far table can be rewound is checked by its start", "its ledger is not kept"


def test_a_sink_that_is_not_rewound_is_named(tmp_path: Path, cli: Cli) -> None:
    with up(tmp_path, retain_checkpoints=5, on_rollback="keep") as flow:
        take(flow, 2)
        told = cli("checkpoints", "--json")
    assert "a restore does not rewind sink table: rows after the checkpoint are published again" in told["notes"]
    assert not any(one["why_not"] for one in told["epochs"])
    with up(tmp_path, retain_checkpoints=5, on_rollback="fail") as flow:
        flow.wait(flow.coordinator.is_settled)
        first, newest = cli("checkpoints", "--json")["epochs"]
    assert (first["why_not"], newest["why_not"]) == (["sink table must not be rewound"], [])


class SparseSink(ShortSink):
    """The epochs between its second and its fourth are merged."""

    def rewind_gaps(self) -> tuple[tuple[Epoch, Epoch], ...]:
        return ((Epoch(3), Epoch(4)),)


class SparseFlow(SparklessFlow):
    def sinks(self, storage: Path) -> dict[str, Any]:
        self.sink = SparseSink(storage / "table")
        return {"table": self.sink}


def test_a_stopped_flow_shows_what_its_sinks_said_last(tmp_path: Path, cli: Cli) -> None:
    flow = SparseFlow(tmp_path, retain_checkpoints=9)
    take(flow, 5)
    flow.wait(flow.coordinator.is_settled)
    flow.stop()
    told = cli("checkpoints", "--json")
    assert [one["why_not"] for one in told["epochs"]] == [
        ["sink table cannot be rewound further than epoch 2"],
        [],
        ["sink table cannot be rewound to epochs from 3 to 3"],
        [],
        [],
    ]
    assert not any("stopped" in note for note in told["notes"])
    (flow.layout.root / "restore-limits.json").write_bytes(b"{")
    told = cli("checkpoints", "--json")
    assert any("stopped" in note for note in told["notes"]) and not any(one["why_not"] for one in told["epochs"])


def test_the_table_fits_80_columns_and_shows_all_with_room(tmp_path: Path, cli: Cli) -> None:
    with running(tmp_path, retain_checkpoints=3) as flow:
        take(flow, 1)
        once = cli("checkpoints")
        take(flow, 4)
    narrow, roomy, wide = cli("checkpoints"), cli("checkpoints", columns=120), cli("checkpoints", "--wide")
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow + roomy + wide
    assert "UTC" not in narrow.splitlines()[1] and "limited by" not in narrow
    assert max(map(len, roomy.splitlines())) <= 120
    assert all(name in text for text in (roomy, wide) for name in ("UTC", "in flight", "code", "limited by"))
    assert "1 checkpoint of flow counting" in once
    assert "3 checkpoints of flow counting" in narrow
    assert [line.split()[0] for line in narrow.splitlines()[2:5]] == ["5", "4", "3"], "newest first"
    code = flow.recovered.record.code
    assert code is not None
    assert f" {code.hash[:6]} " in narrow.splitlines()[2] and f" {code.hash[:8]} " in roomy


def test_a_restore_that_waits_is_shown(tmp_path: Path, cli: Cli) -> None:
    with running(tmp_path, retain_checkpoints=3) as flow:
        take(flow, 2)
    assert [cli(name, "--json")["restore_requested"] for name in ("status", "checkpoints")] == ["", ""]
    cli("restore", "--to", "1")
    for shown in (cli("status"), cli("checkpoints"), cli("status", columns=160)):
        told = "a restore to 1 waits for the next start; cutline restore counting --cancel withdraws it"
        assert told in " ".join(shown.split())
    assert [cli(name, "--json")["restore_requested"] for name in ("status", "checkpoints")] == ["1", "1"]
    with running(tmp_path, retain_checkpoints=3):
        assert "waits for the next start" not in cli("status") + cli("checkpoints")


def test_a_flow_without_checkpoints(tmp_path: Path, cli: Cli) -> None:
    with running(tmp_path):
        pass
    assert "has no complete checkpoint yet" in cli("checkpoints")
    assert cli("checkpoints", "--json")["epochs"] == []


# ---------------------------------------------------------------------- flows


def test_all_flows_of_a_storage(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(ConfigError, match="which does not exist"):
        cli("flows")
    (tmp_path / "storage").mkdir()
    assert "there is no flow in" in cli("flows")
    with up(tmp_path) as flow:
        flow.wait(flow.layout.status.exists)
        take(flow, 2)
        told = cli("flows", "--json")["flows"]
        shown = cli("flows")
        assert "1 flow\n" in shown
        assert len(shown.splitlines()) == 3, shown  # no cell is wrapped at 80 columns
    (one,) = told
    assert (one["flow"], one["state"], one["last_epoch"]) == ("counting", "running", 2)
    assert one["pid"] and one["backlog_rows"] == 0 and one["problems"] == []
    shutil.copytree(tmp_path / "storage" / "counting", tmp_path / "storage" / "other-with-a-name-that-is-rather-long")
    shown = cli("flows")
    assert "other-with-a-name-that-is-rather-long" in shown and "2 flows" in shown
    (one, _) = cli("flows", "--json")["flows"]
    assert (one["state"], one["pid"], one["backlog_rows"]) == ("stopped", None, None)
    with pytest.raises(ConfigError, match="has 2 flows: counting, other-with"):
        cli("checkpoints")


def test_a_flow_whose_process_was_killed_has_a_problem(tmp_path: Path, cli: Cli) -> None:
    with up(tmp_path) as flow:
        take(flow, 1)
        flow.wait(flow.layout.status.exists)
        shutil.copytree(tmp_path / "storage", tmp_path / "then")
    written = json.loads((tmp_path / "then/counting/status.json").read_text())
    (tmp_path / "storage/counting/status.json").write_text(json.dumps({**written, "pid": 1 << 30}))
    (one,) = cli("flows", "--json")["flows"]
    assert one["state"] == "ended"
    assert "its process has ended" in one["problems"][0]


def test_a_damaged_flow_does_not_hide_the_others(tmp_path: Path, cli: Cli) -> None:
    with running(tmp_path) as flow:
        take(flow, 1)
    (tmp_path / "storage" / "broken").mkdir()
    (tmp_path / "storage" / "broken" / "status.json").write_text("{")
    (broken, fine) = cli("flows", "--json")["flows"]
    assert "the status cannot be read" in broken["problems"][0]
    assert fine["last_epoch"] == 1


# ---------------------------------------------------------------------- sources


class FileReader(StoredFlow):
    """Its batches of ``orders`` read one input file each, as Spark records it."""

    def read_file(self, number: int, inputs: Path) -> Path:
        self.run(ORDERS, until="appended")
        spark = self.spark_dir(ORDERS)
        with (spark / f"offsets/{number}").open("a") as file:
            file.write(f'\n{{"logOffset":{number}}}')
        path = inputs / f"{number}.json"
        path.write_text("{}")
        log = spark / f"sources/0/{number}"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("v1\n" + json.dumps({"path": f"file://{path}", "timestamp": 1, "batchId": number}))
        self.spark(ORDERS).commit(number)
        return path


def test_epochs_whose_input_is_gone_cannot_be_restored(tmp_path: Path) -> None:
    flow = FileReader(tmp_path)
    flow.start()
    (tmp_path / "inputs").mkdir()
    files = []
    for number in range(5):
        files.append(flow.read_file(number, tmp_path / "inputs"))
        flow.run(TOTALS)
        flow.checkpoint(number + 1)
    here = FlowHere(layout=flow.layout, options=Options())

    def refused(*, asks: bool = True) -> list[int]:
        return [one.epoch for one in past_of(here, asks=asks).epochs if one.why_not]

    assert refused() == []
    files[0].unlink()
    assert refused() == [], "every checkpoint has it"
    files[2].unlink()
    assert refused() == [1, 2], "the others are after it"
    (told, *_) = past_of(here, asks=True).epochs[0].why_not
    assert told.startswith("input of orders is gone: ") and str(files[2]) in told
    assert refused(asks=False) == []
    files[4].unlink()
    assert refused() == [1, 2, 3, 4]
