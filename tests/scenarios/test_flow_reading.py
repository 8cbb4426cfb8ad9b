"""``cutline.read`` of several tables, on real targets whose sinks are driven step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable

import cutline
from cutline.connectors import flow_reading
from cutline.errors import ConfigError, RewoundError, SinkError
from cutline.model.history import Takeover
from cutline.model.ids import Epoch, FlowName, Generation, SinkId
from cutline.ports.reading import FlowRead
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Foreach, Parquet, SQLite
from cutline.testing.conformance.sinks import SIMPLE, Case, SinkConformance, rows
from tests.support.sink_targets import iceberg

KINDS: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda folder: Parquet(folder / "p"),
    "delta": lambda folder: Delta(folder / "d"),
    "sqlite": lambda folder: SQLite(folder / "s.sqlite", "t"),
    "iceberg": iceberg,
}


class Shop:
    """A flow's sinks, told what a flow tells them."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        self.folder, self.kinds, self.batch = folder, kinds, 0
        self.cases = {kind: self._case(kind) for kind in kinds}
        self.start(0)

    def _case(self, kind: str) -> Case:
        context = msgspec.structs.replace(SinkConformance().context(SIMPLE), flow=FlowName("shop"), sink=SinkId(kind))
        sink: Sink = KINDS[kind](self.folder)
        sink.open(context)
        return Case(sink=sink, context=context)

    def targets(self) -> dict[str, Sink]:
        """As a reader in another process names them."""
        return {kind: KINDS[kind](self.folder) for kind in self.kinds}

    def start(self, epoch: int, *, only: tuple[str, ...] = (), reached: bool = True) -> None:
        """A start that continues from the epoch, and has taken over all sinks or ``only`` these."""
        identity = f"{self.batch:032x}"
        self.batch += 1
        for kind in only or self.kinds:
            sink: Any = self.cases[kind].sink
            before = sink.claimed()
            taken = msgspec.json.decode(before.partition(" ")[2] or "[]", type=list[Takeover])
            taken.append(
                Takeover(generation=Generation(1), identity=identity, epoch=Epoch(epoch), started_ms=self.batch)
            )
            sink.claim(msgspec.json.encode(taken).decode(), expected=before)
            if (sink.published() or 0) > epoch:
                sink.rewind(Epoch(epoch))
                self.cases[kind].previous = Epoch(epoch)
            if reached:
                sink.record_reach(Epoch(epoch), is_per_operator=False, at_start=True)

    def publish(self, epoch: int, *kinds: str) -> None:
        """The row ``epoch`` in the tables of these sinks."""
        for kind in kinds or self.kinds:
            self.batch += 1
            self.cases[kind].publish(epoch, self.batch, rows(epoch))

    def nothing(self, epoch: int, *kinds: str) -> None:
        """The epoch has no rows for these sinks."""
        for kind in kinds:
            self.cases[kind].commit(epoch)
            sink: Any = self.cases[kind].sink
            sink.record_reach(Epoch(epoch), is_per_operator=False)

    def read(self, as_of: int | None = None, **options: Any) -> FlowRead:
        return cutline.read(self.targets(), as_of=as_of, timeout_s=0, **options)


def ids(found: FlowRead) -> dict[str, list[int]]:
    return {name: sorted(one.to_arrow()["id"].to_pylist()) for name, one in found.items()}


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, *KINDS)


def test_tables_of_four_systems_are_read_at_the_epoch_that_all_have_reached(shop: Shop) -> None:
    shop.publish(1)
    shop.publish(2, "delta", "sqlite")
    found = shop.read()
    assert (found.flow, found.epoch, len(found)) == ("shop", 1, 4)
    assert ids(found) == {key: [1] for key in KINDS}
    shop.publish(2, "parquet", "iceberg")
    assert cutline.latest_common_epoch(shop.targets()) == 2
    assert ids(shop.read()) == {key: [1, 2] for key in KINDS}
    assert ids(shop.read(as_of=1)) == {key: [1] for key in KINDS}
    assert ids(found) == {key: [1] for key in KINDS}, "what was read stays"


