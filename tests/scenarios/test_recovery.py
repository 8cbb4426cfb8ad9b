"""How a flow comes back, from storage folders brought to every state by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cutline.channels.entry_files import data_dir, entry_path
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import FencedError, FlowDefinitionError, RecoveryError
from cutline.model.cut import BarrierTerms
from cutline.model.entries import DataEntry
from cutline.model.generation import GenerationRecord
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_BATCH, Epoch, Generation, OperatorId, Position
from cutline.ports.metadata import PendingRecord
from cutline.protocol.history.known_checkpoints import batch_in
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.retired_operators import collect_spark_dirs
from cutline.recovery.start import Recovery
from cutline.storage.generations import LocalGenerationStore
from cutline.storage.local import LocalStore
from cutline.storage.metadata.sqlite import SqliteMetadata
from cutline.testing.twins.sink import MemorySink
from tests.support.channels import append_batch, open_log
from tests.support.killing import is_killed_at
from tests.support.spark_dirs import content_of
from tests.support.stored_flow import ORDERS, TABLE, TOTALS, StoredFlow, flow_graph, plans_of


@pytest.fixture
def flow(tmp_path: Path) -> StoredFlow:
    return StoredFlow(tmp_path)


@pytest.fixture
def running(flow: StoredFlow) -> StoredFlow:
    """Started; two complete epochs; batch 3 of both operators is behind the last one."""
    flow.start()
    flow.run_all(batches=2)
    flow.checkpoint(1)
    flow.run_all()
    flow.checkpoint(2)
    flow.run_all()
    return flow


def batches(flow: StoredFlow, operator: OperatorId) -> list[int]:
    return [entry.batch for entry in flow.log(operator).data_entries()]


def lose_spark_dir(flow: StoredFlow, operator: OperatorId = ORDERS) -> None:
    """By default that of the source: everything is downstream of it, so the whole flow goes back."""
    shutil.rmtree(flow.spark_dir(operator))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def damage_epoch(flow: StoredFlow, epoch: int) -> None:
    """A state file that only this epoch has."""
    store = flow.store
    manifest = store.checkpoints.load_manifest(Epoch(epoch))
    record = store.checkpoints.load_record(manifest, TOTALS)
    flip(flow.layout.blob(next(file.sha256 for file in record.shared if file.path == f"commits/{record.batch}")))


# ------------------------------------------------------------------------------------------------- fresh


def test_the_first_start_begins_from_nothing(flow: StoredFlow) -> None:
    recovered = flow.start()
    assert (recovered.path, recovered.generation, recovered.restored_epoch) == ("fresh", 1, None)
    assert recovered.spark_dirs == {ORDERS: 1, TOTALS: 1}
    assert all(log.end == 0 for log in recovered.channels.values())
    assert recovered.manifests == []
    assert recovered.problems == []
    assert flow.spark_dir(ORDERS).is_dir()
    assert flow.recoveries() == {"fresh": 1}


def test_a_start_killed_before_its_generation_is_a_first_start_again(flow: StoredFlow) -> None:
    with closing(SqliteMetadata(flow.layout.metadata)) as metadata:
        metadata.next_generation(Generation(0))
    assert flow.start().path == "fresh"


def test_a_damaged_flow_without_any_checkpoint_begins_again_and_says_so(
    flow: StoredFlow, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    flow.start()
    flow.run_all(batches=2)
    lose_spark_dir(flow)
    recovered = flow.start()
    assert (recovered.path, recovered.generation) == ("fresh", 2)
    assert "no checkpoint had ever completed" in recovered.reason
    said = [one for one in caplog.records if one.getMessage().startswith("recovered ")]
    assert [(one.levelname, "path=fresh" in one.getMessage()) for one in said] == [("INFO", True), ("WARNING", True)]
    assert all(log.entries() == [] for log in recovered.channels.values())
    assert content_of(flow.spark_dir(ORDERS)) == {}


def test_a_flow_that_had_checkpoints_never_begins_again_by_itself(running: StoredFlow) -> None:
    lose_spark_dir(running)
    shutil.rmtree(running.layout.checkpoints)
    with pytest.raises(RecoveryError) as caught:
        running.start()
    assert caught.value.next_step
    assert running.generations() == [1]


def test_a_flow_whose_generations_are_lost_too_never_begins_again_by_itself(running: StoredFlow) -> None:
    """Only the coordinator's records know that there was something."""
    shutil.rmtree(running.layout.checkpoints)
    shutil.rmtree(running.layout.generations)
    with pytest.raises(RecoveryError):
        running.start()
    assert running.generations() == []


