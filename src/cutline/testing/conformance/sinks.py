"""The suite that every sink must pass. Shipped, so that authors of plug-in sinks can run it on theirs.

    class TestMySink(SinkConformance):
        def make_sink(self, tmp_path): return MySink(tmp_path / "target")
        def read_rows(self, tmp_path): return [...]  # what readers of the target see now

The crash tests load the subclass in another process, so its file must be importable without pytest's fixtures.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pytest

from cutline.base.crashpoints import ENVIRONMENT_VARIABLE
from cutline.connectors.reading import read
from cutline.errors import FencedError, SinkError
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.ports import Claimable, Readable, Sink, SinkContext, StageAttempt, StagedBatch
from cutline.protocol.publish.commit import CommitPermit

Row = dict[str, Any]

FIRST = Generation(1)

SIMPLE = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
RICH = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int8()),
        pa.field("real", pa.float64()),
        pa.field("flag", pa.bool_()),
        pa.field("text", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("price", pa.decimal128(20, 4)),
        pa.field("point", pa.struct([pa.field("x", pa.int32()), pa.field("at", pa.timestamp("us", tz="UTC"))])),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("counts", pa.map_(pa.string(), pa.int64())),
    ]
)
RICH_ROW: Row = {
    "id": 1,
    "small": -7,
    "real": 0.25,
    "flag": True,
    "text": "naïve — ☃ 'quoted' \\ %20",
    "raw": b"\x00\xff\x10",
    "day": date(1969, 7, 20),
    "at": datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
    "price": Decimal("-1234567890123456.7891"),
    "point": {"x": None, "at": datetime(1999, 12, 31, 12, 0, 0, 1, tzinfo=UTC)},
    "tags": ["a", None, ""],
    "counts": [("k", 1), ("n", None)],
}


@dataclass(slots=True)
class Case:
    """A sink under test, driven the way the service drives it."""

    sink: Sink
    context: SinkContext
    #: Batches of earlier epochs; the next permit begins after them.
    through: BatchId = NO_BATCH
    previous: Epoch = NO_EPOCH
    generation: Generation = FIRST
    attempts: int = 0

    def open(self, sink: Sink) -> None:
        """Go on with a new instance over the same target, as after a restart."""
        sink.open(self.context)
        self.sink = sink

    def stage(self, batch: int, *parts: Iterable[Row]) -> StagedBatch:
        """Stage a batch; every part is the rows of one task."""
        schema = pa.ipc.read_schema(pa.BufferReader(self.context.schema_ipc))
        stager = pickle.loads(pickle.dumps(self.sink.stager()))
        pieces, rows = [], 0
        for partition, part in enumerate(parts):
            self.attempts += 1
            attempt = StageAttempt(
                flow=self.context.flow,
                operator=self.context.operator,
                generation=self.generation,
                batch=BatchId(batch),
                partition=partition,
                attempt=f"{id(self):x}-{self.attempts}",
            )
            writer = stager.open(attempt)
            content = list(part)
            for start in range(0, len(content), 2):
                writer.write(pa.RecordBatch.from_pylist(content[start : start + 2], schema=schema))
            rows += len(content)
            pieces += writer.close()
        # What a sink reports must survive being stored as JSON.
        pieces = msgspec.json.decode(msgspec.json.encode(pieces))
        return StagedBatch(generation=self.generation, batch=BatchId(batch), rows=rows, bytes=0, pieces=pieces)

    def permit(self, epoch: int, staged: Sequence[StagedBatch]) -> CommitPermit:
        return CommitPermit(
            flow=self.context.flow,
            operator=self.context.operator,
            sink=self.context.sink,
            epoch=Epoch(epoch),
            generation=self.generation,
            previous_epoch=self.previous,
            after_batch=self.through,
            through_batch=max((batch.batch for batch in staged), default=self.through),
        )

    def commit(self, epoch: int, *staged: StagedBatch) -> CommitPermit:
        """Prepare and commit an epoch; what comes later belongs to later epochs."""
        token = self.sink.prepare(Epoch(epoch), staged)
        permit = self.permit(epoch, staged)
        self.sink.commit(permit, staged, token)
        self.previous, self.through = Epoch(epoch), permit.through_batch
        return permit

    def publish(self, epoch: int, batch: int, *parts: Iterable[Row]) -> None:
        """Stage one batch and commit it as the epoch."""
        self.commit(epoch, self.stage(batch, *parts))


def rows(*ids: int) -> list[Row]:
    return [{"id": number, "name": f"row {number}"} for number in ids]


class SinkConformance:
    """Subclass it, and give the two methods below. Each test gets an empty ``tmp_path``."""

    #: Points at which the commit of this sink can be killed.
    commit_crash_points: ClassVar[tuple[str, ...]] = ("sink-commit-begun", "sink-commit-half", "sink-commit-done")
    #: Points at which its rewind can be killed.
    rewind_crash_points: ClassVar[tuple[str, ...]] = ()
    #: Whether several flows may write to the same target.
    can_be_shared: ClassVar[bool] = False
    #: What rows of every type look like, and what ``read_rows`` gives back for them.
    rich_schema: ClassVar[pa.Schema] = RICH
    rich_rows: ClassVar[list[Row]] = [RICH_ROW, {**dict.fromkeys(RICH_ROW), "id": 2}]

    def make_sink(self, tmp_path: Path) -> Sink:
        """A new instance over the same target each time, as after a restart. Not opened."""
        raise NotImplementedError

    def read_rows(self, tmp_path: Path) -> list[Row]:
        """What a reader of the target sees now, without columns that the sink adds."""
        raise NotImplementedError

    # ------------------------------------------------------------------ aids

    def context(self, schema: pa.Schema = SIMPLE, flow: str = "orders") -> SinkContext:
        return SinkContext(
            flow=FlowName(flow),
            operator=OperatorId("totals"),
            sink=SinkId("totals-out"),
            output_mode="append",
            schema_ipc=schema.serialize().to_pybytes(),
        )

    def start(self, tmp_path: Path, schema: pa.Schema = SIMPLE, flow: str = "orders") -> Case:
        context = self.context(schema, flow)
        sink = self.make_sink(tmp_path)
        sink.open(context)
        return Case(sink=sink, context=context)

    def ids(self, tmp_path: Path) -> list[int]:
        """The ids readers see, sorted, repeats included."""
        return sorted(row["id"] for row in self.read_rows(tmp_path))

    def seen(self, tmp_path: Path, *, after: int | None = None, as_of: int | None = None) -> tuple[int, list[int]]:
        """What somebody gets from ``cutline.read``: the epoch, and the ids."""
        found = read(self.make_sink(tmp_path), after=after, as_of=as_of)
        return found.epoch, sorted(found.to_arrow()["id"].to_pylist())

    def readable(self, tmp_path: Path) -> Case:
        case = self.start(tmp_path)
        if not isinstance(case.sink, Readable):
            pytest.skip("readers use what its target has")
        return case

    def rewindable(self, tmp_path: Path) -> Case:
        case = self.start(tmp_path)
        if not case.sink.can_rewind:
            pytest.skip("the sink cannot rewind, and says so")
        return case

    # ------------------------------------------------------------------ staging

    def test_staged_rows_are_invisible(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2, 3))
        assert self.ids(tmp_path) == []
        case.sink.prepare(Epoch(1), [staged])
        assert self.ids(tmp_path) == []
        assert case.sink.published() is None

    def test_an_empty_task_stages_no_piece(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        assert case.stage(0, [], []).pieces == []

    def test_staged_rows_survive_a_restart(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2))
        case.open(self.make_sink(tmp_path))
        case.commit(1, staged)
        assert self.ids(tmp_path) == [1, 2]

    def test_of_two_attempts_at_a_batch_only_the_named_one_is_published(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        case.stage(0, rows(1, 2))
        second = case.stage(0, rows(1, 2))
        case.commit(1, second)
        assert self.ids(tmp_path) == [1, 2]

    def test_an_aborted_batch_never_appears_and_aborting_twice_is_fine(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        aborted, kept = case.stage(0, rows(1, 2)), case.stage(1, rows(3))
        case.sink.abort([aborted])
        case.sink.abort([aborted])
        case.open(self.make_sink(tmp_path))
        case.sink.abort([aborted])
        case.commit(1, kept)
        assert self.ids(tmp_path) == [3]

    def test_aborting_one_attempt_leaves_the_other(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        first, second = case.stage(0, rows(1)), case.stage(0, rows(1))
        case.sink.abort([first])
        case.commit(1, second)
        assert self.ids(tmp_path) == [1]

    def test_aborting_what_is_published_takes_nothing_away(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2))
        case.commit(1, staged)
        case.sink.abort([staged])
        assert self.ids(tmp_path) == [1, 2]

    # ------------------------------------------------------------------ publishing

    def test_commit_publishes_exactly_the_epoch(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        first, second, later = case.stage(0, rows(1)), case.stage(1, rows(2, 3)), case.stage(2, rows(4))
        case.sink.prepare(Epoch(2), [first, second, later])
        case.commit(1, first, second)
        assert self.ids(tmp_path) == [1, 2, 3]
        case.commit(2, later)
        assert self.ids(tmp_path) == [1, 2, 3, 4]

    def test_committing_twice_publishes_once(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2), rows(3))
        permit = case.commit(1, staged)
        case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1, 2, 3]

    def test_committing_again_after_a_restart_publishes_once(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2))
        permit = case.commit(1, staged)
        case.open(self.make_sink(tmp_path))
        case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1, 2]

    def test_epochs_publish_in_order_and_published_tells(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        assert case.sink.published() is None
        # Epochs grow but need not follow one another: aborted ones leave gaps.
        for batch, epoch in enumerate((1, 2, 5)):
            case.publish(epoch, batch, rows(epoch))
            assert case.sink.published() == epoch
        fresh = self.make_sink(tmp_path)
        fresh.open(case.context)
        assert fresh.published() == 5
        assert self.ids(tmp_path) == [1, 2, 5]

    def test_an_old_epoch_committed_again_changes_nothing(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1))
        permit = case.commit(1, staged)
        case.publish(2, 1, rows(2))
        case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1, 2]
        assert case.sink.published() == 2

    def test_an_empty_epoch_is_fine(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        case.commit(1)
        case.publish(2, 0, [], [])
        assert self.ids(tmp_path) == []
        case.publish(3, 1, rows(1))
        case.commit(4)
        assert self.ids(tmp_path) == [1]
        assert case.sink.published() in (3, 4)

    def test_many_tasks_and_many_batches_make_one_epoch(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = [case.stage(batch, *(rows(100 * batch + task) for task in range(12))) for batch in range(4)]
        case.commit(1, *staged)
        assert self.ids(tmp_path) == [100 * batch + task for batch in range(4) for task in range(12)]

    def test_batches_of_an_older_generation_are_published_with_those_of_a_newer_one(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        old = case.stage(0, rows(1))
        case.generation = Generation(2)
        case.open(self.make_sink(tmp_path))
        case.commit(1, old, case.stage(1, rows(2)))
        assert self.ids(tmp_path) == [1, 2]

    def test_every_type_comes_back_as_it_went(self, tmp_path: Path) -> None:
        case = self.start(tmp_path, self.rich_schema)
        case.publish(1, 0, self.rich_rows)
        found = sorted(self.read_rows(tmp_path), key=lambda row: int(row["id"]))
        assert found == self.rich_rows

    # ------------------------------------------------------------------ rewinding

    def test_readers_get_whole_epochs(self, tmp_path: Path) -> None:
        case = self.readable(tmp_path)
        assert self.seen(tmp_path) == (NO_EPOCH, [])
        case.publish(3, 0, rows(1, 2))
        case.publish(5, 1, rows(3), rows(4))
        case.stage(2, rows(9))
        assert self.seen(tmp_path) == (5, [1, 2, 3, 4])
        owner = read(self.make_sink(tmp_path))
        assert (owner.flow, owner.sink) == (case.context.flow, case.context.sink)

    def test_readers_get_what_is_new_and_what_was_or_are_told_that_nobody_knows(self, tmp_path: Path) -> None:
        case = self.readable(tmp_path)
        for epoch in (3, 5, 6):
            case.publish(epoch, epoch, rows(epoch))
        for wish, expected in (
            ({"after": 3}, (6, [5, 6])),
            ({"after": 6}, (6, [])),
            ({"as_of": 5}, (5, [3, 5])),
            ({"as_of": 2}, (NO_EPOCH, [])),
            ({"after": 3, "as_of": 5}, (5, [5])),
        ):
            try:
                assert self.seen(tmp_path, **wish)[1] == expected[1], wish
            except SinkError as error:
                assert "told" in error.what or "cannot be read" in error.what  # noqa: PT017 (a sink may do either)

    def test_readers_are_told_of_what_was_taken_back(self, tmp_path: Path) -> None:
        case = self.readable(tmp_path)
        if not case.sink.can_rewind:
            pytest.skip("the sink cannot rewind, and says so")
        for epoch in (3, 5, 6):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(3))
        case.previous = Epoch(3)
        assert self.seen(tmp_path) == (3, [3])
        case.publish(8, 8, rows(8))
        assert self.seen(tmp_path) == (8, [3, 8])
        with pytest.raises(SinkError) as told:
            self.seen(tmp_path, after=5)
        assert getattr(told.value, "still", 3) == 3

    def test_rewind_hides_later_epochs_and_higher_ones_publish_again(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        for epoch in (1, 2, 3):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(1))
        assert self.ids(tmp_path) == [1]
        assert case.sink.published() == 1
        # The flow goes back to batch 1 in a new generation, and the same batches come again.
        case.through, case.previous, case.generation = BatchId(1), Epoch(1), Generation(2)
        case.publish(4, 2, rows(2))
        case.publish(5, 3, rows(3))
        assert self.ids(tmp_path) == [1, 2, 3]
        assert case.sink.published() == 5

    def test_rewinding_twice_is_rewinding_once(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        for epoch in (1, 2, 3):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(2))
        case.sink.rewind(Epoch(2))
        case.open(self.make_sink(tmp_path))
        case.sink.rewind(Epoch(2))
        assert self.ids(tmp_path) == [1, 2]
        case.sink.rewind(Epoch(1))
        assert self.ids(tmp_path) == [1]

    def test_rewind_to_an_epoch_without_rows_goes_to_the_one_before(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        case.publish(1, 1, rows(1))
        case.commit(2)
        case.publish(4, 2, rows(4))
        case.sink.rewind(Epoch(3))
        assert self.ids(tmp_path) == [1]

    def test_rewind_to_nothing_empties_the_target(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        case.sink.rewind(NO_EPOCH)
        case.publish(1, 0, rows(1))
        case.sink.rewind(NO_EPOCH)
        assert self.ids(tmp_path) == []
        assert case.sink.published() is None
        case.through, case.previous = NO_BATCH, NO_EPOCH
        case.publish(2, 0, rows(1))
        assert self.ids(tmp_path) == [1]

    def test_rewinding_after_a_rewind_follows_the_new_history(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        for epoch in (1, 2, 3):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(1))
        for epoch in (4, 5):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(4))
        assert self.ids(tmp_path) == [1, 4]
        case.sink.rewind(Epoch(3))  # 2 and 3 are not part of the history any more
        assert self.ids(tmp_path) == [1]
        assert case.sink.published() == 1

    def test_a_late_commit_of_a_rewound_epoch_is_fenced(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        case.publish(1, 1, rows(1))
        staged = case.stage(2, rows(2))
        permit = case.commit(2, staged)
        case.sink.rewind(Epoch(1))
        case.open(self.make_sink(tmp_path))
        with pytest.raises(FencedError):
            case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1]

    # ------------------------------------------------------------------ what must be refused

    def test_who_was_replaced_publishes_nothing_more(self, tmp_path: Path) -> None:
        """A process that was thought dead has a permit in its hand when another one takes over."""
        old = self.start(tmp_path)
        if not isinstance(old.sink, Claimable):
            pytest.skip("the sink cannot be taken over, and says so")
        old.sink.claim()
        old.publish(1, 1, rows(1))
        late = old.stage(2, rows(2))
        token, permit = old.sink.prepare(Epoch(2), [late]), old.permit(2, [late])
        new = self.start(tmp_path)
        assert isinstance(new.sink, Claimable)
        new.sink.claim()
        with pytest.raises(FencedError):
            old.sink.commit(permit, [late], token)
        new.previous, new.through, new.generation = Epoch(1), BatchId(1), Generation(2)
        new.publish(3, 2, rows(3))
        with pytest.raises((FencedError, SinkError)):
            old.sink.commit(permit, [late], token)
        if old.sink.can_rewind:
            with pytest.raises(FencedError):
                old.sink.rewind(Epoch(1))
        assert self.ids(tmp_path) == [1, 3]

    def test_rows_of_another_schema_are_refused(self, tmp_path: Path) -> None:
        self.start(tmp_path)
        changed = pa.schema([pa.field("id", pa.string()), pa.field("name", pa.string())])
        with pytest.raises(SinkError, match="id"):
            self.make_sink(tmp_path).open(self.context(changed))
        more = SIMPLE.append(pa.field("extra", pa.int64()))
        with pytest.raises(SinkError, match="extra"):
            self.make_sink(tmp_path).open(self.context(more))

    def test_another_flow_is_refused_or_does_not_disturb(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        case.publish(1, 0, rows(1))
        if not self.can_be_shared:
            with pytest.raises(SinkError, match="orders"):
                self.start(tmp_path, flow="strangers")
            return
        other = self.start(tmp_path, flow="strangers")
        assert other.sink.published() is None
        other.publish(1, 0, rows(101))
        case.publish(2, 1, rows(2))
        other.publish(2, 1, rows(102))
        assert self.ids(tmp_path) == [1, 2, 101, 102]
        assert (case.sink.published(), other.sink.published()) == (2, 2)

    def test_an_epoch_of_another_history_is_refused(self, tmp_path: Path) -> None:
        """The flow's storage was deleted, and the flow began anew with epoch 1 on the old target."""
        case = self.start(tmp_path)
        case.publish(1, 0, rows(1))
        case.publish(2, 1, rows(2))
        anew = self.start(tmp_path)
        with pytest.raises(SinkError, match="history"):
            anew.publish(1, 0, rows(1))
        assert self.ids(tmp_path) == [1, 2]

    # ------------------------------------------------------------------ kill -9

    def test_a_commit_that_is_killed_publishes_once_when_repeated(self, tmp_path: Path) -> None:
        for number, point in enumerate(self.commit_crash_points):
            place = tmp_path / str(number)
            place.mkdir()
            case = self.start(place)
            case.publish(1, 0, rows(1))
            staged = [case.stage(1, rows(2, 3), rows(4)), case.stage(2, rows(5))]
            token = case.sink.prepare(Epoch(2), staged)
            permit = case.permit(2, staged)
            self._die(place, point, case, permit=permit, staged=staged, token=token)
            assert self.ids(place) in ([1], [1, 2, 3, 4, 5]), f"half an epoch is visible after {point}"
            case.open(self.make_sink(place))
            case.sink.commit(permit, staged, token)
            assert self.ids(place) == [1, 2, 3, 4, 5], point
            assert case.sink.published() == 2
            case.previous, case.through = Epoch(2), permit.through_batch
            case.publish(3, 3, rows(6))
            assert self.ids(place) == [1, 2, 3, 4, 5, 6], point

    def test_a_rewind_that_is_killed_is_done_when_repeated(self, tmp_path: Path) -> None:
        for number, point in enumerate(self.rewind_crash_points):
            place = tmp_path / str(number)
            place.mkdir()
            case = self.rewindable(place)
            for epoch in (1, 2, 3):
                case.publish(epoch, epoch, rows(epoch))
            self._die(place, point, case, rewind_to=Epoch(1))
            assert self.ids(place) in ([1], [1, 2], [1, 2, 3]), point
            case.open(self.make_sink(place))
            case.sink.rewind(Epoch(1))
            assert self.ids(place) == [1], point
            case.publish(4, 4, rows(4))
            assert self.ids(place) == [1, 4], point

    def _die(self, place: Path, point: str, case: Case, **order: Any) -> None:
        """Do it in another process that is killed at the point."""
        load = {"file": inspect.getfile(type(self)), "case": type(self).__qualname__, "place": place}
        done = subprocess.run(
            [sys.executable, "-c", "from cutline.testing.conformance.sinks import act; act()"],
            input=pickle.dumps({**load, "context": case.context, **order}),
            env={**os.environ, ENVIRONMENT_VARIABLE: point, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, f"the sink never reached {point}: {done.stderr.decode()}"


def act() -> None:
    """In the process that dies: load the suite's subclass from its file, then commit or rewind as told."""
    order = pickle.loads(sys.stdin.buffer.read())
    spec = importlib.util.spec_from_file_location("cutline_conformance_case", order["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite: SinkConformance = getattr(module, order["case"])()
    sink = suite.make_sink(order["place"])
    sink.open(order["context"])
    if "rewind_to" in order:
        sink.rewind(order["rewind_to"])
    else:
        sink.commit(order["permit"], order["staged"], order["token"])