def test_a_sink_without_rows_holds_no_other_back(shop: Shop) -> None:
    shop.publish(1)
    for epoch in (2, 3):
        shop.publish(epoch, "delta")
        shop.nothing(epoch, "sqlite", "parquet", "iceberg")
    found = shop.read()
    assert (found.epoch, ids(found)["delta"], ids(found)["sqlite"]) == (3, [1, 2, 3], [1])
    assert {name: one.epoch for name, one in found.items()} == {"delta": 3, "sqlite": 1, "parquet": 1, "iceberg": 1}
    # Nor does it set readers back when the flow is restarted, at any moment of the start.
    shop.start(3, only=("sqlite",), reached=False)
    assert shop.read().epoch == 3
    shop.start(3, reached=False)
    assert shop.read().epoch == 3


def test_a_flow_a_list_and_a_mapping_name_the_same_tables(shop: Shop) -> None:
    shop.publish(1)
    flow = cutline.Flow("shop")
    flow.operator("totals")(lambda spark: spark)
    for name, sink in shop.targets().items():
        flow.sink("totals", sink, name=name)
    named, listed = cutline.read(flow), cutline.read(list(shop.targets().values()))
    assert ids(named) == ids(listed) == ids(shop.read()) == {key: [1] for key in KINDS}
    assert cutline.latest_common_epoch(flow) == 1


def test_an_epoch_that_was_rewound_is_told(shop: Shop) -> None:
    for epoch in (1, 2, 3):
        shop.publish(epoch)
    shop.start(1)
    found = shop.read()
    assert (found.epoch, ids(found)["iceberg"]) == (1, [1])
    with pytest.raises(SinkError, match="has published up to epoch 1, not yet epoch 3"):
        shop.read(as_of=3)
    shop.publish(4)
    with pytest.raises(RewoundError, match="epoch 3 was rewound") as told:
        shop.read(as_of=3)
    assert told.value.still == 1
    assert ids(shop.read(as_of=1)) == {key: [1] for key in KINDS}
    assert ids(shop.read()) == {key: [1, 4] for key in KINDS}


def test_a_restore_that_has_come_only_half_way_shows_what_it_continues_from(shop: Shop) -> None:
    for epoch in (1, 2, 3):
        shop.publish(epoch)
    shop.start(2, only=("delta", "parquet"))
    found = shop.read()
    assert (found.epoch, ids(found)) == (2, {key: [1, 2] for key in KINDS})