def test_a_fresh_start_never_reads_what_lies_in_the_channels(running: StoredFlow) -> None:
    """Someone has deleted all records but not the data: its batches would count as done."""
    shutil.rmtree(running.layout.checkpoints)
    shutil.rmtree(running.layout.generations)
    running.layout.metadata.unlink()
    with pytest.raises(RecoveryError):
        running.start()


# ------------------------------------------------------------------------------------------------- resume


def test_a_flow_that_is_intact_goes_on_where_it_was(running: StoredFlow) -> None:
    before = {name: log.entries() for name, log in running.recovered.channels.items()}
    recovered = running.start()
    assert (recovered.path, recovered.generation, recovered.restored_epoch) == ("resume", 2, None)
    assert {name: log.entries() for name, log in recovered.channels.items()} == before
    assert recovered.spark_dirs == {ORDERS: 1, TOTALS: 1}
    assert [manifest.epoch for manifest in recovered.manifests] == [1, 2]
    assert recovered.problems == []


def test_a_resumed_flow_can_be_resumed_again_and_again(running: StoredFlow) -> None:
    for generation in range(2, 6):
        assert running.start().path == "resume"
        running.run_all()
        assert running.recovered.generation == generation
    assert batches(running, TOTALS) == list(range(8))
    assert running.recoveries() == {"fresh": 1, "resume": 4}


@pytest.mark.parametrize("until", ["planned", "appended", "committed"])
def test_a_flow_killed_inside_a_batch_goes_on(running: StoredFlow, until: str) -> None:
    running.run(ORDERS, until=until)
    running.run(TOTALS, until=until)
    assert running.start().path == "resume"
    assert running.log(ORDERS).last_batch == (3 if until == "planned" else 4)


def test_what_the_old_process_still_writes_is_not_seen(running: StoredFlow) -> None:
    zombie = running.log(ORDERS)
    recovered = running.start()
    append_batch(zombie)
    assert recovered.channels[ORDERS].last_batch == 3
    assert running.start().channels[ORDERS].last_batch == 3


def test_a_flow_whose_last_commit_is_lost_goes_back_to_the_checkpoint_that_has_it(running: StoredFlow) -> None:
    running.checkpoint(3)
    (running.spark_dir(TOTALS) / "commits" / "3").unlink()
    assert (running.start().path, running.recovered.restored_epoch) == ("regional", 3)
    assert running.state_of(TOTALS) == 3


def test_a_flow_killed_before_its_first_batch_goes_on(flow: StoredFlow) -> None:
    flow.start()
    assert flow.start().path == "resume"
    flow.run(ORDERS, until="planned")
    assert flow.start().path == "resume"


def test_a_pending_epoch_does_not_disturb(running: StoredFlow) -> None:
    running.begin(3)
    recovered = running.start()
    assert recovered.path == "resume"
    assert [barrier.epoch for barrier in recovered.channels[TOTALS].barriers()] == [1, 2, 3]


def test_lost_coordinator_records_do_not_stop_the_flow(running: StoredFlow) -> None:
    running.layout.metadata.unlink()
    recovered = running.start()
    assert (recovered.path, recovered.generation) == ("resume", 2)


# ------------------------------------------------------------------------------------------------- restore


def test_a_lost_directory_brings_the_whole_flow_back_to_the_newest_checkpoint(running: StoredFlow) -> None:
    lose_spark_dir(running)
    recovered = running.start()
    assert (recovered.path, recovered.generation, recovered.restored_epoch) == ("local", 2, 2)
    assert recovered.spark_dirs == {ORDERS: 2, TOTALS: 2}
    assert (running.state_of(ORDERS), running.state_of(TOTALS)) == (2, 2)
    assert batches(running, ORDERS) == batches(running, TOTALS) == [0, 1, 2]
    assert [manifest.epoch for manifest in recovered.manifests] == [1, 2]
    assert any("orders" in problem for problem in recovered.problems)
    assert running.recoveries() == {"fresh": 1, "local": 1}


