"""Sinks that publish every batch as soon as it has happened: seen at once, once, in order, and taken back in time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutline.channels.log import ChannelLog
from cutline.cli.main import app
from cutline.errors import FlowDefinitionError, RecoveryError, SinkError
from cutline.flow import Flow
from cutline.model.entries import BarrierEntry
from cutline.model.graph import SinkNode
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId
from cutline.model.staging import StagedBatch
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.immediate import end_of, place_of
from cutline.testing.twins.sink import MemorySink
from cutline.worker.immediate_publishing import ImmediateSink
from tests.support.killing import is_killed_at
from tests.support.running import assert_each_once, running
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

AT_ONCE: dict[str, Any] = {"publish": "at_once"}


def wait_rows(flow: SparklessFlow, count: int) -> None:
    flow.wait(lambda: len(flow.sink.rows()) >= count)
    assert_each_once(flow.sink.rows())
    assert len(flow.sink.rows()) == count


# ---------------------------------------------------------------------- the whole flow


def test_rows_are_visible_without_a_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(1)
        wait_rows(flow, 1)
        flow.emit(2)
        wait_rows(flow, 3)
        flow.checkpoint()
        assert len(flow.sink.rows()) == 3
        assert flow.run.status().sinks["table"].published_epoch == 1


def test_a_flow_that_resumes_publishes_nothing_twice(tmp_path: Path) -> None:
    for life in range(1, 4):
        with running(tmp_path, **AT_ONCE) as flow:
            flow.emit(2)
            wait_rows(flow, 2 * life)
            if life == 2:
                flow.checkpoint()


def test_what_a_lost_directory_takes_with_it_is_taken_back_and_comes_again_once(tmp_path: Path) -> None:
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(4)
        wait_rows(flow, 7)
    shutil.rmtree(flow.layout.spark_dirs)
    with running(tmp_path, **AT_ONCE) as flow:
        assert flow.recovered.path == "local"
        assert len(flow.sink.rows()) == 3
        flow.emit(1)
        wait_rows(flow, 4)
        flow.drain()
    with running(tmp_path, **AT_ONCE) as flow:
        wait_rows(flow, 4)


def test_without_a_checkpoint_everything_is_taken_back_and_comes_again(tmp_path: Path) -> None:
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(3)
        wait_rows(flow, 3)
    shutil.rmtree(flow.layout.spark_dirs)
    with running(tmp_path, **AT_ONCE) as flow:
        assert (flow.recovered.path, flow.sink.rows()) == ("fresh", [])
        flow.emit(1)
        wait_rows(flow, 1)


def test_a_wiped_storage_never_empties_the_table(tmp_path: Path) -> None:
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(3)
        wait_rows(flow, 3)
    shutil.rmtree(tmp_path / "storage")
    for _ in range(3):
        with pytest.raises(RecoveryError, match="has no record of it"):
            SparklessFlow(tmp_path, **AT_ONCE)
    assert len(flow.sink.rows()) == 3


@pytest.mark.parametrize("durable", ["local", "remote"])
def test_a_lost_host_takes_back_what_no_checkpoint_has(tmp_path: Path, durable: str) -> None:
    settings = {**AT_ONCE, "remote": str(tmp_path / "remote"), "durable": durable}
    with running(tmp_path, **settings) as flow:
        flow.emit(3)
        epoch = flow.checkpoint()
        flow.wait(lambda: flow.run.wait_remote(epoch, timeout=0.01))
        flow.emit(2)
        wait_rows(flow, 5)
    shutil.rmtree(tmp_path / "storage")
    with running(tmp_path, **settings) as flow:
        assert flow.recovered.path == "remote"
        assert len(flow.sink.rows()) == 3
        flow.emit(2)
        wait_rows(flow, 5)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_person_takes_the_flow_back(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=3, **AT_ONCE) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.emit(2)
        flow.checkpoint()
        flow.emit(2)
        wait_rows(flow, 6)
    with running(tmp_path, retain_checkpoints=3, restore_to=1, **AT_ONCE) as flow:
        assert len(flow.sink.rows()) == 2
        flow.emit(1)
        wait_rows(flow, 3)


def test_a_sink_that_keeps_shows_again_what_is_done_again(tmp_path: Path) -> None:
    settings = {**AT_ONCE, "on_rollback": "keep"}
    with running(tmp_path, **settings) as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.emit(1)
        wait_rows(flow, 3)
    with running(tmp_path, restore_to=1, **settings) as flow:
        flow.emit(1)
        flow.wait(lambda: len(flow.sink.rows()) == 4)
        assert [number for number, _ in flow.sink.rows()] == [0, 1, 2, 2]


def test_a_region_that_goes_back_takes_its_rows_back(tmp_path: Path) -> None:
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(2)
        wait_rows(flow, 5)
        shutil.rmtree(flow.layout.spark_dirs / TOTALS)
        flow.fail(TOTALS)
        assert len(flow.sink.rows()) == 3
        flow.wait(lambda: flow.step(TOTALS))
        wait_rows(flow, 5)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_what_is_given_up_is_thrown_away_before_the_sink_is_asked_how_far_it_is(tmp_path: Path) -> None:
    """In between, another sink in the same database may publish it for this one: nobody would take it back any more."""
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(2)
        wait_rows(flow, 5)
        aborted_at_rewind: list[int] = []
        rewind = flow.sink.rewind

        def look_and_rewind(epoch: Epoch) -> None:
            aborted_at_rewind.append(len(flow.sink.aborted))
            rewind(epoch)

        flow.sink.rewind = look_and_rewind  # type: ignore[method-assign]
        shutil.rmtree(flow.layout.spark_dirs / TOTALS)
        flow.fail(TOTALS)
        assert aborted_at_rewind == [len(flow.sink.aborted)] != [0]


def test_per_operator_mode(tmp_path: Path) -> None:
    settings = {**AT_ONCE, "mode": "per-operator"}
    with running(tmp_path, **settings) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.emit(2)
        wait_rows(flow, 5)
        shutil.rmtree(flow.layout.spark_dirs / TOTALS)
        flow.fail(TOTALS)
        assert len(flow.sink.rows()) == 5, "its log goes on, so nothing is given up"
        flow.wait(lambda: not flow.step(TOTALS))
        flow.emit(1)
        wait_rows(flow, 6)


def test_a_sink_that_fails_publishes_later_and_in_order(tmp_path: Path) -> None:
    with running(tmp_path, **AT_ONCE) as flow:
        flow.sink.commit_failures = [OSError("full"), OSError("full")]
        flow.emit(1)
        flow.wait(lambda: len(flow.sink.commit_failures) == 1)
        flow.emit(1)
        flow.wait(lambda: not flow.sink.commit_failures)
        assert flow.sink.rows() == []
        flow.step(NUMBERS)
        flow.checkpoint()
        wait_rows(flow, 3)


# ---------------------------------------------------------------------- one sink


class Recording(MemorySink):
    """Remembers in which order it was told to publish."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def commit(self, permit: CommitPermit, staged: Any, token: Any) -> None:
        super().commit(permit, staged, token)
        self.order.append(permit.epoch)


