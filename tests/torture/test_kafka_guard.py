"""The replay guards of both Kafka sources, against a real broker that drops, expires and replaces what was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.connectors.kafka.spark_connector import encoded_subscription
from cutline.connectors.kafka.spark_reader import KafkaReader
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import LostInputError, NotDone
from cutline.model.plan import PlannedSource
from cutline.spark_dir import skip_input
from cutline.spark_dir.recorded_sources import load_recorded, store_recorded
from cutline.spark_dir.source_check import check_sources
from tests.support.kafka_topics import Topic

if TYPE_CHECKING:
    from cutline.testing.servers.kafka import KafkaCluster

GUARD = ReplayGuard()
OURS, SPARKS = "cutline_kafka", "kafka"


class Read:
    """A topic of two partitions, of which a query has read 10 messages each, in two batches: 4, then 6."""

    def __init__(self, cluster: KafkaCluster, live: Path, source: str) -> None:
        self.topic = Topic(cluster.servers, cluster.fresh_topic(partitions=2, segment_bytes="1048576"))
        self.live = live
        self.source = source
        self._reader = KafkaReader({"servers": self.topic.servers, "topic": self.topic.name})
        self._at = self._reader.initialOffset()
        self.write_beginning()
        self.positions: list[bytes] = []
        self.read(4)
        self.read(6)
        store_recorded(live, GUARD.recorded(self.planned, []))

    @property
    def planned(self) -> list[PlannedSource]:
        if self.source == OURS:
            return [PlannedSource(format=OURS, address=self.topic.servers)]
        settings = encoded_subscription({"subscribe": self.topic.name})
        return [PlannedSource(format=SPARKS, address=self.topic.servers, settings=settings)]

    def write_beginning(self) -> None:
        folder = self.live / "sources/0"
        folder.mkdir(parents=True)
        if self.source == SPARKS:
            (folder / "0").write_bytes(b"\x00v1\n" + self._offset())

    def read(self, count: int) -> None:
        for partition in (0, 1):
            self.topic.publish(range(count), partition=partition)
        self._at = self._reader.latestOffset(self._at, None)
        batch = len(self.positions)
        self.positions.append(self._offset())
        for folder in ("offsets", "commits"):
            (self.live / folder).mkdir(exist_ok=True)
            (self.live / folder / str(batch)).write_bytes(b"v1\n{}\n" + self._offset())

    def _offset(self) -> bytes:
        offset = self._at if self.source == OURS else {self.topic.name: self._at["offsets"]}
        return json.dumps(offset, separators=(",", ":")).encode()

    def lost(self, batch: int = 0) -> list[tuple[str, str, int]]:
        """What a restore to this batch would miss."""
        recorded = load_recorded(self.live)
        report = check_sources(GUARD, {"0": self.positions[batch]}, self.live, self.planned, recorded)
        assert not report.notes
        name = f"topic {self.topic.name}, partition "
        return [(one.path.removeprefix(name), one.problem, one.parts) for one in report.problems]

    def lost_ahead(self) -> list[str]:
        return [one.path for one in skip_input.lost_ahead(GUARD, self.live, self.planned)]

    def restore(self, batch: int = 0) -> dict[str, int]:
        """Go back to a batch and continue without what is gone; returns the next offsets."""
        for folder in ("offsets", "commits"):
            for path in (self.live / folder).iterdir():
                if int(path.name) > batch:
                    path.unlink()
        skip_input.skip_lost(GUARD, self.live, self.live, self.planned)
        assert load_recorded(self.live) == [], "the next start records what the positions are in now"
        return self.offsets(batch)

    def offsets(self, batch: int) -> dict[str, int]:
        found: dict[str, Any] = json.loads((self.live / f"offsets/{batch}").read_bytes().split(b"\n")[2])
        offsets: dict[str, int] = found["offsets"] if self.source == OURS else found[self.topic.name]
        return offsets


@pytest.fixture(params=[OURS, SPARKS])
def read(kafka_cluster: KafkaCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Read:
    return Read(kafka_cluster, tmp_path, request.param)


def test_nothing_is_missing(read: Read) -> None:
    assert read.lost() == [] and read.lost_ahead() == []
    assert read.restore() == {"0": 4, "1": 4}


def test_dropped(read: Read) -> None:
    read.topic.drop(4, partition=0)
    assert read.lost() == [], "what the checkpoint has read is not needed again"
    read.topic.drop(7, partition=0)
    assert read.lost() == [("0: offsets 4 to 6", "the topic has dropped these messages", 3)]
    assert read.lost(1) == []
    assert read.restore() == {"0": 7, "1": 4}
    assert read.lost_ahead() == []


def test_expired(read: Read) -> None:
    """By the topic's retention. The broker drops whole segments, the active one too once it is old enough."""
    read.topic.expire(partition=1, first=10)
    assert [(what, parts) for what, _, parts in read.lost()] == [("0: offsets 4 to 9", 6), ("1: offsets 4 to 9", 6)]
    assert read.restore() == {"0": 10, "1": 10}


def test_what_was_not_read_yet_has_expired(read: Read) -> None:
    """A flow that was down for too long is refused when it resumes."""
    read.topic.publish(range(5), partition=1)
    read.topic.drop(12, partition=1)
    assert read.lost_ahead() == [f"topic {read.topic.name}, partition 1: offsets 10 to 11"]