def test_a_restored_flow_goes_on_and_is_then_resumed(running: StoredFlow) -> None:
    lose_spark_dir(running)
    running.start()
    running.run_all()
    recovered = running.start()
    assert (recovered.path, recovered.generation) == ("resume", 3)
    assert batches(running, TOTALS) == [0, 1, 2, 3]
    assert recovered.channels[TOTALS].entries()[-1].generation == 2


def test_a_restored_state_is_the_state_at_the_cut(running: StoredFlow) -> None:
    before = content_of(running.spark_dir(TOTALS))
    lose_spark_dir(running)
    running.start()
    after = content_of(running.spark_dir(TOTALS))
    assert after == {name: before[name] for name in after}
    assert "commits/3" not in after


def test_only_what_is_damaged_and_what_is_behind_it_goes_back(running: StoredFlow) -> None:
    running.run(ORDERS)
    before = batches(running, ORDERS)
    lose_spark_dir(running, TOTALS)
    recovered = running.start()
    assert (recovered.path, recovered.generation, recovered.restored_epoch) == ("regional", 2, 2)
    assert recovered.spark_dirs == {ORDERS: 1, TOTALS: 2}
    assert batches(running, ORDERS) == before, "upstream goes on"
    assert batches(running, TOTALS) == [0, 1, 2]
    assert running.state_of(TOTALS) == 2
    assert running.recoveries() == {"fresh": 1, "regional": 1}
    assert running.start().path == "resume"


def test_a_region_that_cannot_go_back_alone_takes_the_whole_flow_along(running: StoredFlow) -> None:
    """The newest checkpoint is damaged. To go back further, upstream must go back too: what sinks saw is undone."""
    damage_epoch(running, 2)
    lose_spark_dir(running, TOTALS)
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", 1)
    assert recovered.spark_dirs == {ORDERS: 2, TOTALS: 2}


@pytest.mark.parametrize("loss", ["lost segment", "other bytes", "truncated"])
def test_a_region_whose_input_is_gone_takes_the_whole_flow_along(running: StoredFlow, loss: str) -> None:
    """What ``totals`` has read since the checkpoint is gone: it would be missed. Upstream makes it again."""
    newest = running.log(ORDERS).data_entries()[-1]
    segment = data_dir(running.layout.channel(ORDERS)) / newest.segments[0].name
    if loss == "lost segment":
        segment.unlink()
    elif loss == "other bytes":
        flip(segment)
    else:
        running.log(ORDERS).truncate(Position(newest.seq + 1))
    lose_spark_dir(running, TOTALS)
    if loss == "truncated":  # nor does a log without its barriers lead back to them
        with pytest.raises(RecoveryError, match="totals cannot be restored to epoch 2 alone: log begins at"):
            running.start()
        return
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", 2)
    assert any("totals cannot be restored to epoch 2 alone" in problem for problem in recovered.problems)


def test_a_person_takes_the_flow_back_to_an_older_epoch(running: StoredFlow) -> None:
    recovered = running.start(restore_to=Epoch(1))
    assert (recovered.path, recovered.restored_epoch) == ("local", 1)
    assert [manifest.epoch for manifest in recovered.manifests] == [1]
    assert (running.state_of(ORDERS), running.state_of(TOTALS)) == (1, 1)
    assert running.start().path == "resume"


def test_an_epoch_that_is_not_kept_cannot_be_asked_for(running: StoredFlow) -> None:
    before = running.generations()
    with pytest.raises(RecoveryError, match="epoch 7 is not a checkpoint that the flow can restore") as raised:
        running.start(restore_to=Epoch(7))
    assert "1, 2" in str(raised.value)
    assert running.generations() == before