def a_sink(sink: MemorySink, **node: Any) -> ImmediateSink:
    declared = {"output_mode": None, "supported_modes": sink.output_modes, "publish": "at_once"}
    return ImmediateSink(sink, SinkNode(sink=SinkId("s"), operator=OperatorId("o"), **(declared | node)), FlowName("f"))


def batch(number: int, generation: int = 1) -> StagedBatch:
    return StagedBatch(
        generation=Generation(generation), batch=BatchId(number), rows=1, bytes=1, pieces=[{"size_bytes": 1}]
    )


def permit(epoch: int, after: int, through: int) -> CommitPermit:
    return CommitPermit(
        flow=FlowName("f"),
        operator=OperatorId("o"),
        sink=SinkId("s"),
        epoch=Epoch(epoch),
        generation=Generation(1),
        previous_epoch=NO_EPOCH,
        after_batch=BatchId(after),
        through_batch=BatchId(through),
    )


def test_numbers_grow_along_every_history() -> None:
    places = [place_of(Generation(g), BatchId(b)) for g, b in ((1, -1), (1, 0), (1, 7), (2, 5), (2, 6), (10, 0))]
    assert places == sorted(places)
    assert place_of(Generation(3), BatchId(42)) == 30000000042


def test_batches_wait_for_epochs_that_were_complete_before_the_start() -> None:
    """On another host the log lacks what these epochs hold: published after later batches, it would look published."""
    inner = Recording()
    sink = a_sink(inner)
    sink.begin(behind=Epoch(5))
    sink.publish(batch(9, generation=2))
    assert inner.order == []
    sink.commit(permit(4, 3, 5), [batch(4), batch(5)], {})
    assert inner.order == [10000000004, 10000000005]
    sink.commit(permit(5, 5, 8), [batch(8)], {})
    assert inner.order == [10000000004, 10000000005, 10000000008, 20000000009]
    sink.publish(batch(10, generation=2))
    assert inner.order[-1] == 20000000010


def test_an_epoch_publishes_what_could_not_be_published_at_once() -> None:
    inner = Recording()
    sink = a_sink(inner)
    inner.commit_failures = [OSError("locked")]
    with pytest.raises(OSError, match="locked"):
        sink.publish(batch(1))
    sink.publish(batch(2))
    assert inner.order == [10000000001, 10000000002]
    sink.commit(permit(1, 0, 2), [batch(1), batch(2)], {})
    assert len(inner.order) == 2


