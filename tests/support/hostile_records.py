"""Records as an attacker writes them: valid ones, changed in one place or several, with a checksum that fits.

Whatever the bytes, decoding them ends in one of two ways: a CutlineError, or a record of which every path stays inside
the flow's folder.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cutline.base import records
from cutline.channels import entry_files as codec
from cutline.channels.in_flight import entry_paths
from cutline.connectors.foreach.sink import Done, FunctionRecord
from cutline.connectors.iceberg.ledger import TableLedger
from cutline.connectors.kafka.ledger import Cut, TopicLedger
from cutline.connectors.nats.ledger import StreamLedger
from cutline.connectors.parquet.sink import FolderRecord
from cutline.errors import CutlineError
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.generation import GenerationRecord
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.model.remote import EarlyUploadRecord, SinkProgress
from cutline.model.restore_request import RestoreRequest
from cutline.savepoints.store import Savepoint
from cutline.spark_dir.offsets import parse_offsets
from tests.support.stored_records import EXAMPLES, KINDS, SOURCE, TABLE, TOTALS

ROOT = Path("/storage")
LAYOUT = Layout(ROOT, "flow")

FLOW = FlowName("payments")
CARD = Savepoint(
    name="good",
    flow=FLOW,
    epoch=Epoch(7),
    generation=Generation(2),
    created_ms=1_704_067_200_000,
    is_drained=True,
    batches={SOURCE: BatchId(3), TOTALS: BatchId(41)},
    files=7,
    size_bytes=4_096,
    note="before the change",
)
#: Per name: the kind in the stored form, the type that is decoded, a valid record.
SEEDS: dict[str, tuple[str, Any, Any]] = {
    **{name: (kind, Entry if kind == "entry" else type_, EXAMPLES[name]) for name, (kind, type_) in KINDS.items()},
    "operator-with-content": (
        "operator",
        OperatorRecord,
        msgspec.structs.replace(
            EXAMPLES["operator"],
            shared=[
                SnapshotFile(path="offsets/41", sha256=hashlib.sha256(b"v1").hexdigest(), size_bytes=2, content=b"v1")
            ],
        ),
    ),
    "entry-with-plan": (
        "entry",
        Entry,
        msgspec.structs.replace(EXAMPLES["entry-data"], plan={"offsets/41": b"v1\n{}\n-", "sources/0/3": b"v1\n{}"}),
    ),
    "savepoint": ("savepoint", Savepoint, CARD),
    "published": ("published", SinkProgress, SinkProgress(everywhere=Epoch(6), seen={TABLE: Epoch(7)})),
    "restore": ("restore", RestoreRequest, RestoreRequest(to="good", rename={"a": "b"})),
    "parquet-ledger": (
        "parquet-sink-ledger",
        FolderRecord,
        FolderRecord(flow=FLOW, operator=TOTALS, sink=TABLE, partition_by=("day",), schema_ipc=b"schema", claim="c"),
    ),
    "foreach-ledger": (
        "foreach-sink-ledger",
        FunctionRecord,
        FunctionRecord(flow=FLOW, sink=TABLE, schema_ipc=b"schema", done=(Done(epoch=Epoch(3), digest="d"),)),
    ),
    "iceberg-ledger": (
        "iceberg-sink-ledger",
        TableLedger,
        TableLedger(flow=FLOW, sink=SinkId("out"), published=Epoch(3), digest="d", claim="c h", snapshot=7, sequence=4),
    ),
    "stream-ledger": (
        "stream-ledger",
        StreamLedger,
        StreamLedger(flow=FLOW, sink=SinkId("out"), subject="s", claim="c", schema_ipc=b"schema", published={"3": "d"}),
    ),
    "topic-ledger": (
        "topic-ledger",
        TopicLedger,
        TopicLedger(flow=FLOW, sink=SinkId("out"), topic="t", claim="c", schema_ipc=b"schema", published={"3": "d"}),
    ),
    "kafka-cut": ("kafka-cut", Cut, Cut(epoch=Epoch(3), digest="d", rows=2, topic_id="i", ends={"0": 7})),
}


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: list[Any] = [
    *("", ".", "..", "/", "../x", "/etc/passwd", "a/../../b", "a/..", "a//b", "a/", "./a", "~/x", "C:\\x", "..\\x"),
    *("a\\..\\..\\b", "a\x00b", "a\nb", "a\x1b[2Jb", "a\u202eb", "\u200b", "．．/x", "․․/x", "a／..／b", "a%2f..%2fb"),
    *("x" * 256, "x" * 5_000, "é" * 200, "a/" * 600 + "b", "manifest", "0" * 64, "A" * 64, "g" * 64, "0" * 63 + "\n"),
    *(-1, -2, 0, 1, 2**31, 2**53, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 1.5, 1e308, -0.0),
    *(None, True, False, [], {}, [None], {"": None}, {"..": 1}, _nested(20), _nested(100), "bm90IGJhc2U2NA", "===="),
]


def stored(kind: str, body: bytes) -> bytes:
    """The stored form of a body, valid or not, with a checksum that fits."""
    digest = hashlib.sha256(body).hexdigest().encode()
    return b'{"format":1,"kind":"%b","sha256":"%b","body":%b}' % (kind.encode(), digest, body)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a tree, with every key in it."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _replace(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = copy.deepcopy(rng.choice(HOSTILE))


def _remove(_: random.Random, container: Any, key: Any) -> None:
    del container[key]


def _twice(_: random.Random, container: Any, key: Any) -> None:
    if isinstance(container, list):
        container.append(copy.deepcopy(container[key]))


def _rename(rng: random.Random, container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container[str(rng.choice(HOSTILE))[:6_000]] = container.pop(key)


def _graft(rng: random.Random, container: Any, key: Any) -> None:
    """Puts a hostile piece into a text or a number that is otherwise right."""
    value = container[key]
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        container[key] = value[:at] + str(rng.choice(HOSTILE))[:300] + value[at:]
    elif isinstance(value, int):
        container[key] = value + rng.choice([-(2**40), -100, -1, 1, 100, 2**40, 2**61])


_CHANGES: list[Callable[[random.Random, Any, Any], None]] = [_replace, _replace, _graft, _rename, _twice, _remove]


def changed_json(rng: random.Random, body: bytes) -> bytes:
    """The body with one to three places changed."""
    tree = msgspec.json.decode(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(tree))
        if places:
            rng.choice(_CHANGES)(rng, *rng.choice(places))
    return msgspec.json.encode(tree)


_PIECES = [b"../", b"/", b"\\u0000", b'"', b"[", b"{", b"-", b"9" * 30, b"\xff", b"\\ud800"]


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them flipped, removed, repeated or made up."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, size = rng.randrange(len(changed) + 1), rng.choice([1, 1, 2, 8, 64])
        match rng.randrange(5):
            case 0:
                changed[at : at + size] = rng.randbytes(len(changed[at : at + size]))
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at:at] = changed[at : at + size]
            case 3:
                changed[at:at] = rng.choice(
                    [b"../", b"/", b"\\u0000", b'"', b"[", b"{", b"-", b"9" * 30, b"\xff", b"\\ud800"]
                )
            case _:
                del changed[at:]
    return bytes(changed)


def hostile(rng: random.Random, name: str) -> bytes:
    """One hostile form of a record."""
    kind, _, example = SEEDS[name]
    body = _BODIES[name]
    chance = rng.random()
    if chance < 0.7:
        return stored(kind, changed_json(rng, body))
    if chance < 0.9:
        return stored(kind, changed_bytes(rng, body))
    return changed_bytes(rng, records.encode(kind, example))


_BODIES = {name: msgspec.json.encode(example) for name, (_, _, example) in SEEDS.items()}


def judge(name: str, data: bytes) -> bool:
    """Whether the bytes were accepted. Fails on any other end than those two."""
    kind, type_, _ = SEEDS[name]
    try:
        value = records.decode(kind, data, type_, path=f"{name}.json", flow="flow")
    except CutlineError as refused:
        text = str(refused)
        assert len(text) < 3_000 and text.replace("\n", "").isprintable(), text[:500]
        return False
    for path in itertools.islice(_paths_of(value), 10_000):
        assert os.path.normpath(path) == str(path) and ROOT in path.parents and "\0" not in str(path), path
    again = records.encode(kind, value)
    assert records.decode(kind, again, type_) == value
    return True


def _paths_of(value: Any) -> Iterator[Path]:
    """Every path that Cutline would build from the record."""
    match value:
        case Manifest():
            for name, cut in value.operators.items():
                yield from (LAYOUT.record(value.epoch, name, cut.generation), LAYOUT.pin(value.epoch, name))
            yield from itertools.islice(entry_paths(value, LAYOUT), 50)
        case OperatorRecord():
            folder = LAYOUT.spark_checkpoint_dir(value.operator, value.generation)
            for file in value.files():
                yield from (folder / file.path, LAYOUT.blob(file.sha256))
        case GenerationRecord():
            yield LAYOUT.generation(value.generation)
            yield from LAYOUT.live_dirs(value.spark_dirs).values()
            yield from map(LAYOUT.channel, (*value.lineage, *value.left, *value.begun, *value.inputs))
        case DataEntry():
            yield codec.entry_path(LAYOUT.channel(SOURCE), value.generation, value.seq)
            yield from (codec.data_dir(LAYOUT.channel(SOURCE)) / segment.name for segment in value.segments)
            yield from (LAYOUT.spark_checkpoint_dir(SOURCE, value.generation) / name for name in value.plan)
            yield from map(LAYOUT.channel, value.positions)
        case BarrierEntry():
            yield codec.entry_path(LAYOUT.channel(SOURCE), value.generation, value.seq)
            yield from map(LAYOUT.channel, value.positions)
        case EarlyUploadRecord():
            yield from (LAYOUT.root / name for name in value.names)
        case Savepoint():
            yield from (LAYOUT.savepoint(value.name), LAYOUT.manifest(value.epoch), ROOT / value.flow)
            yield from map(LAYOUT.channel, value.batches)
        case SinkProgress():
            yield from (LAYOUT.channel(OperatorId(sink)) for sink in value.seen)
        case _:
            return


def judge_offsets(data: bytes) -> bool:
    """The same for Spark's own record of positions, which snapshots and plans contain."""
    try:
        positions = parse_offsets(data, "offsets/3", BatchId(3)).positions
    except CutlineError:
        return False
    for name in positions:
        assert (ROOT / name).parent == ROOT and os.path.normpath(ROOT / name) == str(ROOT / name), name
    return True