def test_a_damaged_epoch_that_was_asked_for_is_not_replaced_by_another(running: StoredFlow) -> None:
    damage_blob(running)
    with pytest.raises(RecoveryError, match="epoch 2 cannot be restored"):
        running.start(restore_to=Epoch(2))


def test_rows_in_flight_at_the_cut_are_there_after_the_restore(flow: StoredFlow) -> None:
    flow.start()
    for _ in range(3):
        flow.run(ORDERS)
    flow.run(TOTALS, read=1)
    manifest = flow.checkpoint(1)
    assert manifest.channels[ORDERS].in_flight[TOTALS].entries == 2
    flow.run(TOTALS)
    lose_spark_dir(flow, ORDERS)
    recovered = flow.start()
    assert recovered.path == "local"
    assert recovered.channels[TOTALS].last_positions == {ORDERS: 1}
    in_flight = recovered.channels[ORDERS].data_entries(Position(1))
    assert [entry.batch for entry in in_flight] == [1, 2]


def test_a_cut_before_the_first_batch_is_restored_as_such(flow: StoredFlow) -> None:
    flow.start()
    flow.run(ORDERS)
    flow.checkpoint(1)
    flow.run(TOTALS)
    lose_spark_dir(flow)
    recovered = flow.start()
    assert recovered.restored_epoch == 1
    assert content_of(flow.spark_dir(TOTALS)) == {}
    assert recovered.channels[TOTALS].last_batch == NO_BATCH
    assert recovered.channels[ORDERS].last_batch == 0


@pytest.mark.parametrize("operator", [ORDERS, TOTALS])
def test_a_hole_in_a_log_brings_the_flow_back_to_a_checkpoint(running: StoredFlow, operator: OperatorId) -> None:
    """The hole lies before what epoch 2 needs, so epoch 2 can be used."""
    log = running.log(operator)
    entry_path(log.folder, Generation(1), Position(1)).unlink()
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", 2)
    assert recovered.channels[operator].last_batch == 2
    assert recovered.channels[operator].invisible_entries() == [
        entry for entry in log.entries() if entry.batch == 3 and isinstance(entry, DataEntry)
    ]


def test_entries_after_the_cut_are_given_up(running: StoredFlow) -> None:
    lose_spark_dir(running)
    recovered = running.start()
    assert [entry.batch for entry in recovered.channels[TOTALS].invisible_entries()] == [3]
    recovered.channels[TOTALS].collect()
    running.run_all()
    assert [entry.generation for entry in running.log(TOTALS).data_entries()] == [1, 1, 1, 2]


def test_what_a_zombie_writes_after_a_restore_is_not_seen(running: StoredFlow) -> None:
    zombie = running.log(ORDERS)
    lose_spark_dir(running)
    running.start()
    append_batch(zombie)
    running.run(ORDERS)
    assert [entry.generation for entry in running.start().channels[ORDERS].data_entries()] == [1, 1, 1, 2]


def test_lost_generation_records_bring_the_flow_back_to_a_checkpoint(running: StoredFlow) -> None:
    shutil.rmtree(running.layout.generations)
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", 2)


def test_checkpoints_alone_are_enough(running: StoredFlow) -> None:
    """Generation records, coordinator records and live directories are gone; checkpoints and channels are not."""
    running.start()
    running.run_all()
    running.checkpoint(3)
    running.run_all()
    for folder in (running.layout.generations, running.layout.spark_dirs):
        shutil.rmtree(folder)
    running.layout.metadata.unlink()
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch, recovered.generation) == ("local", 3, 3)
    assert batches(running, TOTALS) == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------- older epochs


def damage_blob(flow: StoredFlow) -> None:
    damage_epoch(flow, 2)


def damage_record(flow: StoredFlow) -> None:
    flip(flow.record_path(2, ORDERS))


def lose_record(flow: StoredFlow) -> None:
    flow.record_path(2, ORDERS).unlink()


def damage_manifest(flow: StoredFlow) -> None:
    flip(flow.layout.manifest(Epoch(2)))


def lose_barrier(flow: StoredFlow) -> None:
    manifest = flow.store.checkpoints.load_manifest(Epoch(2))
    barrier = manifest.channels[TOTALS].barrier
    entry_path(flow.log(TOTALS).folder, Generation(1), barrier).unlink()


