"""Verifying stored checkpoints: a good flow is good, every single damage is named, and nobody restores from it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cutline.base import records
from cutline.channels.entry_files import data_dir, entry_path, load
from cutline.cli.main import app
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import DamagedRecordError, RecoveryError, UnknownEpochError, UnknownFormatError
from cutline.maintenance.findings import EpochReport
from cutline.maintenance.verify import Verifier
from cutline.model.checkpoint import Tombstone
from cutline.model.entries import DataEntry
from cutline.model.ids import Epoch, Generation, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports.query_dir import FileSet
from cutline.storage.inspector import LocalInspector
from cutline.storage.local import LocalStore
from cutline.storage.metadata.inspector import inspect_coordinator
from tests.support.running import assert_each_once, running
from tests.support.spark_dirs import content_of
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow
from tests.support.stored_flow import ORDERS, StoredFlow
from tests.support.stored_flow import TOTALS as STORED_TOTALS

#: Kinds of files whose damage makes an epoch unfit to be restored.
EPOCH_KINDS = ["manifest", "record", "blob", "entry", "barrier", "segment"]
FLOW_KINDS = ["generation", "identity"]
THIRD = Epoch(3)


def verifier(layout: Layout, *, deep: bool = True, on_read: Callable[[int], None] = lambda _: None) -> Verifier:
    return Verifier(
        layout,
        LocalInspector(layout, ReplayGuard()),
        lambda: inspect_coordinator(layout.metadata),
        deep=deep,
        on_read=on_read,
    )


def problems_of(reports: list[EpochReport]) -> list[tuple[Epoch | None, str, str]]:
    return [(found.epoch, found.path, found.problem) for report in reports for found in report.problems]


# ------------------------------------------------------------------ a flow with something of everything


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped flow with epochs 1, 2 and 3; in flight at each cut are two entries. Made once, copied by each test."""
    storage = tmp_path_factory.mktemp("made")
    flow = SparklessFlow(storage, retain_checkpoints=3)
    try:
        for _ in range(3):
            flow.emit(2)
            flow.wait(lambda: not flow.step(TOTALS) and flow.operators[NUMBERS].credits.is_drained())
            flow.step(NUMBERS)
            flow.step(NUMBERS)
            # Unaligned, and nobody reads until it is complete: the two entries are in flight.
            future = flow.request()
            flow.wait(future.done)
    finally:
        flow.stop()
    manifest = LocalStore.reading(flow.layout).checkpoints.load_manifest(THIRD)
    assert manifest.channels[NUMBERS].in_flight[TOTALS].entries == 2
    return storage


@pytest.fixture
def storage(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "flow")
    return tmp_path / "flow"


def layout_of(storage: Path) -> Layout:
    return Layout(storage / "storage", "counting")


def target(layout: Layout, kind: str) -> Path:
    """One file of this kind that only epoch 3 needs."""
    store = LocalStore.reading(layout)
    manifest = store.checkpoints.load_manifest(THIRD)
    cut = manifest.operators[TOTALS]
    flight = manifest.channels[NUMBERS].in_flight[TOTALS]
    channel, generation = layout.channel(NUMBERS), manifest.generation
    if kind == "blob":
        older = {
            file.sha256
            for file in store.checkpoints.load_record(store.checkpoints.load_manifest(Epoch(2)), TOTALS).files()
        }
        files = store.checkpoints.load_record(manifest, TOTALS).files()
        return next(layout.blob(file.sha256) for file in files if file.content is None and file.sha256 not in older)
    if kind == "segment":
        entry = load(entry_path(channel, generation, flight.first))
        assert isinstance(entry, DataEntry)
        return data_dir(channel) / entry.segments[0].name
    return {
        "manifest": layout.manifest(THIRD),
        "record": layout.record(THIRD, TOTALS, cut.generation),
        "entry": entry_path(channel, generation, flight.first),
        "barrier": entry_path(channel, generation, flight.end),
        "generation": layout.generation(Generation(generation)),
        "identity": layout.identity,
    }[kind]