@pytest.mark.parametrize("late", list(KINDS))
def test_a_restore_between_two_tables_is_noticed(shop: Shop, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one table are read as of epoch 3; then the flow is restored to 1 and publishes 4."""
    for epoch in (1, 2, 3):
        shop.publish(epoch)
    read_one, pending = flow_reading._Tables._read_one, [4]

    def read(self: Any, name: str, *others: Any) -> Any:
        if name == late and pending:
            shop.start(1)
            shop.publish(pending.pop())
        return read_one(self, name, *others)

    monkeypatch.setattr(flow_reading._Tables, "_read_one", read)
    with pytest.raises(SinkError, match="restarted or restored while its tables were read"):
        shop.read()
    shop.publish(5)
    pending.append(6)
    found = cutline.read(shop.targets(), timeout_s=120)  # time for a second attempt, on a busy machine too
    assert (found.epoch, ids(found)) == (6, {key: [1, 6] for key in KINDS})


def test_a_table_that_shows_only_its_newest_epoch_must_not_be_ahead(tmp_path: Path) -> None:
    KINDS["now"] = lambda folder: SQLite(folder / "n.sqlite", "t", mode="upsert", key=["id"])
    try:
        shop = Shop(tmp_path, "now", "delta")
        shop.publish(1)
        assert shop.read().epoch == 1
        shop.publish(2, "now")
        with pytest.raises(SinkError, match="sink now is at epoch 2 and cannot show epoch 1 any more") as told:
            shop.read()
        assert "leave_out=" in told.value.next_step
        with pytest.raises(SinkError, match="cannot show epoch 1"):
            shop.read(as_of=1)
        assert ids(shop.read(leave_out=["now"])) == {"delta": [1]}
        shop.publish(2, "delta")
        assert shop.read().epoch == 2
    finally:
        del KINDS["now"]


def test_files_that_a_vacuum_deleted_are_told(tmp_path: Path) -> None:
    KINDS["merged"] = lambda folder: Delta(folder / "m", mode="upsert", key=["name"])
    try:
        shop = Shop(tmp_path, "merged", "sqlite")
        case = shop.cases["merged"]
        for epoch in (1, 2, 3):
            case.publish(epoch, 100 + epoch, [{"id": epoch, "name": "same"}])
        shop.publish(1, "sqlite")
        assert ids(shop.read(as_of=1)) == {"merged": [1], "sqlite": [1]}
        DeltaTable(tmp_path / "m").vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
        with pytest.raises(SinkError, match=r"a vacuum has deleted.*sink=merged") as told:
            shop.read(as_of=1)
        assert "leave_out=" in told.value.next_step
        with pytest.raises(SinkError, match="a vacuum has deleted"):
            cutline.latest_common_epoch(shop.targets(), timeout_s=0)
    finally:
        del KINDS["merged"]


def test_sinks_that_cannot_take_part_are_named(shop: Shop, tmp_path: Path) -> None:
    shop.publish(1)
    with_function = {**shop.targets(), "alerts": Foreach(print, staging=tmp_path / "f")}
    with pytest.raises(ConfigError, match="sink alerts cannot be read together") as told:
        cutline.read(with_function)
    assert 'leave_out=["alerts"]' in told.value.next_step
    assert len(cutline.read(with_function, leave_out=["alerts"])) == 4
    with pytest.raises(ConfigError, match="names what is not a sink: alert"):
        cutline.read(with_function, leave_out=["alert"])
    shop.cases["delta"].publish(30_000_000_042, 99, rows(9))
    with pytest.raises(ConfigError, match=r"sink delta cannot be read together.*batch by batch"):
        shop.read()


def test_questions_that_have_no_answer(shop: Shop, tmp_path: Path) -> None:
    shop.publish(1)
    with pytest.raises(ConfigError, match="after= and name= are for one sink"):
        cutline.read(shop.targets(), after=1)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="leave_out= is for several"):
        cutline.read(Parquet(tmp_path / "p"), leave_out=["x"])  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="no sink to read"):
        cutline.read({})
    with pytest.raises(SinkError, match=r"no flow has published.*sink=new"):
        cutline.read({**shop.targets(), "new": Parquet(tmp_path / "new")})
    other = Shop(tmp_path / "other", "parquet")
    assert shop.read(as_of=0).epoch == 0
    both: list[Sink] = [Parquet(tmp_path / "p"), Parquet(tmp_path / "other" / "p")]
    found: Any = other.cases["parquet"].sink
    record = found._load_record()
    found._store_record(msgspec.structs.replace(record, flow=FlowName("returns")))
    with pytest.raises(ConfigError, match=r"several flows \(returns, shop\)"):
        cutline.read(both)


def test_epochs_of_single_operators_are_no_cuts(shop: Shop) -> None:
    shop.publish(1)
    sink: Any = shop.cases["sqlite"].sink
    sink.record_reach(Epoch(1), is_per_operator=True, at_start=True)
    with pytest.raises(ConfigError, match="operator by operator"):
        shop.read()


def test_a_reach_that_is_damaged_or_late_counts_for_nothing(shop: Shop) -> None:
    shop.publish(1)
    shop.publish(2, "delta")
    shop.nothing(2, "parquet", "sqlite", "iceberg")
    path = shop.folder / "p" / "_cutline" / "reach.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert shop.read().epoch == 1
    shop.nothing(2, "parquet")
    assert shop.read().epoch == 2
    replaced: Any = shop.cases["parquet"].sink
    new: Any = shop._case("parquet").sink
    new.claim("", expected=new.claimed())
    replaced.record_reach(Epoch(7), is_per_operator=False)
    assert shop.read().epoch == 1