@pytest.mark.parametrize("damage", [damage_blob, damage_record, lose_record, damage_manifest, lose_barrier])
def test_an_epoch_that_is_damaged_is_passed_over(running: StoredFlow, damage: Callable[[StoredFlow], None]) -> None:
    damage(running)
    lose_spark_dir(running)
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", 1)
    assert [manifest.epoch for manifest in recovered.manifests] == [1]
    assert (running.state_of(ORDERS), running.state_of(TOTALS)) == (1, 1)
    assert batches(running, TOTALS) == [0, 1]
    assert recovered.problems


@pytest.mark.parametrize("loss", ["flip", "lose"])
def test_an_epoch_whose_rows_in_flight_are_damaged_is_passed_over(flow: StoredFlow, loss: str) -> None:
    flow.start()
    flow.run_all()
    flow.checkpoint(1)
    flow.run(ORDERS)
    flow.checkpoint(2)
    segment = data_dir(flow.log(ORDERS).folder) / flow.log(ORDERS).data_entries()[-1].segments[0].name
    if loss == "flip":
        flip(segment)
    else:
        segment.unlink()
    lose_spark_dir(flow)
    assert flow.start().restored_epoch == 1


def test_an_epoch_of_which_the_log_was_truncated_is_passed_over(running: StoredFlow) -> None:
    """Killed after the truncation for epoch 2 and before epoch 1 was deleted; then epoch 2 is damaged."""
    for operator in (ORDERS, TOTALS):
        manifest = running.store.checkpoints.load_manifest(Epoch(2))
        running.log(operator).truncate(manifest.channels[operator].barrier)
    damage_epoch(running, 2)
    lose_spark_dir(running)
    with pytest.raises(RecoveryError):
        running.start()
    assert running.generations() == [1]


def test_without_a_usable_epoch_a_person_must_decide(running: StoredFlow) -> None:
    for epoch in (1, 2):
        damage_epoch(running, epoch)
    lose_spark_dir(running)
    with pytest.raises(RecoveryError) as caught:
        running.start()
    assert "epoch 1" in str(caught.value)
    assert "epoch 2" in str(caught.value)
    assert running.generations() == [1]


def test_an_epoch_that_was_given_up_is_never_used_again(running: StoredFlow) -> None:
    """Epoch 2 was passed over once; even mended it belongs to a history that is over."""
    manifest = running.layout.manifest(Epoch(2))
    content = manifest.read_bytes()
    damage_manifest(running)
    lose_spark_dir(running)
    running.start()
    manifest.write_bytes(content)
    running.run_all()
    lose_spark_dir(running)
    recovered = running.start()
    assert recovered.restored_epoch == 1
    assert [one.epoch for one in recovered.manifests] == [1]


def test_the_history_goes_on_after_an_epoch_was_given_up(running: StoredFlow) -> None:
    damage_epoch(running, 2)
    lose_spark_dir(running)
    running.start()
    running.run_all()
    running.checkpoint(3)
    lose_spark_dir(running)
    recovered = running.start()
    assert recovered.restored_epoch == 3
    assert [one.epoch for one in recovered.manifests] == [1, 3]
    assert [entry.generation for entry in running.log(ORDERS).data_entries()] == [1, 1, 2]


# ------------------------------------------------------------------------------------------------- not really intact


def test_a_flow_does_not_go_on_past_a_checkpoint_that_cannot_be_read(running: StoredFlow) -> None:
    """Its sinks may have published it: going on as if it were not there would publish its batches again."""
    damage_manifest(running)
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", 1)


def test_an_older_checkpoint_that_cannot_be_read_does_not_stop_the_flow(running: StoredFlow) -> None:
    flip(running.layout.manifest(Epoch(1)))
    recovered = running.start()
    assert recovered.path == "resume"
    assert [one.epoch for one in recovered.manifests] == [2]
    assert recovered.problems


