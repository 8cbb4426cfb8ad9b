"""A Kafka sink's ledger, as messages."""

from __future__ import annotations

import pytest

from cutline.base import records
from cutline.connectors.kafka.client import Record
from cutline.connectors.kafka.ledger import CUT_KIND, LEDGER_KIND, Cut, Held, LedgerTopic, TopicLedger, ledger_key
from cutline.errors import DamagedRecordError, NotDone
from cutline.model.ids import Epoch, FlowName, SinkId
from cutline.protocol.publish.sink_ledger import EPOCHS_REMEMBERED

FRESH = TopicLedger(flow=FlowName("f"), sink=SinkId("s"), topic="t", claim="", schema_ipc=b"")
OWN = ledger_key("f", "s")


class Topic:
    """What a compacted topic holds, of one partition or more."""

    def __init__(self) -> None:
        self.newest: dict[bytes, list[Record]] = {}
        self.offset = 0

    def write(self, before: Held, after: Held) -> Held:
        for key, value in after.messages_after(before):
            self.offset += 1
            self.newest[key] = [Record(self.offset, key, value, 0, [])]
        return after

    def read(self) -> Held | None:
        return LedgerTopic("servers", "ledger")._held(OWN, self.newest)


def cut(epoch: int) -> Cut:
    return Cut(epoch=Epoch(epoch), digest=f"d{epoch}", rows=1, topic_id="id", ends={"0": 10 * epoch})


def test_what_is_written_is_read() -> None:
    topic, held = Topic(), Held(FRESH, {})
    assert topic.read() is None
    held = topic.write(held, held.claimed("token history", "id"))
    for epoch in (3, 5, 6):
        held = topic.write(held, held.with_cut(cut(epoch)))
        assert topic.read() == held
    ledger = held.sink_ledger()
    assert (ledger.published, ledger.claim, dict(ledger.digests)) == (6, "token history", {3: "d3", 5: "d5", 6: "d6"})
    assert held.forgotten == 0 and held.ledger.topic_id == "id"


def test_the_newest_epochs_are_remembered_and_older_ones_get_a_tombstone() -> None:
    topic, held = Topic(), Held(FRESH, {})
    for epoch in range(1, EPOCHS_REMEMBERED + 21):
        held = topic.write(held, held.with_cut(cut(epoch)))
    assert held.forgotten == 20 and topic.read() == held
    assert min(held.cuts) == 21 and len(held.cuts) == EPOCHS_REMEMBERED
    kept = [key for key, (record,) in topic.newest.items() if record.value is not None]
    assert len(kept) == 1 + EPOCHS_REMEMBERED
    # Each epoch adds little, however many are remembered.
    assert sum(len(one.value or b"") for one in held.messages_after(held)) < 1_000


def test_a_ledger_of_an_earlier_version_continues() -> None:
    published = {str(epoch): f"d{epoch}" for epoch in range(1, EPOCHS_REMEMBERED + 1)}
    old = TopicLedger(
        flow=FRESH.flow, sink=FRESH.sink, topic="t", claim="c h", schema_ipc=b"", epoch=Epoch(100), published=published
    )
    topic = Topic()
    topic.newest[OWN] = [Record(1, OWN, records.encode(LEDGER_KIND, old), 0, [])]
    held = topic.read()
    assert held is not None and held.sink_ledger().digests[Epoch(100)] == "d100"
    assert held.forgotten == 100  # their cuts are not known
    held = topic.write(held, held.with_cut(cut(101)))
    assert held.sink_ledger().digests[Epoch(2)] == "d2" and Epoch(1) not in held.sink_ledger().digests
    assert topic.read() == held and held.forgotten == 100
    for epoch in range(102, 210):
        held = topic.write(held, held.with_cut(cut(epoch)))
    assert held.ledger.published == {} and held.forgotten == 109


def test_of_several_partitions_the_newest_ledger_counts() -> None:
    """Partitions were added to the ledger topic, so a later message went elsewhere."""
    topic, held = Topic(), Held(FRESH, {})
    older = topic.write(held, held.claimed("first", ""))
    newer = topic.write(older, older.claimed("second", ""))
    messages = [
        Record(1, OWN, records.encode(LEDGER_KIND, newer.ledger), 5, []),
        Record(9, OWN, records.encode(LEDGER_KIND, older.ledger), 9_999, []),
    ]
    for several in (messages, messages[::-1]):
        topic.newest[OWN] = several
        assert topic.read() == newer


def test_a_tombstone_is_a_lost_ledger_and_a_cut_beyond_the_ledger_does_not_count() -> None:
    topic, held = Topic(), Held(FRESH, {})
    held = topic.write(held, held.with_cut(cut(1)))
    later = OWN + b"@2"
    topic.newest[later] = [Record(9, later, records.encode(CUT_KIND, cut(2)), 0, [])]
    assert topic.read() == held
    topic.newest[OWN] = [Record(10, OWN, None, 0, [])]
    assert topic.read() is None


def test_a_record_under_another_key_is_not_believed() -> None:
    topic, held = Topic(), Held(FRESH, {})
    topic.write(held, held.with_cut(cut(1)))
    stranger = ledger_key("f", "other")
    topic.newest[stranger] = topic.newest[OWN]
    with pytest.raises(DamagedRecordError, match="at the place of"):
        LedgerTopic("servers", "ledger")._held(stranger, topic.newest)
    topic.newest[OWN + b"@0"] = topic.newest[OWN + b"@1"]
    with pytest.raises(DamagedRecordError, match="at the place of"):
        topic.read()


def test_messages_of_no_sink_are_passed_over_and_damaged_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    topic, held = Topic(), Held(FRESH, {})
    held = topic.write(held, held.with_cut(cut(1)))
    for key in (b"", b"\xff", b"no slash", b"f/s/t", b"f/s@x", b"/", b"@1"):
        topic.newest[key] = [Record(99, key, b"\x00", 0, [])]
    monkeypatch.setattr(LedgerTopic, "_newest", lambda *_, **__: topic.newest)
    ledgers = LedgerTopic("servers", "ledger")
    assert ledgers.load_all(timeout_s=1.0) == [held]
    topic.newest[b"g/s"] = [Record(99, b"g/s", b"\x00", 0, [])]
    with pytest.raises(DamagedRecordError):
        ledgers.load_all(timeout_s=1.0)
    assert ledgers.load("f", "s", timeout_s=1.0) == held


def test_a_topic_that_is_not_there_is_not_an_empty_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LedgerTopic, "_newest", lambda *_, **__: None)
    with pytest.raises(NotDone, match="unknown what the sink has published"):
        LedgerTopic("servers", "ledger").load("f", "s", timeout_s=1.0)
    assert LedgerTopic("servers", "ledger").load_all(timeout_s=1.0) == []


def test_what_a_target_has_lost_is_named() -> None:
    one = Cut(epoch=Epoch(3), digest="d", rows=9, ends={"0": 10, "1": 4, "2": 0})
    assert one.lost_in({0: 10, 1: 9, 2: 0, 3: 5}) == ""
    assert one.lost_in({0: 8, 2: 0}) == "partition 0: offsets 8 to 9, partition 1: offsets 0 to 3"
