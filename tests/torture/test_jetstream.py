"""The JetStream sink against a real server: the suite, lost answers, a frozen writer that wakes up too late."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from cutline.connectors.nats.client import Connection
from cutline.connectors.nats.ledger import ledger_subject, load_ledger
from cutline.connectors.nats.reader import PublishedEpoch, read_published
from cutline.errors import CutlineError, FencedError, NotDone, OutcomeUnknown, SinkError
from cutline.model.ids import Epoch
from cutline.sinks import JetStream
from cutline.testing.conformance.sinks import SIMPLE, Case, Row, SinkConformance, rows
from cutline.testing.servers.nats import NatsServer
from tests.support.streams import Stream

#: The suite's other process has no fixtures.
URL = "CUTLINE_TEST_NATS_URL"


@pytest.fixture(autouse=True)
def server(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> NatsServer:
    monkeypatch.setenv(URL, nats_server.url)
    return nats_server


def stream_of(tmp_path: Path) -> str:
    return f"OUT_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"


def make(tmp_path: Path, **options: Any) -> JetStream:
    stream = stream_of(tmp_path)
    return JetStream(os.environ[URL], stream, f"{stream}.rows", staging=tmp_path / "staging", **options)


def published(tmp_path: Path, flow: str = "orders", after: int = 0) -> list[PublishedEpoch]:
    return list(read_published(os.environ[URL], stream_of(tmp_path), flow=flow, sink="totals-out", after=after))


class TestJetStream(SinkConformance):
    can_be_shared = True
    rich_schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("real", pa.float64()),
            pa.field("flag", pa.bool_()),
            pa.field("text", pa.string()),
            pa.field("tags", pa.list_(pa.string())),
            pa.field("counts", pa.map_(pa.string(), pa.int64())),
            pa.field("point", pa.struct([pa.field("x", pa.int32())])),
        ]
    )
    rich_rows: ClassVar[list[Row]] = [
        {
            "id": 1,
            "real": 0.25,
            "flag": True,
            "text": "naïve — ☃ 'quoted' \\ %20",
            "tags": ["a", None, ""],
            "counts": {"k": 1, "n": None},
            "point": {"x": None},
        },
        {"id": 2, "real": None, "flag": None, "text": None, "tags": None, "counts": None, "point": None},
    ]

    def make_sink(self, tmp_path: Path) -> JetStream:
        return make(tmp_path, batch_messages=3)

    def read_rows(self, tmp_path: Path) -> list[Row]:
        epochs = [one for flow in ("orders", "strangers") for one in published(tmp_path, flow)]
        return [json.loads(message.data) for epoch in epochs for message in epoch.rows]


def start(tmp_path: Path, schema: pa.Schema = SIMPLE, **options: Any) -> Case:
    sink = make(tmp_path, **options)
    context = TestJetStream().context(schema)
    sink.open(context)
    sink.claim("", expected=sink.claimed())
    return Case(sink=sink, context=context)


def take_over(case: Case, sink: JetStream) -> None:
    """As the next start does it."""
    case.open(sink)
    sink.claim("", expected=sink.claimed())


def raw_ids(tmp_path: Path) -> list[int]:
    """What a reader sees who knows nothing of epochs."""
    with Stream(os.environ[URL], stream_of(tmp_path), subjects=None) as stream:
        return [json.loads(one.data)["id"] for one in stream.messages() if not one.subject.startswith("_cutline")]


@pytest.fixture
def lost_answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of the next orders to the server, whether it does them; in either case it seems not to answer."""
    plan: list[bool] = []
    tell = Connection.tell

    def doubtful(self: Connection, order: Any) -> Any:
        if not plan:
            return tell(self, order)
        if plan.pop(0):
            tell(self, order)
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(Connection, "tell", doubtful)
    return plan


@pytest.mark.parametrize("happened", [True, False])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_write_without_an_answer_leaves_every_row_once(
    tmp_path: Path, lost_answers: list[bool], before: int, happened: bool
) -> None:
    case = start(tmp_path, batch_messages=4)
    case.publish(1, 0, rows(1))
    staged = case.stage(1, rows(*range(2, 12)))
    token = case.sink.prepare(Epoch(2), [staged])
    permit = case.permit(2, [staged])
    with pytest.MonkeyPatch.context() as patch:
        tell, told = Connection.tell, [0]

        def counted(self: Connection, order: Any) -> Any:
            told[0] += 1
            if told[0] == before + 1:
                lost_answers.append(happened)
            return tell(self, order)

        patch.setattr(Connection, "tell", counted)
        with pytest.raises(OutcomeUnknown):
            case.sink.commit(permit, [staged], token)
    case.sink.commit(permit, [staged], token)
    assert raw_ids(tmp_path) == list(range(1, 12))
    assert [one.epoch for one in published(tmp_path)] == [1, 2]