@pytest.mark.parametrize("operator", [ORDERS, TOTALS])
def test_an_operator_that_lost_everything_does_not_begin_again_beside_the_others(
    running: StoredFlow, operator: OperatorId
) -> None:
    """Log and directory are both gone, so nothing contradicts that it never ran; its neighbours know better."""
    lose_spark_dir(running, operator)
    shutil.rmtree(running.log(operator).folder)
    with pytest.raises(RecoveryError):
        running.start()


def test_a_source_that_lost_everything_before_any_checkpoint_is_noticed_by_its_consumer(flow: StoredFlow) -> None:
    flow.start()
    flow.run_all(batches=2)
    lose_spark_dir(flow, ORDERS)
    shutil.rmtree(flow.log(ORDERS).folder)
    recovered = flow.start()
    assert recovered.path == "fresh"
    assert recovered.channels[TOTALS].last_batch == NO_BATCH


@pytest.mark.parametrize("until", ["appended", "committed"])
def test_a_log_that_lost_what_its_consumer_still_reads_is_noticed(flow: StoredFlow, until: str) -> None:
    """A batch that was not committed is run again, and reads its rows again."""
    flow.start()
    flow.run(ORDERS)
    flow.run(ORDERS)
    flow.run(TOTALS, read=1, until=until)
    log = flow.log(ORDERS)
    entry_path(log.folder, Generation(1), Position(0)).unlink()
    assert flow.start().path == ("resume" if until == "committed" else "fresh")


def test_a_log_that_lost_what_a_consumer_never_read_is_noticed(flow: StoredFlow) -> None:
    flow.start()
    flow.run(ORDERS)
    flow.run(ORDERS)
    entry_path(flow.log(ORDERS).folder, Generation(1), Position(0)).unlink()
    assert flow.start().path == "fresh"


@pytest.mark.parametrize("until", ["planned", "appended", "committed"])
def test_a_lost_segment_that_will_be_read_is_noticed(flow: StoredFlow, until: str) -> None:
    flow.start()
    flow.run(ORDERS)
    flow.run(TOTALS, until=until)
    segment = flow.log(ORDERS).data_entries()[0].segments[0]
    (data_dir(flow.log(ORDERS).folder) / segment.name).unlink()
    assert flow.start().path == ("resume" if until == "committed" else "fresh")


def test_a_lost_segment_that_only_the_slower_consumer_reads_is_noticed(tmp_path: Path) -> None:
    edges = {"orders": (), "fast": ("orders",), "slow": ("orders",), "both": ("fast", "slow")}
    flow = StoredFlow(tmp_path, graph_of(edges))
    flow.start()
    flow.run(ORDERS)
    flow.run(OperatorId("fast"))
    segment = flow.log(ORDERS).data_entries()[0].segments[0]
    (data_dir(flow.log(ORDERS).folder) / segment.name).unlink()
    assert flow.start().path == "fresh"


def test_a_checkpoint_that_a_sink_cannot_publish_any_more_is_passed_over(running: StoredFlow) -> None:
    """Killed before the sink published epoch 2, whose record is then damaged: its batches must come again."""
    sink = MemorySink()
    sink.visible = {1: [0, 1]}
    flip(running.record_path(2, TOTALS))
    recovered = running.start(sinks={TABLE: sink})
    assert (recovered.path, recovered.restored_epoch) == ("local", 1)


@pytest.mark.parametrize("published", [{1: [0, 1]}, {1: [0, 1], 2: [2]}])
def test_an_unpublished_checkpoint_behind_one_that_is_lost_is_passed_over_too(
    running: StoredFlow, published: dict[int, list[int]]
) -> None:
    """The record of epoch 3 may hold what epoch 2 published, or lack what it did not: only epoch 2 knew."""
    running.checkpoint(3)
    sink = MemorySink()
    sink.visible = published
    flip(running.layout.manifest(Epoch(2)))
    recovered = running.start(sinks={TABLE: sink})
    assert (recovered.path, recovered.restored_epoch) == ("local", 1)
    assert [one.epoch for one in recovered.manifests] == [1]


