"""A start with other code than the flow last ran: what has changed, and what is kept of the state before it.

The savepoint is taken before the generation of the new code is entered. So the code of the newest generation is enough
to know whether one is due: killed before the entry, the next start finds the former code and the savepoint, if it was
finished; killed after the entry, it finds its own code, and a savepoint that exists. The generation names it: which one
is from before the last deploy is a matter of generations, not of clocks, and a restore that was killed and given up
leaves a savepoint that means nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from cutline.model.generation import FlowCode, GenerationRecord
from cutline.model.history import utc_text
from cutline.model.ids import NO_CODE, CodeHash, Epoch, MomentMs

#: Names of savepoints that starts take.
AUTOMATIC = "auto-"
#: What a person may write in place of a savepoint's name.
BEFORE_LAST_DEPLOY = "before-last-deploy"

#: Before what a savepoint was taken: "": a person took it; "deploy": other code continued from there; "restore": other
#: code restored an earlier checkpoint, and this one was given up.
TakenBefore = Literal["", "deploy", "restore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A savepoint that a start takes, unless it has it already."""

    #: The first of these that is whole.
    epochs: tuple[Epoch, ...]
    taken_before: TakenBefore
    #: Whether the start is refused if it cannot be taken.
    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """What a start finds out about its code, and what it does before it enters its generation."""

    #: One line for a person; empty: the flow last ran the same code.
    change: str = ""
    saves: tuple[Save, ...] = ()
    #: Why nothing is saved although the code has changed.
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSavepoints:
    """The savepoints that the record of a generation names; empty: none."""

    #: Of the state from which its code continues, if the generation before it ran other code.
    saved: str = ""
    #: The one that it has restored.
    restored: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A savepoint, as far as decisions about it need."""

    name: str
    epoch: Epoch
    created_ms: int
    code: CodeHash
    taken_before: TakenBefore


def deploy(
    code: FlowCode,
    generations: Sequence[GenerationRecord],
    epochs: Mapping[Epoch, CodeHash],
    *,
    keep: int,
    is_per_operator: bool = False,
    restored: Epoch | None = None,
) -> Deploy:
    """``generations``, ``epochs``: of the history up to this start, ascending; each complete epoch with its code.

    ``keep``: how many automatic savepoints are kept; 0: none is taken. ``restored``: the epoch that a person has
    requested to restore.
    """
    if not generations or newest_code(generations) == code.hash:
        return Deploy()
    newest = max(epochs, default=None)
    since = f"epoch {newest}" if newest is not None else "the last run, which has completed no checkpoint"
    change = f"code changed since {since}: {differences(generations[-1].code, code)}"
    if is_per_operator:
        return Deploy(change=change, why_not="in per-operator mode no checkpoint covers the whole flow")
    if newest is None:
        return Deploy(change=change, why_not="there is no complete checkpoint")
    if keep == 0:
        return Deploy(change=change, why_not="auto_savepoints is 0")
    return Deploy(change=change, saves=tuple(_saves(code, epochs, restored)))


def _saves(code: FlowCode, epochs: Mapping[Epoch, CodeHash], restored: Epoch | None) -> Iterator[Save]:
    descending = sorted(epochs, reverse=True)
    if restored is None:
        yield Save(epochs=tuple(descending), taken_before="deploy", is_required=True)
        return
    # The new code begins at the restored epoch. Of its own making, that is nothing to be restored to later.
    if restored in epochs and epochs[restored] != code.hash:
        yield Save(epochs=(restored,), taken_before="deploy", is_required=True)
    if later := tuple(epoch for epoch in descending if epoch > restored):
        yield Save(epochs=later, taken_before="restore", is_required=False)


def automatic_name(epoch: Epoch, now_ms: int) -> str:
    digits = utc_text(now_ms).removesuffix(" UTC").replace("-", "").replace(":", "").replace(" ", "T")
    return f"{AUTOMATIC}{digits}Z-e{epoch}"


def surplus(saved: Iterable[SavedState], *, keep: int, spared: Collection[str] = ()) -> list[str]:
    """Automatic savepoints beyond the newest ``keep``; never one that a person took, and none of ``spared``."""
    automatic = [one for one in _oldest_first(saved) if one.taken_before and one.name.startswith(AUTOMATIC)]
    # With 0 none is taken, and those that exist are left alone: it is a way to start, not to clean up.
    beyond = automatic[: max(len(automatic) - keep, 0)] if keep else []
    return [one.name for one in beyond if one.name not in spared]


def last_deploy(generations: Sequence[GenerationRecord]) -> GenerationRecord | None:
    """The newest generation that ran other code than the one before it; None: there is none."""
    for before, one in reversed(list(pairwise(generations))):
        if _code(one) != _code(before):
            return one
    return None


def before_last_deploy(generations: Sequence[GenerationRecord]) -> str:
    """The savepoint of the state from which the last deploy continued; empty: none was taken."""
    last = last_deploy(generations)
    return last.saved if last is not None else ""


def returned_to(generations: Sequence[GenerationRecord]) -> str:
    """The savepoint by which the last deploy has undone the one before it; empty: it has not.

    Whoever repeats the command that restored it means this savepoint: neither the one before an earlier deploy, nor to
    give up what the corrected code has done since.
    """
    last = last_deploy(generations)
    if last is None or not last.restored_savepoint:
        return ""
    earlier = [one for one in generations if one.generation < last.generation]
    is_undone = last.restored_savepoint == before_last_deploy(earlier)
    # Code that restores what it has left itself saves nothing: the savepoint exists.
    return last.restored_savepoint if is_undone or not last.saved else ""


def left_by(saved: Iterable[SavedState], generations: Sequence[GenerationRecord], code: CodeHash) -> str | None:
    """The newest automatic savepoint of what this code left when other code was deployed; None: there is none.

    To a start that returns to former code without a restore: it continues with what the other code made of the state.
    """
    own = {one.name for one in saved if one.code == code}
    for before, one in reversed(list(pairwise(generations))):
        if _code(before) == code != _code(one) and one.saved in own:
            return one.saved
    return None


def newest_code(generations: Sequence[GenerationRecord]) -> CodeHash:
    """The code that the flow ran last."""
    return _code(generations[-1]) if generations else NO_CODE


def code_since(generations: Iterable[GenerationRecord], code: FlowCode, now_ms: MomentMs) -> MomentMs:
    """When the flow first ran this code."""
    known = (one.code_since_ms for one in generations if one.code is not None and one.code.hash == code.hash)
    return min(known, default=now_ms)


def _code(generation: GenerationRecord) -> CodeHash:
    return generation.code.hash if generation.code is not None else NO_CODE


def _oldest_first(saved: Iterable[SavedState]) -> list[SavedState]:
    """By epoch: clocks of hosts differ, and are set back."""
    return sorted(saved, key=lambda one: (one.epoch, one.created_ms, one.name))


# ---------------------------------------------------------------------- in words


def differences(before: FlowCode | None, now: FlowCode) -> str:
    """What differs, in one line."""
    if before is None:
        return "a former version of Cutline ran it, which did not record its code"
    operators = ", ".join(_operators(before, now))
    sinks = ", ".join(_sinks(before, now))
    versions = [
        f"{program} {old or 'unknown'} → {new or 'unknown'}"
        for program, old, new in (
            ("Python", before.python, now.python),
            ("PySpark", before.pyspark, now.pyspark),
            ("Cutline", before.cutline, now.cutline),
        )
        if old != new
    ]
    parts = [f"operators {operators}" if operators else "", f"sinks {sinks}" if sinks else "", *versions]
    return ", ".join(filter(None, parts)) or "in a way that is not recorded"


def _operators(before: FlowCode, now: FlowCode) -> Iterator[str]:
    for name, one in now.operators.items():
        old = before.operators.get(name)
        if old is None:
            yield f"{name} (new)"
            continue
        what = ["function"] if old.function != one.function else []
        what += ["declaration"] if old.declaration != one.declaration else []
        if what:
            yield f"{name} ({', '.join(what)})"
    yield from (f"{name} (removed)" for name in before.operators if name not in now.operators)


def _sinks(before: FlowCode, now: FlowCode) -> Iterator[str]:
    for name, one in now.sinks.items():
        if name not in before.sinks:
            yield f"{name} (new)"
        elif before.sinks[name] != one:
            yield f"{name} (settings)"
    yield from (f"{name} (removed)" for name in before.sinks if name not in now.sinks)