def flip(path: Path, *, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 1
    path.unlink()  # a blob may share its content with Spark's live directory
    path.write_bytes(bytes(data))


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut_short, "delete": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", [*EPOCH_KINDS, *FLOW_KINDS])
def test_every_damage_is_named_and_nothing_is_restored_from_it(storage: Path, kind: str, damage: str) -> None:
    layout = layout_of(storage)
    path = target(layout, kind)
    DAMAGES[damage](path)

    look = verifier(layout)
    name = str(path.relative_to(layout.root))
    of_flow = [found.path for found in look.flow_problems()]
    found = problems_of(list(look.newest()))
    if kind != "identity":
        assert (THIRD, name) in [(epoch, where) for epoch, where, _ in found]
    if kind in FLOW_KINDS:
        assert name in of_flow
    else:
        assert of_flow == []
        assert {epoch for epoch, _, _ in problems_of(list(verifier(layout).every()))} == {THIRD}, "only this epoch"

    # Nothing can be resumed, so the way back leads over a checkpoint.
    shutil.rmtree(layout.spark_dirs)
    try:
        flow = SparklessFlow(storage, retain_checkpoints=3)
    except (RecoveryError, DamagedRecordError, UnknownFormatError):
        return
    try:
        if kind in EPOCH_KINDS:
            assert flow.recovered.restored_epoch == 2
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())
    finally:
        flow.stop()


