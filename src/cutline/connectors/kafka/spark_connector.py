"""The replay guard of Spark's own Kafka source (``format("kafka")``, a jar that users bring).

Its offsets say ``{"orders":{"0":17}}``: no brokers, and topics by name only. The brokers are those that the operator's
options name, or, if the code is not known, those that the query's directory records, which also has the topics' ids.
Client settings and secrets come from the file that CUTLINE_KAFKA_CONFIG names, never from the options: those are
settings of Java's client, and Cutline stores none of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cutline.base import durable
from cutline.connectors.kafka.client import CONFIG_FILE, all_topics, consumer, import_kafka, topic_ids
from cutline.connectors.kafka.positions import (
    TopicNow,
    gone_topic,
    lost_of_topic,
    moved_in_topic,
    moved_plan,
    topic_bounds,
)
from cutline.connectors.kafka.retention import progress_of
from cutline.errors import ConfigError, LostInputError
from cutline.model.plan import PlannedSource, RecordedSource
from cutline.ports.inspection import FileProblem, SourceProgress, SourceReport
from cutline.ports.source_guard import SourceKind, Today

FORMAT = "kafka"
ADDRESS_OPTION = "kafka.bootstrap.servers"
#: By topic, by partition: the next offset to read.
Offsets = dict[str, dict[str, int]]

_OFFSETS = msgspec.json.Decoder(Offsets)
#: In ``sources/<number>/0``, Spark's record of where reading began; a byte 0 may come first.
_BEGINNING = re.compile(rb"\x00?v1\n(.+)", re.DOTALL)
_PLAIN = ("", "PLAINTEXT")


class Subscription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options that the guard must know. None of them is a secret."""

    topics: list[str] = []
    #: A regular expression of Java's.
    pattern: str = ""
    #: By topic: the partitions that are read.
    assigned: dict[str, list[int]] = {}
    fails_on_loss: bool = True
    #: Whether the brokers want to know who asks.
    is_secured: bool = False

    def may_read(self, topics: Sequence[str]) -> bool:
        return all(topic in self.topics or topic in self.assigned or self._matches(topic) for topic in topics)

    def _matches(self, topic: str) -> bool:
        try:
            return bool(self.pattern) and re.fullmatch(self.pattern, topic) is not None
        except re.error:  # Java's regular expressions know more
            return True

    def partitions(self, topic: str, there: TopicNow) -> TopicNow:
        """Those of a topic that are read; others may lose what they like."""
        if topic not in self.assigned:
            return there
        own = {str(number) for number in self.assigned[topic]}
        return TopicNow({name: bounds for name, bounds in there.bounds.items() if name in own}, there.identity)


def subscription_of(options: Mapping[str, str]) -> Subscription:
    """``options``: with lower-case names. Spark itself has checked them."""
    try:
        assigned = msgspec.json.decode(options.get("assign") or "{}", type=dict[str, list[int]])
    except msgspec.MsgspecError:
        assigned = {}
    return Subscription(
        topics=[one.strip() for one in options.get("subscribe", "").split(",") if one.strip()],
        pattern=options.get("subscribepattern", ""),
        assigned=assigned,
        fails_on_loss=options.get("failondataloss", "true").lower() != "false",
        is_secured=options.get("kafka.security.protocol", "").upper() not in _PLAIN,
    )