def test_a_checkpoint_behind_one_that_was_collected_can_be_used(running: StoredFlow) -> None:
    """Only what every sink has published is collected, even if a sink keeps no trace of an epoch without rows."""
    running.checkpoint(3)
    sink = MemorySink()
    sink.visible = {1: [0, 1]}
    running.store.checkpoints.collect([Epoch(1), Epoch(2)], Epoch(1))
    running.layout.metadata.unlink()
    recovered = running.start(sinks={TABLE: sink})
    assert recovered.path == "resume"
    assert [one.epoch for one in recovered.manifests] == [3]


def test_a_damaged_record_that_every_sink_has_published_does_not_stop_the_flow(running: StoredFlow) -> None:
    sink = MemorySink()
    sink.visible = {1: [0, 1], 2: [2]}
    flip(running.record_path(2, TOTALS))
    assert running.start(sinks={TABLE: sink}).path == "resume"


# ------------------------------------------------------------------------------------------------- changed flows


def test_a_changed_schema_is_refused(running: StoredFlow) -> None:
    with pytest.raises(FlowDefinitionError, match="schema") as caught:
        running.start(schemas={ORDERS: b"other columns"})
    assert caught.value.where["operator"] == ORDERS
    assert running.generations() == [1]
    assert running.start().path == "resume"


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ({"orders": ()}, "the last run holds operators that the flow no longer has: totals"),
        ({"orders": (), "sums": ("orders",)}, "no longer has: totals; new in the code: sums"),
    ],
)
def test_dropped_operators_are_refused(running: StoredFlow, edges: dict[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(RecoveryError, match=said):
        running.start(graph=graph_of(edges))
    assert running.generations() == [1]


@pytest.mark.parametrize(
    "edges",
    [
        {"left": (), "right": (), "both": ("right", "left")},
        {"left": (), "right": ("left",), "both": ("right",)},
        {"left": (), "right": (), "both": ("right",)},
    ],
)
def test_changed_inputs_are_refused(tmp_path: Path, edges: dict[str, tuple[str, ...]]) -> None:
    """Spark knows its sources by number: it would go on reading one channel at the position of another."""
    flow = StoredFlow(tmp_path, graph_of({"left": (), "right": (), "both": ("left", "right")}))
    flow.start()
    flow.run_all()
    with pytest.raises(RecoveryError, match="inputs"):
        flow.start(graph=graph_of(edges))
    assert flow.generations() == [1]
    assert flow.start().path == "resume"


def graph_of(edges: dict[str, tuple[str, ...]]) -> FlowGraph:
    return flow_graph({OperatorId(name): tuple(OperatorId(one) for one in inputs) for name, inputs in edges.items()})


# ------------------------------------------------------------------------------------------------- kills, races


def test_killed_between_the_new_directories_and_the_generation_the_old_one_is_in_force(running: StoredFlow) -> None:
    lose_spark_dir(running)
    assert is_killed_at("restore-dirs-built", running.start)
    assert running.generations() == [1]
    recovered = running.start()
    assert (recovered.path, recovered.restored_epoch) == ("local", 2)
    assert recovered.generation > 2
    assert running.state_of(TOTALS) == 2


def test_killed_right_after_the_generation_the_new_one_is_in_force(running: StoredFlow) -> None:
    lose_spark_dir(running)
    assert is_killed_at("restore-generation", running.start)
    assert running.generations() == [1, 2]
    recovered = running.start()
    assert (recovered.path, recovered.generation) == ("resume", 3)
    assert recovered.spark_dirs == {ORDERS: 2, TOTALS: 2}
    assert batches(running, TOTALS) == [0, 1, 2]


@pytest.mark.parametrize("point", ["restore-generation"])
def test_killed_while_resuming_the_next_start_resumes(running: StoredFlow, point: str) -> None:
    assert is_killed_at(point, running.start)
    assert running.start().path == "resume"
    assert batches(running, TOTALS) == [0, 1, 2, 3]


def test_of_two_that_want_the_same_generation_one_is_fenced(running: StoredFlow) -> None:
    class Overtaken(LocalGenerationStore):
        def create(self, record: GenerationRecord) -> bool:
            LocalGenerationStore.create(self, record)
            return super().create(record)

    store = LocalStore.open(running.layout, ReplayGuard())

    with closing(SqliteMetadata(running.layout.metadata)) as metadata, pytest.raises(FencedError):
        Recovery(
            FlowAtRest(
                graph=running.graph,
                plans=plans_of(running.graph),
                layout=running.layout,
                query_dirs=store.query_dirs,
                checkpoints=store.checkpoints,
                generations=Overtaken(running.layout),
                metadata=metadata,
            )
        ).recover()


def test_a_manifest_stored_while_the_pending_epochs_are_read_is_found(running: StoredFlow) -> None:
    """An earlier process lives a moment longer: every manifest is found, or its epoch is known to be pending."""
    running.checkpoint(3, is_known=False)
    place, aside = running.layout.manifest(Epoch(3)), running.layout.root / "aside"
    place.rename(aside)

    class Overtaken(SqliteMetadata):
        def pending(self) -> list[PendingRecord]:
            found = super().pending()
            aside.rename(place)
            return found

    with closing(Overtaken(running.layout.metadata)) as metadata:
        recovered = Recovery(
            FlowAtRest(
                graph=running.graph,
                plans=plans_of(running.graph),
                layout=running.layout,
                query_dirs=running.store.query_dirs,
                checkpoints=running.store.checkpoints,
                generations=running.store.generations,
                metadata=metadata,
            )
        ).recover()
    assert [record.epoch for record in recovered.pending] == [3]
    assert recovered.manifests[-1].epoch == 3


def test_the_fence_is_taken_before_anything_is_read(running: StoredFlow) -> None:
    """After the pending epochs were read, no earlier process can begin another one."""
    zombie = SqliteMetadata(running.layout.metadata)
    zombie._generation = running.recovered.generation

    class Overtaken(SqliteMetadata):
        def pending(self) -> list[PendingRecord]:
            found = super().pending()
            with pytest.raises(FencedError):
                zombie.store_pending(
                    PendingRecord(epoch=Epoch(9), generation=Generation(1), terms=BarrierTerms(alignment_limit_ms=0))
                )
            return found

    with closing(zombie), closing(Overtaken(running.layout.metadata)) as metadata:
        recovered = Recovery(
            FlowAtRest(
                graph=running.graph,
                plans=plans_of(running.graph),
                layout=running.layout,
                query_dirs=running.store.query_dirs,
                checkpoints=running.store.checkpoints,
                generations=running.store.generations,
                metadata=metadata,
            )
        ).recover()
    assert recovered.pending == []


def test_a_checkpoint_that_a_zombie_completes_after_the_logs_were_forked_is_not_of_the_history(
    running: StoredFlow,
) -> None:
    """Its epoch was begun in time, but its barriers stand where nobody reads them."""
    running.record_pending(3)
    zombie = running.recovered
    newer = running.start()
    running.recovered = zombie
    running.append_barriers(3)
    running.store_manifest(3)
    running.recovered = newer
    running.run_all()
    recovered = running.start()
    assert (recovered.path, [manifest.epoch for manifest in recovered.manifests]) == ("resume", [1, 2])


# ------------------------------------------------------------------------------------------------- beside it


def test_directories_that_nobody_runs_on_are_deleted(running: StoredFlow) -> None:
    lose_spark_dir(running)
    recovered = running.start()
    collect_spark_dirs(running.layout, recovered.spark_dirs)
    assert [path.name for path in (running.layout.spark_dirs / ORDERS).iterdir()] == ["g000002"]
    assert running.state_of(ORDERS) == 2


def test_sweeping_without_directories_does_nothing(flow: StoredFlow) -> None:
    collect_spark_dirs(flow.layout, {ORDERS: Generation(1)})


def test_the_newest_complete_epoch_says_what_is_bound(running: StoredFlow) -> None:
    assert batch_in(running.start().manifests, TOTALS) == 2
    assert batch_in([], TOTALS) == NO_BATCH


def test_a_log_opened_by_hand_sees_what_recovery_sees(running: StoredFlow) -> None:
    """Keeps the helper of these tests honest."""
    by_hand = open_log(running.layout.channel(ORDERS), operator="orders")
    assert by_hand.entries() == running.log(ORDERS).entries()