@pytest.mark.parametrize("at", [0.0, 0.1, 0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("kind", [*EPOCH_KINDS, "generation"])
def test_a_flipped_byte_is_found_wherever_it_is(storage: Path, kind: str, at: float) -> None:
    layout = layout_of(storage)
    path = target(layout, kind)
    flip(path, at=at)
    assert str(path.relative_to(layout.root)) in [where for _, where, _ in problems_of(list(verifier(layout).newest()))]


def test_without_deep_only_sizes_of_blobs_and_segments_are_compared(storage: Path) -> None:
    layout = layout_of(storage)
    blob, segment = target(layout, "blob"), target(layout, "segment")
    flip(blob, at=1.0)
    flip(segment)
    assert problems_of(list(verifier(layout, deep=False).newest())) == []
    assert len(problems_of(list(verifier(layout, deep=True).newest()))) == 2


def test_a_lost_checkpoint_is_missed_although_its_whole_folder_is_gone(storage: Path) -> None:
    layout = layout_of(storage)
    shutil.rmtree(layout.checkpoint(THIRD))
    (report,) = verifier(layout).newest()
    assert (report.epoch, report.verdict) == (3, "damaged")
    assert "manifest is missing" in report.problems[0].problem
    assert verifier(layout).one(THIRD).verdict == "damaged"


def test_a_manifest_missing_in_the_middle_is_damage_and_one_at_the_beginning_was_let_go(storage: Path) -> None:
    layout = layout_of(storage)
    layout.manifest(Epoch(2)).unlink()
    assert [(report.epoch, report.verdict) for report in verifier(layout).every()] == [
        (1, "good"),
        (2, "damaged"),
        (3, "good"),
    ]
    layout.manifest(Epoch(1)).unlink()  # as a collection that was killed half-way leaves it
    assert [report.epoch for report in verifier(layout).every()] == [3]


def test_a_database_that_is_no_database_is_damage_of_the_flow(storage: Path) -> None:
    layout = layout_of(storage)
    layout.metadata.write_bytes(b"no database at all" * 100)
    (found,) = verifier(layout).flow_problems()
    assert found.path == "coordinator.sqlite" and "cannot be read" in found.problem
    assert [report.verdict for report in verifier(layout).every()] == ["good"] * 3
    layout.metadata.unlink()
    assert [found.problem for found in verifier(layout).flow_problems()] == ["the coordinator's database is missing"]


def test_a_generation_record_that_left_nothing_else_is_missed_too(storage: Path) -> None:
    SparklessFlow(storage, retain_checkpoints=3).stop()
    layout = layout_of(storage)
    layout.generation(Generation(2)).unlink()
    (found,) = verifier(layout).flow_problems()
    assert found.path.startswith("generations")


def test_a_clone_that_has_no_records_of_older_generations_is_whole(storage: Path) -> None:
    with running(storage, retain_checkpoints=1) as flow:
        flow.emit(1)
        flow.checkpoint()
    layout = layout_of(storage)
    layout.generation(Generation(1)).unlink()
    assert [report.verdict for report in verifier(layout).newest()] == ["good"]
    (found,) = verifier(layout).flow_problems()
    assert "there were 2 generations" in found.problem, "the coordinator remembers it: here it is no clone"
    layout.metadata.unlink()
    assert [found.path for found in verifier(layout).flow_problems()] == ["coordinator.sqlite"]


def test_a_manifest_that_makes_no_sense_does_not_hide_the_others(storage: Path) -> None:
    layout = layout_of(storage)
    manifest = LocalStore.reading(layout).checkpoints.load_manifest(Epoch(2))
    senseless = {
        name: msgspec.structs.replace(cut, lineage=[(Generation(1), Position(10_000))])
        for name, cut in manifest.channels.items()
    }
    layout.manifest(Epoch(2)).write_bytes(
        records.encode("manifest", msgspec.structs.replace(manifest, channels=senseless))
    )
    assert [report.verdict for report in verifier(layout).every()] == ["good", "damaged", "good"]


def test_amounts_in_flight_that_were_not_measured_are_no_damage(storage: Path) -> None:
    layout = layout_of(storage)
    manifest = LocalStore.reading(layout).checkpoints.load_manifest(THIRD)
    for amounts, problems in (({"rows": 77}, 1), ({"entries": None, "rows": None, "size_bytes": None}, 0)):
        flight = msgspec.structs.replace(manifest.channels[NUMBERS].in_flight[TOTALS], **amounts)
        channel = msgspec.structs.replace(manifest.channels[NUMBERS], in_flight={TOTALS: flight})
        changed = msgspec.structs.replace(manifest, channels={**manifest.channels, NUMBERS: channel})
        layout.manifest(THIRD).write_bytes(records.encode("manifest", changed))
        found = problems_of(list(verifier(layout).every()))
        assert len([text for _, _, text in found if "in flight" in text]) == len(found) == problems


def test_a_database_of_an_earlier_version_is_no_damage(storage: Path) -> None:
    layout = layout_of(storage)
    with closing(sqlite3.connect(layout.metadata)) as database:
        database.execute("DROP TABLE pins")
        database.commit()
    assert verifier(layout).flow_problems() == []


# ------------------------------------------------------------------ good flows


@pytest.mark.parametrize("mode", ["aligned", "unaligned", "auto", "per-operator"])
def test_a_good_flow_is_good_while_it_runs_stopped_and_after_restarts(tmp_path: Path, mode: str) -> None:
    def assert_good(flow: SparklessFlow) -> None:
        look = verifier(flow.layout)
        assert look.flow_problems() == []
        reports = list(look.every())
        assert reports and problems_of(reports) == []
        assert {report.verdict for report in reports} == {"good"}
        assert all(report.checked_files and report.checked_bytes for report in reports)
        newest = [report.epoch for report in look.newest()]
        assert newest == [report.epoch for report in reversed(reports)][: 2 if mode == "per-operator" else 1]

    for _ in range(2):
        with running(tmp_path, mode=mode, retain_checkpoints=3) as flow:
            for _ in range(2):
                flow.emit(2)
                flow.step(NUMBERS)
                flow.checkpoint(aligned=mode == "aligned")
            assert_good(flow)
        assert_good(flow)
    shutil.rmtree(layout_of(tmp_path).spark_dirs / TOTALS)
    with running(tmp_path, mode=mode, retain_checkpoints=3) as flow:
        assert flow.recovered.path in ("regional", "alone")
        assert problems_of(list(verifier(flow.layout).every())) == []


def test_per_operator_mode_needs_the_log_after_the_snapshot(tmp_path: Path) -> None:
    with running(tmp_path, mode="per-operator") as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.emit(3)
    log = flow.operators[NUMBERS].channel
    path = entry_path(log.folder, log.lineage.owner(Position(log.end - 2)), Position(log.end - 2))
    flip(path)
    found = problems_of(list(verifier(flow.layout).newest()))
    name = str(path.relative_to(flow.layout.root))
    assert {(epoch, where) for epoch, where, _ in found} == {(1, name), (2, name)}, "both read it again"


def test_looking_changes_nothing(storage: Path) -> None:
    layout = layout_of(storage)
    (layout.pins / "000000000009" / "totals").mkdir(parents=True)
    (layout.pins / "000000000009" / "totals" / "0").write_text("held by the running process")
    (layout.blobs / "aa" / ".tmp-being-written").write_text("half")
    before = content_of(layout.root)
    look = verifier(layout)
    look.flow_problems()
    assert len(list(look.every())) == 3
    assert content_of(layout.root) == before


# ------------------------------------------------------------------ what is no damage


def stored(tmp_path: Path, *, epochs: int = 2) -> StoredFlow:
    flow = StoredFlow(tmp_path)
    flow.start()
    for epoch in range(1, epochs + 1):
        flow.run_all(batches=2)
        flow.checkpoint(epoch)
    return flow


def test_a_tombstone_is_no_epoch(tmp_path: Path) -> None:
    flow = stored(tmp_path)
    flow.store.checkpoints.store_tombstone(Tombstone(epoch=Epoch(9), generation=Generation(1), reason="given up"))
    assert [report.epoch for report in verifier(flow.layout).every()] == [1, 2]
    with pytest.raises(UnknownEpochError):
        verifier(flow.layout).one(Epoch(9))


def test_an_epoch_that_the_flow_went_back_behind_is_left_and_not_damaged(tmp_path: Path) -> None:
    flow = stored(tmp_path)
    flow.start(restore_to=Epoch(1))
    assert [(report.epoch, report.verdict) for report in verifier(flow.layout).every()] == [(1, "good"), (2, "left")]
    assert [report.epoch for report in verifier(flow.layout).newest()] == [1]
    flow.store.checkpoints._remove_epoch(Epoch(2))
    assert [report.epoch for report in verifier(flow.layout).every()] == [1], "and nobody misses it when it is gone"


@pytest.mark.parametrize("after_files", range(1, 12))
def test_an_epoch_that_is_let_go_of_under_our_eyes_is_not_damaged(tmp_path: Path, after_files: int) -> None:
    flow = stored(tmp_path, epochs=3)
    seen = 0

    def collect_meanwhile(_: int) -> None:
        nonlocal seen
        seen += 1
        if seen == after_files:
            flow.store.checkpoints.collect([Epoch(1), Epoch(2)], Epoch(4))
            for name in flow.graph.names:
                flow.log(name).truncate(flow.store.checkpoints.load_manifest(THIRD).channels[name].barrier)

    reports = list(verifier(flow.layout, on_read=collect_meanwhile).every())
    assert problems_of(reports) == []
    assert reports[-1].epoch == 3 and reports[-1].verdict == "good"


def test_a_restart_under_our_eyes_that_goes_back_is_not_damage(tmp_path: Path) -> None:
    flow = stored(tmp_path)
    seen = 0

    def go_back_meanwhile(_: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            flow.start(restore_to=Epoch(1))
            for name in flow.graph.names:
                flow.log(name).collect()

    assert verifier(flow.layout, on_read=go_back_meanwhile).one(Epoch(2)).verdict == "left"


def test_a_running_flow_that_collects_all_the_time_has_no_damage(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=1) as flow:
        flow.emit(1)
        flow.checkpoint()
        found: list[Any] = []
        looked = 0
        is_over = threading.Event()

        def look_all_the_time() -> None:
            nonlocal looked
            while not is_over.is_set():
                look = verifier(flow.layout)
                found.extend(look.flow_problems())
                found.extend(problems_of([*look.every(), *look.newest()]))
                looked += 1

        thread = threading.Thread(target=look_all_the_time)
        thread.start()
        try:
            for _ in range(25):
                flow.emit(2)
                flow.checkpoint()
        finally:
            is_over.set()
            thread.join()
    assert found == []
    assert looked > 3


# ------------------------------------------------------------------ what a snapshot must hold


@pytest.mark.parametrize(
    "missing", ["offsets/2", "offsets/3", "commits/2", "commits/3", "metadata", "state/0/1/2.delta"]
)
def test_a_snapshot_that_lacks_a_file_is_found_although_all_it_has_is_whole(tmp_path: Path, missing: str) -> None:
    flow = stored(tmp_path, epochs=1)
    whole = flow.store.query_dirs.files_of

    def incomplete(folder: Path, batch: Any) -> FileSet:
        files = whole(folder, batch)
        return FileSet(
            batch=files.batch,
            subtasks={key: [name for name in names if name != missing] for key, names in files.subtasks.items()},
            shared=[name for name in files.shared if name != missing],
            watermark_ms=files.watermark_ms,
        )

    flow.store.query_dirs.files_of = incomplete  # type: ignore[method-assign, assignment]
    flow.run_all(batches=2)
    flow.checkpoint(2)
    (report,) = verifier(flow.layout, deep=False).newest()
    assert {found.operator for found in report.problems} == {ORDERS, STORED_TOTALS}
    assert all(missing.partition(".")[0] in found.problem for found in report.problems)


def test_input_files_that_a_restore_would_read_again_must_be_there(tmp_path: Path) -> None:
    flow = StoredFlow(tmp_path)
    flow.start()
    spark, inputs = flow.spark_dir(ORDERS), tmp_path / "in put"
    inputs.mkdir()

    def read_file(number: int) -> Path:
        """A batch of ``orders`` that reads one input file."""
        flow.run(ORDERS, until="appended")
        with (spark / f"offsets/{number}").open("a") as file:
            file.write(f'\n{{"logOffset":{number}}}')
        path = inputs / f"{number}.json"
        path.write_text("{}")
        log = spark / f"sources/0/{number}"
        log.parent.mkdir(parents=True, exist_ok=True)
        uri = f"file://{str(path).replace(' ', '%20')}"
        log.write_text("v1\n" + json.dumps({"path": uri, "timestamp": 1, "batchId": number}))
        flow.spark(ORDERS).commit(number)
        return path

    before = read_file(0)
    flow.run(STORED_TOTALS)
    flow.checkpoint(1)
    after = read_file(1)
    (report,) = verifier(flow.layout).newest()
    assert report.verdict == "good" and report.notes == []
    before.unlink()
    assert verifier(flow.layout).one(Epoch(1)).verdict == "good", "what was read before the checkpoint is not needed"
    after.unlink()
    (found,) = verifier(flow.layout).one(Epoch(1)).problems
    assert (found.operator, found.path) == (ORDERS, str(after))


# ------------------------------------------------------------------ the command


def verify(storage: Path, *arguments: str, flow: str = "counting") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", "--flow", flow, "--storage", str(storage / "storage"), *arguments])
    return result.exit_code, result.stdout


def test_the_command_prints_json(storage: Path) -> None:
    code, output = verify(storage, "--all", "--deep", "--json")
    said = json.loads(output)
    assert (code, said["flow"], said["problems"]) == (0, "counting", 0)
    assert [(one["epoch"], one["verdict"], one["problems"]) for one in said["epochs"]] == [
        (epoch, "good", []) for epoch in (1, 2, 3)
    ]
    assert all(one["checked_files"] > 0 and one["checked_bytes"] > 0 for one in said["epochs"])

    path = target(layout_of(storage), "record")
    flip(path)
    code, output = verify(storage, "--json")
    said = json.loads(output)
    assert (code, said["problems"]) == (1, 1)
    (problem,) = said["epochs"][0]["problems"]
    assert problem.keys() == {"epoch", "operator", "path", "problem"}
    assert (problem["epoch"], problem["operator"], problem["path"]) == (
        3,
        OperatorId("totals"),
        str(path.relative_to(layout_of(storage).root)),
    )


def test_the_command_says_what_to_do(storage: Path) -> None:
    code, output = verify(storage)
    assert code == 0 and "good" in output and "No damage" in output
    path = target(layout_of(storage), "segment")
    path.unlink()
    code, output = verify(storage, "3")
    assert code == 1 and "damaged" in output and path.name in output and "Next:" in output
    assert verify(storage, "2")[0] == 0, "another epoch is whole"


def test_the_command_that_cannot_look_exits_with_2(storage: Path, tmp_path: Path) -> None:
    assert verify(storage, flow="nobody")[0] == 2
    assert verify(tmp_path / "nowhere")[0] == 2
    assert verify(storage, "17")[0] == 2
    assert verify(storage, "3", "--all")[0] == 2
    assert verify(storage, "three")[0] == 2
    assert CliRunner().invoke(app, ["verify"]).exit_code == 2
    assert not (tmp_path / "nowhere").exists()