def encoded_subscription(options: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(subscription_of(options))


def _subscription(settings: bytes | str | None) -> Subscription:
    try:
        return msgspec.json.decode(settings or b"{}", type=Subscription)
    except msgspec.MsgspecError:
        return Subscription()


# ------------------------------------------------------------------------------------------------- positions


def parse_position(position: bytes | None) -> Offsets | None:
    """None: the offset of another source, or of none."""
    try:
        found = None if position is None else _OFFSETS.decode(position)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if found is None or not all(name.isdigit() for partitions in found.values() for name in partitions):
        return None
    return found


def begun_at(folder: Path) -> Offsets | None:
    """Where reading began, as Spark has written it down."""
    try:
        found = _BEGINNING.fullmatch((folder / "0").read_bytes())
    except OSError:
        return None
    return None if found is None else parse_position(found.group(1))


def _begin_at(folder: Path, position: bytes) -> None:
    # The checksum first: a checksum that contradicts its file stops Hadoop, a missing one does not.
    (folder / ".0.crc").unlink(missing_ok=True)
    durable.replace(folder / "0", b"\x00v1\n" + position)


def _is_mine(position: bytes | None, folder: Path) -> bool:
    return (begun_at(folder) if position is None else parse_position(position)) is not None


def _beginning(position: bytes, folder: Path) -> bytes:
    found = begun_at(folder)
    return position if found is None else msgspec.json.encode(found)


# ------------------------------------------------------------------------------------------------- which brokers


class _Source(NamedTuple):
    """The source that offsets belong to."""

    servers: str
    subscription: Subscription
    #: By topic, when the offsets were written; unknown ones are left out.
    ids: Mapping[str, str]


def _source_of(offsets: Offsets, today: Today) -> _Source | str:
    """Or why it is not guarded."""
    topics = list(offsets)
    recorded = [one for one in today.recorded if one.format == FORMAT]
    ids = {topic: one.ids[topic] for one in reversed(recorded) for topic in topics if topic in one.ids}
    if today.planned:
        planned = [one for one in today.planned if one.format == FORMAT]
        known = [(one.address, _subscription(one.settings)) for one in planned]
        if not known:
            return "is not guarded: its offsets look like Kafka's, but the operator reads no Kafka"
    else:
        known = [(one.address, _subscription(one.settings)) for one in recorded]
        if not known:
            return "is not guarded here: the brokers that it reads from are known to the flow's code only"
    own = [(servers, one) for servers, one in known if one.may_read(topics)] or known
    if len({servers for servers, _ in own}) > 1:
        return "is not guarded: the operator reads topics of these names from several clusters"
    servers, subscription = own[0]
    why = _why_not_asked(subscription)
    return f"is not guarded: {why}" if why else _Source(servers, subscription, ids)


def _why_not_asked(subscription: Subscription) -> str:
    try:
        import_kafka()
    except ConfigError:
        return "its brokers can be asked only with the package confluent-kafka (pip install 'cutline[kafka]')"
    if subscription.is_secured and not os.environ.get(CONFIG_FILE):
        return f"its brokers ask for credentials: put librdkafka's settings into a file that {CONFIG_FILE} names"
    return ""


def _why_not(source: PlannedSource) -> str:
    return _why_not_asked(_subscription(source.settings))


def _warning(source: PlannedSource) -> str:
    if _subscription(source.settings).fails_on_loss:
        return ""
    return "failOnDataLoss is false: while it runs, Spark skips lost input silently"


def _look(source: _Source, topics: Sequence[str]) -> dict[str, TopicNow | None]:
    """What the topics hold now; None: a topic is gone."""
    # Spark reads to the end of the topic, or to that of the finished transactions, as its options say.
    with consumer(source.servers, isolation="read_uncommitted") as client:
        there = {topic: topic_bounds(client, source.servers, topic) for topic in topics}
    asked = [topic for topic in topics if topic in source.ids and there[topic] is not None]
    ids = topic_ids(source.servers, asked) if asked else {}
    found: dict[str, TopicNow | None] = {}
    for topic, bounds in there.items():
        now = None if bounds is None else TopicNow(bounds, ids.get(topic, ""))
        found[topic] = None if now is None else source.subscription.partitions(topic, now)
    return found


# ------------------------------------------------------------------------------------------------- the guard


def _check(position: bytes | None, folder: Path, today: Today) -> SourceReport:
    start = begun_at(folder) if position is None else parse_position(position)
    if not start:
        return SourceReport()
    source = _source_of(start, today)
    if isinstance(source, str):
        return SourceReport(notes=[source])
    end, now = parse_position(today.newest), _look(source, list(start))
    problems: list[FileProblem] = []
    for topic, offsets in start.items():
        read = end.get(topic) if end is not None else None
        problems += lost_of_topic(topic, now[topic], source.ids.get(topic, ""), offsets, end=read)
    return SourceReport(problems)


def _moved(positions: Sequence[bytes], today: Today) -> list[bytes]:
    start, *planned = [one for one in map(parse_position, positions) if one is not None]
    source = _source_of(start, today) if start else ""
    if isinstance(source, str):
        return list(positions)
    now = {topic: there for topic, there in _look(source, list(start)).items() if there is not None}
    if not now:
        raise gone_topic(", ".join(start), source.servers)
    ids = source.ids
    here = {topic: moved_in_topic(there, ids.get(topic, ""), start[topic]) for topic, there in now.items()}
    result = [here]
    for one in planned:
        ends = {
            topic: moved_plan(there, ids.get(topic, ""), here[topic], one.get(topic, {}))
            for topic, there in now.items()
        }
        # Topics that the batch was the first to read: Spark begins them by itself.
        result.append({topic: offsets for topic, offsets in one.items() if topic not in start} | ends)
    if any(not offsets for offsets in here.values()):
        raise LostInputError(
            "none of the partitions that the operator reads exists any more",
            next_step="correct what it subscribes to, or create the topic again, then restart",
            servers=source.servers,
        )
    return [msgspec.json.encode(one) for one in result]


def _progress(position: bytes, stored: Sequence[bytes], today: Today) -> SourceProgress | None:
    newest = parse_position(position)
    source = _source_of(newest, today) if newest else ""
    if not newest or isinstance(source, str):
        return None
    return progress_of(source.servers, newest, [parse_position(one) or {} for one in stored])


def _recorded(source: PlannedSource) -> RecordedSource:
    subscription = _subscription(source.settings)
    topics = [*subscription.topics, *subscription.assigned]
    if subscription.pattern:
        topics = [topic for topic in all_topics(source.address) if subscription.may_read([topic])]
    settings = (source.settings or b"{}").decode()
    ids = topic_ids(source.address, topics)
    return RecordedSource(format=FORMAT, address=source.address, settings=settings, ids=ids)


SPARK_KAFKA = SourceKind(
    "Spark's Kafka",
    _is_mine,
    _check,
    _moved,
    _beginning,
    format=FORMAT,
    begin_at=_begin_at,
    recorded=_recorded,
    why_not=_why_not,
    warning=_warning,
    progress=_progress,
)
