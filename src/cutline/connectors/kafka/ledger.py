"""A Kafka sink's ledger: messages in a compacted topic, written in the same transaction as the epoch's rows.

``<flow>/<sink>`` says who may publish, and up to where was published. ``<flow>/<sink>@<epoch>`` says, for each of the
newest epochs, what was published and where every partition of the target ended then: its *cut*. An epoch's own rows lie
between the cut before and its own cut, in every partition. Older cuts get a tombstone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from cutline.base import records
from cutline.connectors.kafka.client import (
    Record,
    administrator,
    bounds_of,
    consumer,
    ends_of,
    finished_bounds,
    partitions_of,
    read_range,
)
from cutline.errors import NotDone
from cutline.model.ids import NO_EPOCH, Count, Epoch, FlowName, SinkId
from cutline.model.validation import Problem, of_numbers
from cutline.protocol.publish.sink_ledger import EPOCHS_REMEMBERED, SinkLedger

LEDGER_TOPIC = "cutline-ledger"
#: What ``ledger_key`` and ``cut_key`` make.
_KEY = re.compile(rb"[^/@]+/[^/@]+(@[0-9]+)?")
LEDGER_KIND, CUT_KIND = "kafka-ledger", "kafka-cut"


class TopicLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Who may publish, and up to where was published; the newest message of its key counts."""

    flow: FlowName
    sink: SinkId
    topic: str
    #: The current writer; random for each start of the sink.
    claim: str
    schema_ipc: bytes
    epoch: Epoch = NO_EPOCH
    #: Epochs and digests as earlier versions recorded them; later epochs have a cut each.
    published: dict[str, str] = {}
    #: Grows with each message: all of them are in one partition, unless partitions were added to the ledger topic.
    number: Count = 0
    #: Identifies the target topic; empty: not known.
    topic_id: str = ""
    #: The highest epoch whose cut is no longer known.
    forgotten: Epoch = NO_EPOCH

    def problems(self) -> Iterator[Problem]:
        """Epochs that are no numbers."""
        yield from of_numbers("published", self.published)


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One published epoch."""

    epoch: Epoch
    #: Identifies its content.
    digest: str
    rows: Count
    topic_id: str = ""
    #: Per partition of the target, the end of this epoch's rows: an offset.
    ends: dict[str, Count] = {}

    def problems(self) -> Iterator[Problem]:
        """Partitions that are no numbers."""
        yield from of_numbers("ends", self.ends)

    def lost_in(self, ends: Mapping[int, int]) -> str:
        """What is missing of a target that ends here now; empty: nothing. Its brokers had acknowledged all of it."""
        return ", ".join(
            f"partition {name}: offsets {ends.get(int(name), 0)} to {end - 1}"
            for name, end in self.ends.items()
            if ends.get(int(name), 0) < end
        )


class Message(NamedTuple):
    """One message of the ledger; without a value: it forgets its key."""

    key: bytes
    value: bytes | None


class Held(NamedTuple):
    """The ledger of one sink, as it was read or written last."""

    ledger: TopicLedger
    #: The newest epochs, ascending.
    cuts: dict[Epoch, Cut]

    @property
    def forgotten(self) -> Epoch:
        """The highest epoch whose cut is unknown; earlier versions recorded none."""
        oldest = min(self.cuts, default=None)
        unrecorded = self.ledger.epoch if oldest is None else NO_EPOCH
        older = max((int(one) for one in self.ledger.published if oldest is None or int(one) < oldest), default=0)
        return Epoch(max(self.ledger.forgotten, unrecorded, older))

    def sink_ledger(self) -> SinkLedger:
        """As every sink shows its ledger."""
        digests = {Epoch(int(epoch)): digest for epoch, digest in self.ledger.published.items()}
        digests |= {epoch: cut.digest for epoch, cut in self.cuts.items()}
        return SinkLedger(
            flow=self.ledger.flow,
            sink=self.ledger.sink,
            claim=self.ledger.claim,
            published=self.ledger.epoch,
            digests=digests,
        )

    def claimed(self, claim: str, topic_id: str) -> Held:
        ledger = msgspec.structs.replace(
            self.ledger, claim=claim, topic_id=topic_id or self.ledger.topic_id, number=self.ledger.number + 1
        )
        return self._replace(ledger=ledger)

    def with_cut(self, cut: Cut) -> Held:
        """One more epoch; the oldest are forgotten."""
        cuts = dict(list({**self.cuts, cut.epoch: cut}.items())[-EPOCHS_REMEMBERED:])
        dropped = [epoch for epoch in self.cuts if epoch not in cuts]
        room = EPOCHS_REMEMBERED - len(cuts)
        ledger = msgspec.structs.replace(
            self.ledger,
            epoch=cut.epoch,
            published=dict(list(self.ledger.published.items())[-room:]) if room else {},
            number=self.ledger.number + 1,
            forgotten=max([self.forgotten, *dropped]),
        )
        return Held(ledger, cuts)

    def messages_after(self, before: Held) -> list[Message]:
        """What the ledger topic must get, so that it says this instead of ``before``."""
        own = ledger_key(self.ledger.flow, self.ledger.sink)
        new = [
            Message(cut_key(own, epoch), records.encode(CUT_KIND, cut))
            for epoch, cut in self.cuts.items()
            if epoch not in before.cuts
        ]
        gone = [Message(cut_key(own, epoch), None) for epoch in before.cuts if epoch not in self.cuts]
        return [Message(own, records.encode(LEDGER_KIND, self.ledger)), *new, *gone]


def ledger_key(flow: str, sink: str) -> bytes:
    """Neither name contains a slash or an @."""
    return f"{flow}/{sink}".encode()


def cut_key(own: bytes, epoch: Epoch) -> bytes:
    return own + b"@%d" % epoch


class LedgerTopic(NamedTuple):
    """Where the ledgers of many sinks are."""

    servers: str
    name: str
    #: An administrator that can be used again; None: one is made.
    admin: Any = None

    def load(self, flow: str, sink: str, *, timeout_s: float | None) -> Held | None:
        """One sink's ledger. ``timeout_s``: the wait for unfinished transactions of others; None: what is visible."""
        own = ledger_key(flow, sink)
        found = self._newest(own, timeout_s=timeout_s)
        if found is None:
            raise NotDone(
                f"there is no topic {self.name}, so it is unknown what the sink has published",
                next_step="find out who deleted it; created again, it counts as a lost ledger",
                servers=self.servers,
                flow=flow,
                sink=sink,
            )
        return self._held(own, found)

    def load_all(self, *, timeout_s: float) -> list[Held]:
        """The ledgers of all sinks. Messages that no sink can have written are passed over."""
        found = self._newest(b"", timeout_s=timeout_s) or {}
        owners = sorted({key.partition(b"@")[0] for key in found if _KEY.fullmatch(key)})
        return [held for held in (self._held(own, found) for own in owners) if held is not None]

    def _newest(self, own: bytes, *, timeout_s: float | None) -> dict[bytes, list[Record]] | None:
        """Per key, its newest message in each partition that has one. ``own``: only keys of this sink; empty: all.

        None: the topic does not exist.
        """
        found: dict[bytes, list[Record]] = {}
        ends: Mapping[int, int] = {}
        if timeout_s is not None:
            ends = ends_of(self.admin or administrator(self.servers), self.servers, self.name)
        with consumer(self.servers) as client:
            partitions = partitions_of(client, self.servers, self.name)
            if partitions is None:
                return None
            for partition in partitions:
                if timeout_s is None:
                    bounds = bounds_of(client, self.servers, self.name, partition)
                else:
                    bounds = finished_bounds(
                        client, self.servers, self.name, partition, timeout_s=timeout_s, end=ends.get(partition)
                    )
                newest: dict[bytes, Record] = {}
                for page in read_range(client, self.servers, self.name, partition, bounds):
                    newest |= {one.key: one for one in page if one.key and _is_of(one.key, own)}
                for key, record in newest.items():
                    found.setdefault(key, []).append(record)
        return found

    def _held(self, own: bytes, found: Mapping[bytes, list[Record]]) -> Held | None:
        ledgers = [
            (one.timestamp_ms, self._decoded(own, one.value))
            for one in found.get(own, ())
            if one.value is not None  # deleted by a tombstone: the ledger is gone
        ]
        if not ledgers:
            return None
        # Messages of earlier versions have no number.
        ledger = max(ledgers, key=lambda one: (one[1].number, one[1].epoch, one[0]))[1]
        cuts = [
            self._decoded_cut(key, one.value)
            for key, several in found.items()
            if key.startswith(own + b"@") and _KEY.fullmatch(key)
            for one in several
            if one.value is not None
        ]
        known = sorted((cut for cut in cuts if ledger.forgotten < cut.epoch <= ledger.epoch), key=lambda cut: cut.epoch)
        return Held(ledger, {cut.epoch: cut for cut in known})

    def _decoded(self, own: bytes, value: bytes) -> TopicLedger:
        """A copy under another key would let one sink publish, or not publish, by the ledger of another."""
        ledger = records.decode(LEDGER_KIND, value, TopicLedger, path=self.name)
        records.check_identity(
            LEDGER_KIND, f"{ledger.flow}/{ledger.sink}", own.decode(errors="replace"), path=self.name
        )
        return ledger

    def _decoded_cut(self, key: bytes, value: bytes) -> Cut:
        cut = records.decode(CUT_KIND, value, Cut, path=self.name)
        records.check_identity(
            CUT_KIND, str(cut.epoch), key.partition(b"@")[2].decode(errors="replace"), path=self.name
        )
        return cut


def _is_of(key: bytes, own: bytes) -> bool:
    return not own or key == own or key.startswith(own + b"@")