def test_created_again_and_longer_than_before(read: Read) -> None:
    read.topic.create_again(partitions=2)
    for partition in (0, 1):
        read.topic.publish(range(20), partition=partition)
    why = "another topic has this name now"
    assert read.lost() == [("0: offsets 4 to 9", why, 6), ("1: offsets 4 to 9", why, 6)]
    assert len(read.lost_ahead()) == 2, "nor does the flow just continue"
    assert read.restore() == {"0": 0, "1": 0}


def test_created_again_with_fewer_partitions(read: Read) -> None:
    read.topic.create_again(partitions=1)
    assert [parts for _, _, parts in read.lost()] == [6, 6]
    assert read.restore() == {"0": 0}


def test_gone(read: Read) -> None:
    read.topic.remove()
    assert [(what, why) for what, why, _ in read.lost()] == [
        ("0: offsets 4 to 9", "it does not exist any more"),
        ("1: offsets 4 to 9", "it does not exist any more"),
    ]
    with pytest.raises(LostInputError, match="does not exist any more"):
        read.restore()


def test_partitions_that_were_added(read: Read) -> None:
    read.topic.add_partitions(3)
    read.topic.publish(range(5), partition=2)
    assert read.lost() == [] and read.lost_ahead() == []
    read.topic.drop(3, partition=2)
    assert read.lost() == [("2: offsets 0 to 2", "the topic has dropped these messages", 3)]
    assert read.lost_ahead() == [f"topic {read.topic.name}, partition 2: offsets 0 to 2"], "nobody has read them"
    assert read.restore() == {"0": 4, "1": 4, "2": 3}


def test_a_batch_that_was_planned_takes_what_is_left_of_it(read: Read) -> None:
    (read.live / "commits/1").unlink()
    read.topic.drop(6, partition=0)
    skip_input.skip_lost(GUARD, read.live, read.live, read.planned)
    assert (read.offsets(0), read.offsets(1)) == ({"0": 6, "1": 4}, {"0": 10, "1": 10})
    read.topic.drop(10, partition=0)
    skip_input.skip_lost(GUARD, read.live, read.live, read.planned)
    assert (read.offsets(0), read.offsets(1)) == ({"0": 10, "1": 4}, {"0": 10, "1": 10})


def test_brokers_that_do_not_answer(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.connectors.kafka.client.TIMEOUT_S", 0.3)
    elsewhere = [PlannedSource(format=one.format, address="127.0.0.1:1", settings=one.settings) for one in read.planned]
    with pytest.raises(NotDone, match="no Kafka broker can be reached"):
        check_sources(GUARD, {"0": read.positions[0]}, read.live, elsewhere, load_recorded(read.live))


# ------------------------------------------------------------------------------------------ Spark's own source


@pytest.fixture
def sparks(kafka_cluster: KafkaCluster, tmp_path: Path) -> Read:
    return Read(kafka_cluster, tmp_path, SPARKS)


def test_the_first_batch_begins_where_what_is_left_begins(sparks: Read) -> None:
    """Spark has written down where its first batch begins; if that is gone, it must be written anew."""
    for folder, numbers in (("commits", "01"), ("offsets", "1")):
        for number in numbers:
            (sparks.live / folder / number).unlink()
    sparks.topic.drop(2, partition=0)
    assert sparks.lost_ahead() == [f"topic {sparks.topic.name}, partition 0: offsets 0 to 1"]
    skip_input.skip_lost(GUARD, sparks.live, sparks.live, sparks.planned)
    begun = (sparks.live / "sources/0/0").read_bytes()
    assert begun == b"\x00v1\n" + json.dumps({sparks.topic.name: {"0": 2, "1": 0}}, separators=(",", ":")).encode()


def test_without_the_code_the_recorded_brokers_are_asked(sparks: Read) -> None:
    sparks.topic.drop(7, partition=0)
    recorded = load_recorded(sparks.live)
    assert [(one.address, set(one.ids)) for one in recorded] == [(sparks.topic.servers, {sparks.topic.name})]
    (problem,) = check_sources(GUARD, {"0": sparks.positions[0]}, sparks.live, recorded=recorded).problems
    assert problem.parts == 3
    (note,) = check_sources(GUARD, {"0": sparks.positions[0]}, sparks.live).notes
    assert "not guarded here" in note and "known to the flow's code only" in note


def test_a_pattern_and_several_topics(sparks: Read, kafka_cluster: KafkaCluster) -> None:
    other = Topic(kafka_cluster.servers, f"{sparks.topic.name}-more")
    other.create()
    other.publish(range(5))
    settings = encoded_subscription({"subscribepattern": f"{sparks.topic.name}.*"})
    planned = [PlannedSource(format=SPARKS, address=other.servers, settings=settings)]
    recorded = GUARD.recorded(planned, [])
    assert set(recorded[0].ids) == {sparks.topic.name, other.name}
    assert GUARD.recorded(planned, recorded) == recorded
    position = json.dumps({sparks.topic.name: {"0": 4, "1": 4}, other.name: {"0": 2}}).encode()
    other.drop(4)
    sparks.topic.remove()
    problems = check_sources(GUARD, {"0": position}, sparks.live, planned, recorded).problems
    assert [one.path for one in problems][-1] == f"topic {other.name}, partition 0: offsets 2 to 3"
    assert len(problems) == 3


def test_only_assigned_partitions_are_looked_at(sparks: Read) -> None:
    settings = encoded_subscription({"assign": json.dumps({sparks.topic.name: [0]})})
    planned = [PlannedSource(format=SPARKS, address=sparks.topic.servers, settings=settings)]
    position = json.dumps({sparks.topic.name: {"0": 4}}).encode()
    sparks.topic.drop(9, partition=1)
    assert check_sources(GUARD, {"0": position}, sparks.live, planned).problems == []