@pytest.mark.parametrize("happened", [True, False])
def test_a_first_start_that_fails_half_way_is_no_lost_ledger(
    tmp_path: Path, lost_answers: list[bool], happened: bool
) -> None:
    lost_answers.append(happened)
    with pytest.raises(OutcomeUnknown):
        start(tmp_path)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    assert raw_ids(tmp_path) == [1]


@pytest.mark.parametrize("happened", [True, False])
def test_several_answers_that_are_lost_in_a_row_are_no_newer_start(
    tmp_path: Path, lost_answers: list[bool], happened: bool
) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1, 2))
    permit = case.permit(1, [staged])
    lost_answers += [happened, True, False, True]
    for _ in range(4):
        with pytest.raises(OutcomeUnknown):
            case.sink.commit(permit, [staged], {})
    case.sink.commit(permit, [staged], {})
    assert raw_ids(tmp_path) == [1, 2]


def test_a_ledger_that_was_dropped_while_the_flow_runs_is_called_lost(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    with Stream(os.environ[URL], stream_of(tmp_path), subjects=None) as stream:
        stream.purge(below=100)
    for _ in range(2):
        with pytest.raises(SinkError, match="lost the sink's ledger"):
            case.publish(2, 1, rows(2))
    assert raw_ids(tmp_path) == []


def test_a_writer_that_was_thought_dead_publishes_nothing_more(tmp_path: Path) -> None:
    """Without the ledger's fence it would publish again what its successor did, once the duplicate window is over."""
    case = start(tmp_path)
    zombie, staged = case.sink, case.stage(0, rows(1, 2))
    permit = case.permit(1, [staged])
    take_over(case, make(tmp_path))
    with pytest.raises(FencedError):
        zombie.commit(permit, [staged], {})
    assert raw_ids(tmp_path) == []
    case.commit(1, staged)
    with pytest.raises(FencedError):
        zombie.commit(permit, [staged], {})
    assert raw_ids(tmp_path) == [1, 2]


def test_exactly_once_does_not_need_the_window_of_duplicates(tmp_path: Path) -> None:
    name = stream_of(tmp_path)
    config = {"subjects": [f"{name}.>", f"_cutline.{name}.>"], "allow_atomic": True, "duplicate_window": 0.1}
    with Stream(os.environ[URL], name, **config):
        case = start(tmp_path, batch_messages=3)
        staged = case.stage(0, rows(*range(1, 10)))
        permit = case.commit(1, staged)
        staged_again = case.stage(1, rows(10))
        take_over(case, make(tmp_path, batch_messages=3))
        case.sink.commit(permit, [staged], {})
        case.commit(2, staged_again)
        assert raw_ids(tmp_path) == list(range(1, 11))


def test_an_epoch_that_fits_into_one_batch_appears_at_once_for_everybody(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, rows(*range(999)))
    with Stream(os.environ[URL], stream_of(tmp_path), subjects=None) as stream:
        found = stream.messages()
    assert len(found) == 1 + 999 + 1
    assert {one.published_ns for one in found[1:]}
    assert found[1].headers["Nats-Msg-Id"].endswith("/0")


def test_readers_go_on_after_the_sequence_they_have_kept(tmp_path: Path) -> None:
    case = start(tmp_path, batch_messages=3)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(*range(10 * epoch, 10 * epoch + 5)))
    first, second, third = published(tmp_path)
    assert [one.sequence for one in published(tmp_path, after=first.sequence)] == [second.sequence, third.sequence]
    assert published(tmp_path, after=third.sequence) == []
    with pytest.raises(SinkError, match="only 2 of the epoch's 5 rows are in the stream"):
        published(tmp_path, after=second.sequence - 4)


def test_a_column_may_be_the_message(tmp_path: Path) -> None:
    case = start(tmp_path, value="name")
    case.publish(1, 0, [{"id": 1, "name": "plain text"}, {"id": 2, "name": None}])
    assert [one.data for one in published(tmp_path)[0].rows] == [b"plain text", b""]
    with pytest.raises(SinkError, match="no such column"):
        start(tmp_path, value="nobody")
    with pytest.raises(SinkError, match="text or bytes"):
        start(tmp_path, value="id")


