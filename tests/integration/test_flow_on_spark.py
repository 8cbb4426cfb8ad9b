"""A flow on real Spark: it runs, checkpoints, stops, and comes back by the right path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import generate_latest
from pyspark.sql import functions as F

from cutline.connectors.generator.spark_reader import GeneratorSource
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import FlowDefinitionError, FlowFailedError, FlowLockedError, LostInputError, RecoveryError
from cutline.flow import Flow
from cutline.model.ids import OperatorId
from cutline.model.layout import Layout
from cutline.model.status import SourceStatus
from cutline.runtime.handle import RunningFlow
from cutline.sinks import Delta, Parquet
from cutline.spark.session import settle_python_sources
from cutline.storage.local import LocalStore
from tests.support.payments import assert_exactly_once, ledger_ids, payments_flow, published_totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def start(spark: SparkSession, tmp_path: Path, *, cards: int, upi: int, **options: Any) -> RunningFlow:
    flow = payments_flow(tmp_path, card_rows=cards, upi_rows=upi)
    options.setdefault("checkpoint_interval", 0)
    return flow.start(spark=spark, storage=str(tmp_path / "storage"), **options)


def live_dir(tmp_path: Path, operator: str) -> Path:
    [folder] = (tmp_path / "storage" / "payments" / "spark" / operator).iterdir()
    return folder


def delete_live_dir(tmp_path: Path) -> None:
    shutil.rmtree(live_dir(tmp_path, "totals"))


def cut_live_state_short(tmp_path: Path) -> None:
    newest = max(live_dir(tmp_path, "totals").glob("state/0/0/*.changelog"), key=lambda path: path.stat().st_mtime)
    content = newest.read_bytes()
    newest.unlink()
    newest.write_bytes(content[:-1])


def delete_log_entry(tmp_path: Path) -> None:
    entries = sorted((tmp_path / "storage" / "payments" / "channels" / "cards").glob("g*/*.json"))
    entries[len(entries) // 2].unlink()


def test_everything_is_published_exactly_once_and_a_stopped_flow_resumes(spark: SparkSession, tmp_path: Path) -> None:
    run = start(spark, tmp_path, cards=5_000, upi=2_000, checkpoint_interval="300ms")
    assert run.status().recovery.path == "fresh"
    run.process_all_available()
    assert_exactly_once(tmp_path, card_rows=5_000, upi_rows=2_000)
    run.stop()

    # The same flow with more input: it goes on where it stopped. (Card payments come before UPI ones, so the UPI
    # source, whose numbers would shift, has nothing more to give here.)
    run = start(spark, tmp_path, cards=5_000, upi=3_500)
    assert run.status().recovery.path == "resume"
    run.process_all_available()
    run.stop(drain=True)
    assert_exactly_once(tmp_path, card_rows=5_000, upi_rows=3_500)
    assert run.status().state == "stopped"


@pytest.mark.parametrize(
    ("damage", "path"),
    [(delete_live_dir, "regional"), (cut_live_state_short, "regional"), (delete_log_entry, "local")],
)
def test_a_damaged_live_state_falls_through_to_the_newest_checkpoint(
    spark: SparkSession, tmp_path: Path, damage: Callable[[Path], None], path: str
) -> None:
    run = start(spark, tmp_path, cards=3_000, upi=1_000)
    run.process_all_available()
    epoch = run.trigger_checkpoint()
    run.stop()
    damage(tmp_path)

    run = start(spark, tmp_path, cards=3_000, upi=2_000)
    recovery = run.status().recovery
    assert (recovery.path, recovery.epoch) == (path, epoch)
    assert recovery.problems
    run.process_all_available()
    run.stop()
    assert_exactly_once(tmp_path, card_rows=3_000, upi_rows=2_000)


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_takes_back_what_was_published(
    spark: SparkSession, tmp_path: Path
) -> None:
    run = start(spark, tmp_path, cards=2_000, upi=1_000, retain_checkpoints=5)
    run.process_all_available()
    first = run.trigger_checkpoint()
    run.stop()
    run = start(spark, tmp_path, cards=2_000, upi=3_000, retain_checkpoints=5)
    run.process_all_available()
    second = run.trigger_checkpoint()
    run.stop()
    layout = Layout(tmp_path / "storage", "payments")
    totals = OperatorId("totals")
    generation = LocalStore.open(layout, ReplayGuard()).checkpoints.load_manifest(second).operators[totals].generation
    record = layout.record(second, totals, generation)
    record.write_bytes(record.read_bytes()[:-20])
    delete_live_dir(tmp_path)

    run = start(spark, tmp_path, cards=2_000, upi=4_000, retain_checkpoints=5)
    recovery = run.status().recovery
    assert recovery.path == "local"
    assert recovery.epoch is not None and first <= recovery.epoch < second
    assert any(f"epoch {second}" in problem for problem in recovery.problems)
    run.process_all_available()
    third = run.trigger_checkpoint()
    run.stop()
    assert third > second, "an epoch number is never used twice"
    assert_exactly_once(tmp_path, card_rows=2_000, upi_rows=4_000)


def test_it_never_starts_fresh_when_checkpoints_existed(spark: SparkSession, tmp_path: Path) -> None:
    run = start(spark, tmp_path, cards=1_000, upi=1_000)
    run.process_all_available()
    run.stop()
    delete_live_dir(tmp_path)
    shutil.rmtree(tmp_path / "storage" / "payments" / "blobs")
    with pytest.raises(RecoveryError, match="no checkpoint can be used"):
        start(spark, tmp_path, cards=1_000, upi=1_000)


def test_a_second_start_is_refused_while_the_flow_runs(spark: SparkSession, tmp_path: Path) -> None:
    run = start(spark, tmp_path, cards=10, upi=10)
    with pytest.raises(FlowLockedError, match="another process runs this flow"):
        start(spark, tmp_path, cards=10, upi=10)
    run.stop()


def test_pause_drains_and_resume_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    flow = payments_flow(tmp_path, card_rows=4_000, upi_rows=4_000, rows_per_second=1_500)
    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)
    assert run.pause()
    before = {name: item.batch for name, item in run.status().operators.items()}
    epoch = run.trigger_checkpoint(mode="aligned")
    assert {name: item.batch for name, item in run.status().operators.items()} == before
    details = next(item for item in run.checkpoints() if item.epoch == epoch).details
    assert details["in_flight_rows"] == 0
    run.resume()
    run.process_all_available()
    run.stop()
    assert_exactly_once(tmp_path, card_rows=4_000, upi_rows=4_000)


def test_a_full_channel_blocks_its_producer(spark: SparkSession, tmp_path: Path) -> None:
    flow = payments_flow(tmp_path, card_rows=20_000, upi_rows=1_000)
    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, channel_capacity_entries=2)
    run.process_all_available()
    assert_exactly_once(tmp_path, card_rows=20_000, upi_rows=1_000)
    run.stop()


def test_old_entries_and_checkpoints_are_let_go(spark: SparkSession, tmp_path: Path) -> None:
    run = start(spark, tmp_path, cards=8_000, upi=8_000, retain_checkpoints=1, retain="")
    run.process_all_available()
    for _ in range(3):
        run.trigger_checkpoint()
    run.stop()
    root = tmp_path / "storage" / "payments"
    assert len(list(root.glob("checkpoints/*/manifest.json"))) == 1
    assert len(list(root.glob("channels/cards/data/*"))) <= 2, "what every consumer has read is gone"


def test_a_failing_operator_is_restarted_and_its_error_shown_whole(spark: SparkSession, tmp_path: Path) -> None:
    flow = Flow("failing")
    fuse = tmp_path / "fuse"
    fuse.write_text("burns once")

    @flow.operator()
    def numbers(spark: SparkSession) -> DataFrame:
        source = spark.readStream.format("cutline_generator").options(rows=500, rows_per_batch=100).load()
        path = str(fuse)

        def blow(batches: Any) -> Any:
            import os

            if os.path.exists(path):
                os.unlink(path)
                raise ValueError("the fuse has blown")
            yield from batches

        return source.mapInArrow(blow, source.schema)

    flow.sink(numbers, Parquet(str(tmp_path / "out")))
    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, restart_backoff="10ms")
    while run.status().operators["numbers"].restarts == 0:
        assert not run.await_termination("50ms")
    run.process_all_available()
    run.stop()
    assert len(list((tmp_path / "out").glob("cutline_epoch=*"))) >= 1


def test_what_fails_for_good_goes_back_with_all_behind_it_while_upstream_goes_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    flow = Flow("regional")
    fuse = tmp_path / "fuse"

    @flow.operator()
    def numbers(spark: SparkSession) -> DataFrame:
        options = {"rows": 6_000, "keys": 20, "rows_per_batch": 200, "rows_per_second": 1_000}
        return spark.readStream.format("cutline_generator").options(**options).load()

    @flow.operator(inputs=[numbers], subtasks=2)
    def totals(numbers: DataFrame) -> DataFrame:
        path = str(fuse)

        def blow(batches: Any) -> Any:
            import os

            for batch in batches:
                if os.path.exists(path):
                    os.unlink(path)
                    raise ValueError("the fuse has blown")
                yield batch

        rows = numbers.mapInArrow(blow, numbers.schema)
        return rows.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("amount").alias("amount"))

    flow.sink(numbers, Parquet(str(tmp_path / "ledger")), name="ledger")
    flow.sink(totals, Delta(str(tmp_path / "totals")), output_mode="update", name="totals")
    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, restart_limit=0)
    run.trigger_checkpoint()
    epoch = run.trigger_checkpoint()
    upstream = run._parts.workers.supervisors[OperatorId("numbers")]
    fuse.write_text("burns once")
    while "regional" not in run.status().recovery.counts:
        assert not run.await_termination("50ms")
    generation = run._parts.coordinator._core.generation
    run.process_all_available()
    status = run.status()
    run.stop()
    assert run._parts.workers.supervisors[OperatorId("numbers")] is upstream
    assert (upstream.restarts, status.operators["numbers"].rows) == (0, 6_000)
    [record] = [
        one
        for one in LocalStore.reading(run._parts.definition.layout).generations.load_all()
        if one.generation == generation
    ]
    assert (record.path, record.restored_epoch) == ("regional", epoch)
    assert sorted(ledger_ids(tmp_path)) == list(range(6_000))
    assert sum(payments for payments, _ in published_totals(tmp_path).values()) == 6_000


def test_an_operator_that_always_fails_ends_the_flow_with_its_whole_error(spark: SparkSession, tmp_path: Path) -> None:
    flow = Flow("hopeless")

    @flow.operator()
    def numbers(spark: SparkSession) -> DataFrame:
        source = spark.readStream.format("cutline_generator").options(rows=500).load()

        def blow(batches: Any) -> Any:
            for batch in batches:
                if batch is not None:
                    raise ValueError("always broken")
                yield batch

        return source.mapInArrow(blow, source.schema)

    flow.sink(numbers, Parquet(str(tmp_path / "out")))
    run = flow.start(
        spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, restart_limit=1, restart_backoff="10ms"
    )
    with pytest.raises(FlowFailedError, match="always broken"):
        run.await_termination("120s")
    assert run.status().state == "failed"


def test_definition_errors_are_found_before_anything_starts(spark: SparkSession, tmp_path: Path) -> None:
    flow = Flow("wrong")

    @flow.operator()
    def numbers(spark: SparkSession) -> DataFrame:
        return spark.readStream.format("cutline_generator").load().groupBy("merchant").count()

    flow.sink(numbers, Parquet(str(tmp_path / "out")), output_mode="append")
    with pytest.raises(FlowDefinitionError, match="output mode 'append' does not fit"):
        flow.start(spark=spark, storage=str(tmp_path / "storage"))

    static = Flow("static")

    @static.operator()
    def table(spark: SparkSession) -> DataFrame:
        return spark.range(10)

    static.sink(table, Parquet(str(tmp_path / "out2")))
    with pytest.raises(FlowDefinitionError, match="returned a static DataFrame"):
        static.start(spark=spark, storage=str(tmp_path / "storage"))


def test_a_changed_schema_is_refused_with_a_clear_error(spark: SparkSession, tmp_path: Path) -> None:
    def flow(columns: list[str]) -> Flow:
        made = Flow("evolving")

        @made.operator()
        def numbers(spark: SparkSession) -> DataFrame:
            return spark.readStream.format("cutline_generator").options(rows=100).load().selectExpr(*columns)

        made.sink(numbers, Parquet(str(tmp_path / "out")))
        return made

    run = flow(["payment_id", "merchant"]).start(spark=spark, storage=str(tmp_path / "s"), checkpoint_interval=0)
    run.process_all_available()
    run.stop()
    with pytest.raises(FlowDefinitionError, match="schema of this operator's channel has changed"):
        flow(["payment_id", "cast(merchant as string) merchant"]).start(spark=spark, storage=str(tmp_path / "s"))


def test_starting_a_reader_changes_no_environment_that_other_queries_share(spark: SparkSession, tmp_path: Path) -> None:
    """Two at once would corrupt the map, and no task of either query could be deserialised any more."""

    class Unsettled(GeneratorSource):
        @classmethod
        def name(cls) -> str:
            return "unsettled"

    session = spark.newSession()
    session.dataSource.register(Unsettled)
    source = session._jsparkSession.sessionState().dataSourceManager().lookupDataSource("unsettled")
    fresh = set(source.dataSourceCls().envVars())
    settle_python_sources(session)
    settled = set(source.dataSourceCls().envVars())
    assert fresh < settled
    frame = session.readStream.format("unsettled").options(rows=10, keys=2, seed=1).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    query.processAllAvailable()
    query.stop()
    assert set(source.dataSourceCls().envVars()) == settled


def test_input_that_is_gone_is_named_before_a_restore_is_tried(spark: SparkSession, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    flow = Flow("files")

    @flow.operator()
    def lines(spark: SparkSession) -> DataFrame:
        return spark.readStream.format("text").load(str(inbox))

    flow.sink(lines, Parquet(str(tmp_path / "table")), name="table")

    def begin(**options: Any) -> RunningFlow:
        return flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, **options)

    (inbox / "one.txt").write_text("one\n")
    run = begin(retain_checkpoints=5)
    assert run.status().operators["lines"].sources == [SourceStatus(source="text", guarded=True)]
    run.process_all_available()
    epoch = run.trigger_checkpoint()
    (inbox / "two.txt").write_text("two\n")
    run.process_all_available()
    run.stop()
    (inbox / "two.txt").rename(tmp_path / "two.txt")
    with pytest.raises(LostInputError, match=r"two\.txt") as refused:
        begin(retain_checkpoints=5, restore_to=epoch)
    assert f"epoch {epoch}" in str(refused.value)
    # Nothing was changed, and whoever does not go back needs it not.
    run = begin(retain_checkpoints=5)
    assert run.status().recovery.path == "resume" and run.status().recovery.lost_input == []
    run.stop()
    run = begin(retain_checkpoints=5, restore_to=epoch, missing_input="continue")
    (lost,) = run.status().recovery.lost_input
    assert (lost.operator, lost.parts) == ("lines", 1) and lost.what.endswith("two.txt")
    assert b'cutline_lost_input_total{flow="files",operator="lines"} 1.0' in generate_latest(run.metrics.registry)
    recorded = LocalStore.reading(Layout(tmp_path / "storage", flow.name)).generations.load_all()[-1].lost_input
    assert [one.what for one in recorded] == [lost.what]
    run.process_all_available()
    run.stop()
    assert [row["value"] for row in spark.read.parquet(str(tmp_path / "table")).collect()] == ["one"]
    (tmp_path / "two.txt").rename(inbox / "two.txt")
    run = begin(retain_checkpoints=5, restore_to=epoch)
    run.process_all_available()
    run.stop()
    assert sorted(row["value"] for row in spark.read.parquet(str(tmp_path / "table")).collect()) == ["one", "two"]
