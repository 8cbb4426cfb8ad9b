"""What is known of every complete checkpoint of a flow: figures, and whether and until when it can be restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cutline.base import records
from cutline.base.clock import now_ms
from cutline.base.redaction import without_secrets
from cutline.cli.flows_here import FlowHere
from cutline.cli.places import damage_note, is_running, kept_checkpoints, savepoints_of
from cutline.cli.running.status import load_status
from cutline.cli.words import clone_words, counted, iso, span
from cutline.connectors.replay_guard import ReplayGuard
from cutline.coordinator.factory import retention_policy
from cutline.errors import CutlineError, StoreError
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.model.status import RESTORE_LIMITS, FlowStatus, RestoreLimits, RewindWindow, StartStatus
from cutline.ports.inspection import CoordinatorRecords, Expiry
from cutline.ports.source_guard import Today
from cutline.protocol.history.known_checkpoints import complete_epoch
from cutline.protocol.recovery.facts import SinkFacts
from cutline.protocol.recovery.restorable import Release, released_at
from cutline.protocol.recovery.sink_rules import why_not_restored
from cutline.runtime.process.state import FlowState, state_of
from cutline.spark_dir.recorded_sources import load_recorded
from cutline.spark_dir.source_check import check_sources, newest_positions
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.detached import DetachedLogs
from cutline.storage.local import LocalStore
from cutline.storage.metadata.inspector import inspect_coordinator
from cutline.storage.recorded_positions import recorded_positions, recorded_sources
from cutline.storage.restore_requests import waiting_request
from cutline.transport.request_files import ask

if TYPE_CHECKING:
    from cutline.config.options import Options

#: Sinks answer between two commits; a flow that is busy longer is shown without them.
_ANSWER_SECONDS = 10.0


class PastEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """One complete checkpoint. Field names are the keys of ``--json``."""

    epoch: Epoch
    completed: str
    completed_ms: int
    age_ms: int
    #: All that a restore reads: state, positions, rows in flight, output that was staged.
    size_bytes: int
    #: What the checkpoint before it, in this list, does not have.
    new_bytes: int
    in_flight_rows: int
    #: Inputs whose rows were not counted.
    in_flight_unmeasured: int
    #: Rows that each sink publishes with this epoch.
    sink_rows: dict[str, int]
    #: Of these, the rows that are published.
    published_rows: int
    #: The code that made it, by its fingerprint; empty: a former version did.
    code: str
    is_pinned: bool
    #: The savepoints of this very checkpoint.
    savepoints: list[str]
    #: Why a restore would be refused now; empty: it would not.
    why_not: list[str]
    #: When retention releases it, if the flow goes on as it does; None: no end is in sight.
    restorable_until: str | None
    until_ms: int | None
    #: What decides until when: a rung of the ladder, for example.
    limited_by: str


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """All complete checkpoints of a flow, ascending."""

    flow: str
    is_running: bool
    epochs: list[PastEpoch]
    #: Checkpoints whose manifest cannot be read; ``cutline verify`` says why.
    damaged: list[Epoch]
    #: What could not be found out.
    notes: list[str]
    #: The epoch or savepoint that the next start restores, because a person has requested it; empty: none.
    restore_requested: str = ""
    #: As in ``cutline flows``, and the start that is under way; a flow that starts is not running yet.
    state: str = ""
    starting: StartStatus | None = None


def _now(layout: Layout) -> tuple[FlowStatus | None, FlowState]:
    """A status that cannot be read counts as none: this is about what is stored."""
    status = None
    with contextlib.suppress(CutlineError, OSError):
        status = load_status(layout)
    return status, state_of(layout, status)


def past_of(here: FlowHere, *, asks: bool) -> Past:
    """Reads only. ``asks``: sources and sinks are asked how far back they reach."""
    at_ms, notes = now_ms(), list[str]()
    status, now = _now(here.layout)
    is_up = now.is_up
    store, known = LocalStore.reading(here.layout), inspect_coordinator(here.layout.metadata)
    if status is not None and status.cloned_from is not None:
        notes.append(f"not started yet: {clone_words(here.flow, status.cloned_from)}")
    elif known.problem:
        notes.append(known.problem)
    unreadable = list[Epoch]()
    manifests = kept_checkpoints(store, unreadable)
    if unreadable:
        notes.append(damage_note(here.flow, unreadable))
    options, windows = here.options, list[RewindWindow]()
    if asks and is_up:
        options, windows = _limits(here, notes)
    elif not is_up and manifests:
        options = _last_options(here, store, notes)
        windows = last_limits(here, known.published, notes) if asks else []
    keeping = sorted(one.sink for one in windows if one.on_rollback == "keep")
    notes += [
        f"a restore does not rewind sink {sink}: rows after the checkpoint are published again" for sink in keeping
    ]
    released = _released(options, manifests, known, at_ms)
    lost_input = list(_lost_input(here, store, manifests, notes)) if asks else []
    refusals = _refusals(here, manifests, lost_input, windows, options, notes)
    expiries = _expiries(here, store, manifests) if asks else {}
    epochs, before, named = [], frozenset[str](), _named(here)
    for one in manifests:
        figures, before = _figures(store.checkpoints, one, known, before)
        if not figures.is_whole:
            notes.append(f"records of epoch {one.epoch} cannot be read: see cutline verify {here.flow} {one.epoch}")
        release, expiry = released.get(one.epoch), expiries.get(one.epoch, Expiry(None))
        until_ms, limit = until(release, expiry, _limited_by(one, options, known, release))
        past = _past_epoch(one, figures, at_ms, until_ms, limit)
        epochs.append(
            msgspec.structs.replace(
                past,
                is_pinned=one.epoch in known.pins,
                savepoints=named.get((one.epoch, one.generation), []),
                why_not=refusals[one.epoch],
            )
        )
    waiting = waiting_request(here.layout) if now.starting is None else None
    return Past(
        flow=here.flow,
        is_running=is_up,
        state=now.state,
        starting=status.starting if status is not None else now.starting,
        epochs=epochs,
        damaged=unreadable,
        notes=list(dict.fromkeys(notes)),
        restore_requested=waiting.to if waiting is not None else "",
    )


def _past_epoch(one: Manifest, figures: _Figures, at_ms: int, until_ms: int | None, limited_by: str) -> PastEpoch:
    return PastEpoch(
        epoch=one.epoch,
        completed=iso(one.completed_ms),
        completed_ms=one.completed_ms,
        age_ms=max(at_ms - one.completed_ms, 0),
        size_bytes=figures.size_bytes,
        new_bytes=figures.new_bytes,
        in_flight_rows=figures.in_flight_rows,
        in_flight_unmeasured=figures.in_flight_unmeasured,
        sink_rows=figures.sink_rows,
        published_rows=figures.published_rows,
        code=one.code,
        is_pinned=False,
        savepoints=[],
        why_not=[],
        restorable_until=iso(until_ms) if until_ms is not None else None,
        until_ms=until_ms,
        limited_by=limited_by,
    )


def _named(here: FlowHere) -> dict[tuple[Epoch, Generation], list[str]]:
    """The savepoints of each checkpoint; after a restore, another one may have had the same number."""
    found: dict[tuple[Epoch, Generation], list[str]] = {}
    with contextlib.suppress(CutlineError, OSError):
        for one in savepoints_of(here).list():
            found.setdefault((one.epoch, one.generation), []).append(one.name)
    return found


def _refusals(
    here: FlowHere,
    manifests: Sequence[Manifest],
    lost_input: Sequence[tuple[Epoch, str]],
    windows: Sequence[RewindWindow],
    options: Options,
    notes: list[str],
) -> dict[Epoch, list[str]]:
    """Per epoch: why a restore would be refused now."""
    return {
        one.epoch: [
            *(why for epoch, why in lost_input if epoch == one.epoch),
            *_refused_by_sinks(windows, one),
            *_refused_by_logs(here, one, options, notes),
        ]
        for one in manifests
    }


def _refused_by_logs(here: FlowHere, manifest: Manifest, options: Options, notes: list[str]) -> list[str]:
    """Why the rows that were in flight cannot be put back. What is missing here may be in the remote tier."""
    missing = DetachedLogs(here.layout).why_not_whole(manifest)
    if missing and options.remote:
        notes.append(f"epoch {manifest.epoch} can be restored only if the remote tier has it: {missing}")
        return []
    return [f"its rows in flight are not in the logs any more: {missing}"] if missing else []


def until(release: Release | None, expiry: Expiry, limited_by: str) -> tuple[int | None, str]:
    """When retention releases an epoch or its sources drop its input, whichever comes first, and what that is."""
    released_ms = None if release is None else release.at_ms
    if expiry.at_ms is None or (released_ms is not None and released_ms <= expiry.at_ms):
        return released_ms, limited_by
    return expiry.at_ms, f"source retention ({expiry.limit})"


def _limited_by(manifest: Manifest, options: Options, known: CoordinatorRecords, release: Release | None) -> str:
    if manifest.epoch in known.pins:
        return "pinned"
    if release is not None and release.rung is not None:
        return rung_name(release.rung.every_ms)
    if release is not None and release.is_by_age:
        return "its age"
    return f"the newest {options.retain_checkpoints} stay" if options.retain_checkpoints > 1 else "the newest stays"


def rung_name(every_ms: int) -> str:
    """A rung of the ladder, as a person would call it."""
    if not every_ms:
        return "all of them"
    names = {1_000: "second", 60_000: "minute", 3_600_000: "hour", 86_400_000: "day", 7 * 86_400_000: "week"}
    return f"one per {names[every_ms]}" if every_ms in names else f"one in {span(every_ms)}"


def size_of(checkpoints: LocalCheckpointStore, manifest: Manifest) -> int:
    """All that a restore reads, as far as the records of the operators can be read."""
    return _figures(checkpoints, manifest, CoordinatorRecords(), frozenset())[0].size_bytes


class _Figures(NamedTuple):
    size_bytes: int
    new_bytes: int
    in_flight_rows: int
    in_flight_unmeasured: int
    sink_rows: dict[str, int]
    published_rows: int
    #: Whether the records of all operators could be read.
    is_whole: bool


def _figures(
    checkpoints: LocalCheckpointStore, manifest: Manifest, known: CoordinatorRecords, before: frozenset[str]
) -> tuple[_Figures, frozenset[str]]:
    """Sizes and rows, and the content of the checkpoint, by hash. ``before``: of the checkpoint before it."""
    flights = [one for cut in manifest.channels.values() for one in cut.in_flight.values()]
    own_bytes = sum(one.size_bytes or 0 for one in flights)
    files, rows, published, is_whole = dict[str, int](), dict[str, int](), 0, True
    for operator, cut in manifest.operators.items():
        record = _record(checkpoints, manifest, operator)
        if record is None:
            is_whole = False
            continue
        files.update({file.sha256: file.size_bytes for file in record.files()})
        for sink, prepared in record.sinks.items():
            staged = [one for one in prepared.staged if one.batch > cut.after_batch]
            own_bytes += sum(one.bytes for one in staged)
            rows[sink] = sum(one.rows for one in staged)
            published += rows[sink] if known.published.get(sink, NO_EPOCH) >= manifest.epoch else 0
    figures = _Figures(
        size_bytes=sum(files.values()) + own_bytes,
        new_bytes=sum(size for digest, size in files.items() if digest not in before) + own_bytes,
        in_flight_rows=sum(one.rows or 0 for one in flights),
        in_flight_unmeasured=sum(one.rows is None for one in flights),
        sink_rows=rows,
        published_rows=published,
        is_whole=is_whole,
    )
    return figures, frozenset(files)


def _record(checkpoints: LocalCheckpointStore, manifest: Manifest, operator: OperatorId) -> OperatorRecord | None:
    """None: it is damaged, or has just been released; ``cutline verify`` tells which."""
    try:
        return checkpoints.load_record(manifest, operator)
    except (CutlineError, OSError):
        return None


# ---------------------------------------------------------------------- what limits a restore


def _released(
    options: Options, manifests: Sequence[Manifest], known: CoordinatorRecords, at_ms: int
) -> dict[Epoch, Release]:
    """When retention releases each epoch. In per-operator mode, each operator has checkpoints of its own."""
    groups: dict[object, list[Manifest]] = {}
    for one in manifests:
        groups.setdefault(frozenset(one.operators) if options.is_per_operator else None, []).append(one)
    found: dict[Epoch, Release] = {}
    for group in groups.values():
        found |= released_at(
            retention_policy(options),
            [complete_epoch(one) for one in group],
            published_everywhere=min(known.published.values(), default=group[-1].epoch),
            pins=known.pins,
            interval_ms=options.checkpoint_interval_ms,
            now_ms=at_ms,
        )
    return found


def _limits(here: FlowHere, notes: list[str]) -> tuple[Options, list[RewindWindow]]:
    """Ask the running flow for the options it was started with, and how far its sinks can be rewound."""

    def check_running() -> None:
        if not is_running(here.layout):
            raise StoreError("it has just stopped")

    try:
        answer = ask(here.layout.requests, "restore_limits", {}, seconds=_ANSWER_SECONDS, wait=check_running)
        limits = msgspec.convert(answer, RestoreLimits)
        options = _with_recorded(here.options, limits)
    except (CutlineError, OSError, msgspec.MsgspecError) as error:
        notes.append(f"the running flow could not be asked how far its sinks can be rewound: {error}")
        return here.options, []
    notes += [f"sink {one.sink} could not be asked: {one.problem}" for one in limits.sinks if one.problem]
    return options, limits.sinks


def _with_recorded(options: Options, limits: RestoreLimits) -> Options:
    """The options, with those that the flow ran with."""
    known = {key: value for key, value in limits.options.items() if key in options.__struct_fields__}
    return msgspec.structs.replace(options, **known)


def _last_options(here: FlowHere, store: LocalStore, notes: list[str]) -> Options:
    """Those that a stopped flow ran with last: a shell need not have the options that its service has."""
    began_ms = max((one.started_ms for one in store.generations.load_all()), default=0)
    with contextlib.suppress(CutlineError, OSError):
        limits = records.load(RESTORE_LIMITS, here.layout.restore_limits, RestoreLimits, flow=here.flow)
        if limits.at_ms >= began_ms:
            return _with_recorded(here.options, limits)
    notes.append("with which options the flow ran last is not known: the times are by the options of this command")
    return here.options


def last_limits(here: FlowHere, published: Mapping[SinkId, Epoch], notes: list[str]) -> list[RewindWindow]:
    """What the sinks said when the flow stopped. It counts if nothing was published to them since."""
    found: list[RewindWindow] = []
    with contextlib.suppress(CutlineError, OSError):
        limits = records.load(RESTORE_LIMITS, here.layout.restore_limits, RestoreLimits, flow=here.flow)
        found = [one for one in limits.sinks if not one.problem and published.get(one.sink) == one.published]
    others = sorted(set(published) - {one.sink for one in found})
    if others:
        told = f"how far {', '.join(others)} can be rewound is checked by its start"
        notes.append(f"the flow is stopped: {told}")
    return found


def _refused_by_sinks(windows: Sequence[RewindWindow], manifest: Manifest) -> Iterator[str]:
    for one in windows:
        if one.oldest is None:
            continue
        facts = SinkFacts(
            sink=one.sink,
            operator=OperatorId(""),
            published=one.published,
            on_rollback=one.on_rollback,
            can_rewind=one.can_rewind,
            oldest_rewind=one.oldest,
            rewind_gaps=tuple(one.gaps),
        )
        if (why := why_not_restored(facts, manifest.epoch)) is not None:
            yield f"sink {one.sink} {why}"


def _lost_input(
    here: FlowHere, store: LocalStore, manifests: Sequence[Manifest], notes: list[str]
) -> Iterator[tuple[Epoch, str]]:
    """The epochs whose input a source can no longer read, and why.

    A restore reads everything after its checkpoint: what an epoch lacks, all earlier ones lack too. So few are asked.
    """
    generations = store.generations.load_all()
    if not generations:
        return
    newest, guard = generations[-1], ReplayGuard()
    for operator, inputs in newest.inputs.items():
        own = [one for one in manifests if operator in one.operators]
        if inputs or not own:
            continue
        live = here.layout.spark_checkpoint_dir(operator, newest.spark_dirs[operator])

        def problem(manifest: Manifest, operator: OperatorId = operator, live: Path = live) -> str:
            record = _record(store.checkpoints, manifest, operator)
            if record is None:
                return ""
            positions, recorded = recorded_positions(record, here.layout), recorded_sources(record, here.layout)
            report = check_sources(guard, positions, live, recorded=recorded)
            notes.extend(f"{operator}: {note}" for note in report.notes)
            return _told(operator, [f"{one.path}: {one.problem}" for one in report.problems])

        try:
            yield from _up_to_last_problem(own, problem)
        except (CutlineError, OSError) as error:
            notes.append(f"whether {operator} can read its input again is not known: {without_secrets(str(error))}")


def _expiries(here: FlowHere, store: LocalStore, manifests: Sequence[Manifest]) -> dict[Epoch, Expiry]:
    """Until when sources keep what each epoch needs, as far as they tell; whether it is there is checked apart."""
    generations, guard = store.generations.load_all(), ReplayGuard()
    found: dict[Epoch, Expiry] = {}
    for operator, inputs in generations[-1].inputs.items() if generations else ():
        known = [
            (one.epoch, _record(store.checkpoints, one, operator)) for one in manifests if operator in one.operators
        ]
        if inputs or not known:
            continue
        live = here.layout.spark_checkpoint_dir(operator, generations[-1].spark_dirs[operator])
        with contextlib.suppress(CutlineError, OSError):  # asked again, and told, when its input is checked
            for epoch, expiry in _operator_expiries(here, guard, live, known):
                before = found.get(epoch, Expiry(None))
                if before.at_ms is None or (expiry.at_ms is not None and expiry.at_ms < before.at_ms):
                    found[epoch] = expiry
    return found


def _operator_expiries(
    here: FlowHere, guard: ReplayGuard, live: Path, known: Sequence[tuple[Epoch, OperatorRecord | None]]
) -> Iterator[tuple[Epoch, Expiry]]:
    stored = [(epoch, recorded_positions(one, here.layout)) for epoch, one in known if one is not None]
    for name, newest in newest_positions(live).items():
        kind = None if newest is None else guard.kind_of(newest, live / "sources" / name)
        if newest is None or kind is None or kind.progress is None:
            continue
        own = [(epoch, position) for epoch, positions in stored if (position := positions.get(name)) is not None]
        progress = kind.progress(newest, [one for _, one in own], Today(newest, recorded=load_recorded(live)))
        if progress is not None:
            yield from zip([epoch for epoch, _ in own], progress.expiries, strict=False)


def _told(operator: OperatorId, problems: Sequence[str]) -> str:
    if not problems:
        return ""
    more = f" and {counted(len(problems) - 1, 'more problem')}" if len(problems) > 1 else ""
    return f"input of {operator} is gone: {without_secrets(problems[0])}{more}"


def _up_to_last_problem(
    manifests: Sequence[Manifest], problem: Callable[[Manifest], str]
) -> Iterator[tuple[Epoch, str]]:
    """Bisect for the newest manifest with a problem; it and all before it are refused."""
    low, high, why = 0, len(manifests), ""
    while low < high:
        middle = (low + high) // 2
        if found := problem(manifests[middle]):
            low, why = middle + 1, found
        else:
            high = middle
    for one in manifests[:low]:
        yield one.epoch, why