def test_rows_that_json_cannot_hold_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """Otherwise the first checkpoint with such a row could never be published."""
    for keys in (pa.bool_(), pa.struct([("x", pa.int32())]), pa.list_(pa.int32())):
        schema = pa.schema([("id", pa.int64()), ("deep", pa.list_(pa.struct([("m", pa.map_(keys, pa.int64()))])))])
        with pytest.raises(SinkError, match="JSON cannot express a map with such keys"):
            start(tmp_path, schema)
    start(tmp_path, pa.schema([("id", pa.int64()), ("days", pa.map_(pa.date32(), pa.int64()))]))


def test_a_stream_that_will_not_do_is_refused_with_what_to_change(tmp_path: Path) -> None:
    with Stream(os.environ[URL], stream_of(tmp_path), subjects=["elsewhere.>"], retention="interest") as stream:
        with pytest.raises(SinkError) as refused:
            start(tmp_path)
        for part in ("rows: add", "_cutline", "allow_atomic", "retention must be limits"):
            assert part in str(refused.value)
        stream.remove()


def test_a_stream_without_its_ledger_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    with Stream(os.environ[URL], stream_of(tmp_path), subjects=None) as stream:
        stream.purge(below=100)
        with pytest.raises(SinkError, match="lost the sink's ledger"):
            start(tmp_path)
        stream.remove()
    with pytest.raises(SinkError, match="lost the sink's ledger"):
        start(tmp_path)


def test_other_publishers_do_not_disturb(tmp_path: Path) -> None:
    case = start(tmp_path, batch_messages=3)
    with Stream(os.environ[URL], stream_of(tmp_path), subjects=None) as stream:
        case.publish(1, 0, rows(1, 2, 3))
        stream.publish("not ours", subject="rows")
        case.publish(2, 1, rows(4, 5, 6))
        assert TestJetStream().ids(tmp_path) == [1, 2, 3, 4, 5, 6]
        assert len(stream.messages()) == 1 + 7 + 4


def test_a_killed_and_a_frozen_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = NatsServer()
    own.start()
    monkeypatch.setenv(URL, own.url)
    try:
        case = start(tmp_path, batch_messages=3)
        case.publish(1, 0, rows(1, 2, 3))
        staged = case.stage(1, rows(4, 5, 6))
        permit = case.permit(2, [staged])
        own.kill()
        with pytest.raises(NotDone, match="cannot be reached"):
            case.sink.commit(permit, [staged], {})
        own.start()
        own.freeze()
        with pytest.raises(CutlineError, match="cannot be reached"):
            case.sink.commit(permit, [staged], {})
        own.thaw()
        case.sink.commit(permit, [staged], {})
        own.restart()
        assert raw_ids(tmp_path) == [1, 2, 3, 4, 5, 6]
    finally:
        own.remove()


def test_rewinding_is_refused(tmp_path: Path) -> None:
    case = start(tmp_path)
    assert not case.sink.can_rewind
    with pytest.raises(SinkError, match="on_rollback"):
        case.sink.rewind(Epoch(1))


def test_a_batch_begun_before_a_claim_is_refused_when_it_ends(tmp_path: Path) -> None:
    """The server looks at the ledger when it stores the batch, not when the first message of it arrives."""
    case = start(tmp_path)
    stream = stream_of(tmp_path)
    subject = ledger_subject(stream, "orders", "totals-out")

    async def half(client: Any, number: int, headers: dict[str, str]) -> bytes:
        batch = {"Nats-Batch-Id": "late", "Nats-Batch-Sequence": str(number), **headers}
        answer = await client.request(f"{stream}.rows", b"zombie", headers=batch, timeout=5)
        return bytes(answer.data)

    with Connection(os.environ[URL]) as zombie:
        held = load_ledger(zombie, stream, subject)
        assert held is not None
        fence = {
            "Nats-Expected-Last-Subject-Sequence": str(held.sequence),
            "Nats-Expected-Last-Subject-Sequence-Subject": subject,
        }
        assert zombie.ask(lambda client: half(client, 1, fence)) == b""
        take_over(case, make(tmp_path))
        assert b"wrong last sequence" in zombie.ask(lambda client: half(client, 2, {"Nats-Batch-Commit": "1"}))
    case.publish(1, 0, rows(1))
    assert raw_ids(tmp_path) == [1]