def test_the_end_of_a_log_without_batches_is_below_the_first_batch_of_its_generation(tmp_path: Path) -> None:
    log = ChannelLog.open(OperatorId("o"), tmp_path, Lineage.begin(Generation(1)))
    assert end_of(log.entries()) is None
    for generation, epoch in ((1, 1), (2, 2)):
        log.append(
            BarrierEntry(
                seq=Position(log.end),
                generation=Generation(generation),
                epoch=Epoch(epoch),
                batch=NO_BATCH,
                positions={},
                aligned=True,
                alignment_limit_ms=None,
            )
        )
        if generation == 1:
            log.fork(Generation(2))
    assert end_of(log.entries()) == place_of(Generation(2), NO_BATCH) < place_of(Generation(2), BatchId(0))


# ---------------------------------------------------------------------- what is refused


def test_an_operator_that_goes_back_under_another_name_is_refused(tmp_path: Path) -> None:
    from cutline.worker.immediate_publishing import with_immediate_sinks

    flow = Flow("f")
    flow.operator("o")(lambda spark: spark)
    flow.sink("o", MemorySink(), name="s", publish="at_once")
    with pytest.raises(RecoveryError, match="under another name"):
        with_immediate_sinks(flow.graph(), flow.sinks, renamed=["o"])


def test_what_cannot_be_kept_is_refused_when_the_flow_is_written() -> None:
    flow = Flow("f")
    flow.operator("o")(lambda spark: spark)
    one_way = MemorySink()
    one_way.can_rewind = False
    with pytest.raises(FlowDefinitionError, match="is not known"):
        flow.sink("o", MemorySink(), publish="soon")
    with pytest.raises(FlowDefinitionError, match="ahead of every checkpoint"):
        flow.sink("o", MemorySink(), publish="at_once", on_rollback="fail")
    with pytest.raises(FlowDefinitionError, match="cannot rewind"):
        flow.sink("o", one_way, publish="at_once")
    flow.sink("o", one_way, publish="at_once", on_rollback="keep")


# ---------------------------------------------------------------------- what the sink itself says


def put_back(tmp_path: Path, keep: int) -> None:
    """As if the sink's target had been restored from a backup of its own, with so many batches in it."""
    published = sorted(path for path in (tmp_path / "table").iterdir() if path.stem.isdigit())
    for path in published[keep:]:
        path.unlink()


def test_a_sink_that_was_put_back_is_recognised_and_may_be_accepted(tmp_path: Path) -> None:
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(2)
        flow.emit(1)
        flow.checkpoint()
        flow.checkpoint()
    put_back(tmp_path, keep=1)
    for _ in range(2):
        with pytest.raises(RecoveryError, match="no longer has batches that were published to it"):
            SparklessFlow(tmp_path, **AT_ONCE)
    asked = ["sinks", "--flow", "counting", "--storage", str(tmp_path / "storage"), "--accept", "table"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    with running(tmp_path, **AT_ONCE) as flow:
        flow.emit(1)
        flow.drain()
    with running(tmp_path, **AT_ONCE) as flow:
        assert flow.recovered.path == "resume"


@pytest.mark.parametrize("restore_to", [None, 1])
def test_a_sink_that_was_emptied_is_recognised_also_when_the_flow_goes_back(
    tmp_path: Path, restore_to: int | None
) -> None:
    with running(tmp_path, retain_checkpoints=4, **AT_ONCE) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
    put_back(tmp_path, keep=0)
    with pytest.raises(RecoveryError, match="no longer has batches"):
        SparklessFlow(tmp_path, retain_checkpoints=4, restore_to=restore_to, **AT_ONCE)


def test_killed_while_it_is_rewound_the_sink_does_not_look_put_back(tmp_path: Path) -> None:
    with running(tmp_path, retain_checkpoints=4, **AT_ONCE) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
    again = {**AT_ONCE, "retain_checkpoints": 4}
    assert is_killed_at("sink-rewind-half", lambda: SparklessFlow(tmp_path, restore_to=1, **again).stop())
    with running(tmp_path, **again) as flow:
        wait_rows(flow, 2)
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


@pytest.mark.parametrize(("before", "after"), [("at_once", "checkpoint"), ("checkpoint", "at_once")])
def test_a_target_is_not_published_to_in_both_ways(tmp_path: Path, before: str, after: str) -> None:
    with running(tmp_path, publish=before) as flow:
        flow.emit(3)
        flow.drain()
    for _ in range(2):
        with pytest.raises(SinkError, match="numbers otherwise"):
            SparklessFlow(tmp_path, publish=after)
    with running(tmp_path, publish=before) as flow:
        flow.emit(2)
        flow.drain()
        wait_rows(flow, 5)
