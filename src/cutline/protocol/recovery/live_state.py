"""Whether a flow can continue with its logs and directories: whether they are whole and agree with one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutline.model.checkpoint import Manifest
from cutline.model.ids import START, OperatorId, Position
from cutline.protocol.history.evolution import Definition
from cutline.protocol.history.known_checkpoints import newest_of
from cutline.protocol.recovery.facts import LiveOperator, LogFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDamage:
    """What is wrong with the live state."""

    #: Whether every log is whole and holds all that will be read.
    are_logs_whole: bool
    #: Operators whose directory cannot be used.
    damaged: frozenset[OperatorId]
    problems: tuple[str, ...]


def unread_from(live: Mapping[OperatorId, LiveOperator], definition: Definition) -> dict[OperatorId, Position]:
    """Per channel that has consumers: the first entry that one of them will still read.

    A batch that is in its log but was not committed by Spark runs again, and reads its rows again. A consumer whose
    directory is damaged is restored, and what it reads is checked then.
    """
    consumers = definition.consumers()
    positions = {
        name: [
            live[consumer].resumes_at.get(name, START)
            for consumer in consumers[name]
            if consumer in live and live[consumer].log is not None and not live[consumer].damage
        ]
        for name, one in live.items()
        if one.log is not None
    }
    return {name: min(found) for name, found in positions.items() if found}


def damage_of(
    live: Mapping[OperatorId, LiveOperator],
    manifests: Sequence[Manifest],
    first: Mapping[OperatorId, Position],
    missing_segments: Mapping[OperatorId, tuple[str, ...]],
) -> LiveDamage:
    """``first``: see ``unread_from``; ``missing_segments``: per channel, of what will be read from there on."""
    problems: list[str] = []
    for name, one in live.items():
        problems += [f"{name}: {one.log_problem}"] if one.log is None else [f"{name}: {text}" for text in one.damage]
    logs = {name: one.log for name, one in live.items() if one.log is not None}
    of_logs = _missing_ends(logs, manifests)
    for name, position in first.items():
        if logs[name].start > position:
            of_logs.append(f"{name}: log begins at {logs[name].start}, but is read from {position} on")
        of_logs += [f"{name}: {text}" for text in missing_segments.get(name, ())]
    return LiveDamage(
        are_logs_whole=len(logs) == len(live) and not of_logs,
        damaged=frozenset(name for name, one in live.items() if one.log is not None and one.damage),
        problems=(*problems, *of_logs),
    )


def _missing_ends(logs: Mapping[OperatorId, LogFacts], manifests: Sequence[Manifest]) -> list[str]:
    """Logs that end before a position that others have seen: a log lost as a whole looks like one never written."""
    problems = []
    for name, log in logs.items():
        newest = newest_of(manifests, name)
        if newest is not None and log.end <= newest.channels[name].barrier:
            barrier = newest.channels[name].barrier
            problems.append(f"{name}: log ends at {log.end}, but its barrier was at {barrier}")
    for consumer, log in logs.items():
        for name, position in log.positions.items():
            if name in logs and position > logs[name].end:
                problems.append(f"{name}: log ends at {logs[name].end}, but {consumer} has read up to {position}")
    return problems
