"""Facts about a flow that starts, made up: no disk.

orders ── totals ── (sink table)
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cutline.model.checkpoint import ChannelCut, Manifest, OperatorCut
from cutline.model.cut import InFlight
from cutline.model.generation import GenerationRecord
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId
from cutline.protocol.history.evolution import Definition
from cutline.protocol.recovery.facts import (
    InputAhead,
    InputSince,
    LiveOperator,
    LogFacts,
    NeedContent,
    NeedEntries,
    NeedFacts,
    NeedFirstRemote,
    NeedInputAhead,
    NeedInputSince,
    NeedLive,
    NeedPublishedBefore,
    NeedRemote,
    NeedRemoteEpochs,
    NeedRemoteHistory,
    NeedSegments,
    NeedSinkLimits,
    PublishedBefore,
    RecoveryFacts,
    RemoteHistory,
    RemoteRecords,
    SinkFacts,
    StoredEpoch,
    StoredFacts,
    Trial,
)

FLOW = FlowName("payments")
ORDERS, TOTALS, TABLE = OperatorId("orders"), OperatorId("totals"), SinkId("table")
INPUTS: Mapping[OperatorId, tuple[OperatorId, ...]] = {ORDERS: (), TOTALS: (ORDERS,)}


def definition(
    inputs: Mapping[OperatorId, Sequence[OperatorId]] = INPUTS,
    *,
    is_per_operator: bool = False,
    schemas: Mapping[OperatorId, bytes] | None = None,
) -> Definition:
    return Definition(
        flow=FLOW,
        inputs=inputs,
        schemas={name: (schemas or {}).get(name, name.encode()) for name in inputs},
        sinks={TABLE: list(inputs)[-1]},
        is_per_operator=is_per_operator,
    )


def began(
    generation: int,
    *,
    restored: int | None = None,
    path: str = "resume",
    inputs: Mapping[OperatorId, Sequence[OperatorId]] = INPUTS,
    lineage: Sequence[tuple[int, int]] = ((1, 0),),
    is_per_operator: bool = False,
    **more: Any,
) -> GenerationRecord:
    """``lineage`` is the same for every channel."""
    return GenerationRecord(
        generation=Generation(generation),
        started_ms=0,
        path=path,
        restored_epoch=Epoch(restored) if restored is not None else None,
        reason="",
        lineage={name: [(Generation(one), Position(at)) for one, at in lineage] for name in inputs},
        spark_dirs=dict.fromkeys(inputs, Generation(generation)),
        inputs={name: list(read) for name, read in inputs.items()},
        schemas={name: base64.b64encode(name.encode()).decode() for name in inputs},
        is_per_operator=is_per_operator,
        **more,
    )


def manifest(
    epoch: int,
    *,
    generation: int = 1,
    previous: int | None = None,
    barrier: int | None = None,
    operators: Sequence[OperatorId] = (ORDERS, TOTALS),
    lineage: Sequence[tuple[int, int]] = ((1, 0),),
    evolved_from: int | None = None,
    published: int | None = None,
) -> Manifest:
    """Its barriers stand at ``10 * epoch`` unless it is said; ``published``: how far the table was by then."""
    at = Position(10 * epoch if barrier is None else barrier)
    read = {name: {one: at for one in INPUTS.get(name, ()) if one in operators} for name in operators}
    return Manifest(
        flow=FLOW,
        epoch=Epoch(epoch),
        generation=Generation(generation),
        previous_epoch=Epoch(epoch - 1 if previous is None else previous),
        started_ms=0,
        completed_ms=1,
        published=None if published is None else {TABLE: Epoch(published)},
        carried_from=Epoch(evolved_from) if evolved_from is not None else None,
        operators={
            name: OperatorCut(
                generation=Generation(generation),
                batch=BatchId(epoch),
                after_batch=BatchId(epoch - 1),
                barrier=at,
                positions=read[name],
                mode="aligned",
                watermark_ms=0,
                record_sha256="",
                files=0,
                size_bytes=0,
                new_bytes=0,
                start_delay_ms=0,
                alignment_ms=0,
                sync_ms=0,
                async_ms=0,
                total_ms=0,
                subtasks=[],
            )
            for name in operators
        },
        channels={
            name: ChannelCut(
                barrier=at,
                lineage=[(Generation(one), Position(first)) for one, first in lineage],
                in_flight={
                    consumer: InFlight(first=at, end=at, entries=0, rows=0, size_bytes=0)
                    for consumer in operators
                    if name in read[consumer]
                },
            )
            for name in operators
        },
    )


def stored(*epochs: Manifest | StoredEpoch, generations: Sequence[GenerationRecord] | None = None) -> StoredFacts:
    found = (one if isinstance(one, StoredEpoch) else StoredEpoch(epoch=one.epoch, manifest=one) for one in epochs)
    return StoredFacts(generations=tuple((began(1),) if generations is None else generations), epochs=tuple(found))


def unreadable(epoch: int, *recorded: OperatorId) -> StoredEpoch:
    return StoredEpoch(
        epoch=Epoch(epoch), manifest=None, problem="checksum does not match", recorded=frozenset(recorded)
    )


def sink(published: int = 0, *, seen: int | None = None, **more: Any) -> SinkFacts:
    """The table, behind ``totals``."""
    values: dict[str, Any] = {"highest": Epoch(published), "operator": TOTALS, **more}
    return SinkFacts(sink=TABLE, published=Epoch(published), seen=Epoch(seen) if seen is not None else None, **values)


def known(found: StoredFacts, **more: Any) -> RecoveryFacts:
    """What is known from the start."""
    return RecoveryFacts(**{"definition": definition(), "stored": found, **more})


def healthy(found: StoredFacts, names: Sequence[OperatorId]) -> dict[OperatorId, LiveOperator]:
    """Logs that end well behind the newest barrier, and directories that fit."""
    end = Position(max((10 * one.epoch + 5 for one in found.epochs), default=5))
    return {
        name: LiveOperator(
            log=LogFacts(start=Position(0), end=end, last_batch=BatchId(100), positions={}), resumes_at={}
        )
        for name in names
    }


class World:
    """Answers what ``choose`` asks for; everything is well unless it is said otherwise."""

    def __init__(self, **answers: Any) -> None:
        """``live``: operators that are not healthy; ``remote``: what the remote tier holds (None: it is away)."""
        self.live: Mapping[OperatorId, LiveOperator] = answers.get("live", {})
        self.segments: Mapping[OperatorId, tuple[str, ...]] = answers.get("segments", {})
        self.remote: RemoteRecords = answers.get("remote") or RemoteRecords(problem="no answer")
        self.remote_history: RemoteHistory = answers.get("remote_history") or RemoteHistory(problem=self.remote.problem)
        self.published_before: Mapping[int, PublishedBefore] = answers.get("published_before", {})
        self.contents: Mapping[int, str] = answers.get("contents", {})
        self.input_since: Mapping[int, InputSince] = answers.get("input_since", {})
        self.input_ahead: InputAhead = answers.get("input_ahead", InputAhead())
        self.has_entries: bool = answers.get("has_entries", False)
        self.highest = Epoch(answers.get("highest", 0))
        self.oldest_rewind = Epoch(answers.get("oldest_rewind", 0))
        self.asked: list[NeedFacts] = []

    def answer(self, facts: RecoveryFacts, need: NeedFacts) -> RecoveryFacts:
        self.asked.append(need)
        match need:
            case NeedSinkLimits():
                asked = (replace(one, highest=self.highest, oldest_rewind=self.oldest_rewind) for one in facts.sinks)
                return replace(facts, sinks=tuple(asked))
            case NeedRemoteHistory():
                return replace(facts, remote_history=self.remote_history)
            case NeedFirstRemote():
                return replace(facts, first_remote=self.remote)
            case NeedRemote():
                return replace(facts, remote=self.remote)
            case NeedRemoteEpochs():
                return replace(facts, remote_epochs=self.remote.epochs)
            case NeedPublishedBefore(epoch=epoch):
                noted = self.published_before.get(epoch, PublishedBefore())
                return replace(facts, published_before={**facts.published_before, epoch: noted})
            case NeedContent(manifest=wanted):
                problem = self.contents.get(wanted.epoch, "")
                return replace(facts, contents={**facts.contents, wanted.epoch: problem})
            case NeedLive(complete=complete):
                return replace(facts, live={**healthy(facts.stored, list(complete)), **self.live})
            case NeedSegments():
                return replace(facts, missing_segments=self.segments)
            case NeedInputSince(manifest=wanted, operators=operators, tier=tier):
                found = self.input_since.get(wanted.epoch) or InputSince(epoch=wanted.epoch, operators=operators)
                return replace(facts, input_since=(*facts.input_since, replace(found, operators=operators, tier=tier)))
            case NeedInputAhead():
                return replace(facts, input_ahead=self.input_ahead)
            case NeedEntries():
                return replace(facts, has_entries=self.has_entries)


def failed(path: str, tier: str, epoch: int, operator: OperatorId | None = None) -> Trial:
    return Trial(path=path, tier=tier, epoch=Epoch(epoch), problem="a blob is missing", operator=operator)
