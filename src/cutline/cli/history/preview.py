"""What a restore would do, for a person to read before it happens. Reads only, also while the flow runs."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from cutline.base import records
from cutline.base.clock import now_ms
from cutline.base.redaction import without_secrets
from cutline.cli.flows_here import FlowHere
from cutline.cli.history.left_history import explained
from cutline.cli.history.past import last_limits, size_of
from cutline.cli.history.report import EstimateReport, RestoreReport, SinkReport, SourceReport
from cutline.cli.places import is_running
from cutline.cli.running.status import status_if_readable
from cutline.cli.words import iso
from cutline.config.options import Options
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import CutlineError, MissingObject, StoreError
from cutline.fingerprint.definition import place_of
from cutline.flow import Flow
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.generation import GenerationRecord
from cutline.model.graph import FlowGraph, OperatorNode, SinkNode
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId, SinkId
from cutline.model.ids import FlowName as Name
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.model.restore_request import RestoreRequest
from cutline.model.status import OperatorStatus
from cutline.ports.objects import ObjectStore
from cutline.protocol.history.evolution import Changes
from cutline.protocol.history.known_checkpoints import of_present_history
from cutline.protocol.preview import Preview, preview
from cutline.protocol.recovery.facts import RestoreTo, SinkFacts
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.preview.facts import Asked, WithSavepoint, decide, sinks_by_records
from cutline.recovery.preview.work import work_since
from cutline.runtime.status import operator_fates
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoints
from cutline.spark_dir.file_set import last_batches
from cutline.spark_dir.source_check import newest_positions
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.local import LocalStore
from cutline.storage.metadata.sqlite import SqliteMetadata
from cutline.storage.query_dir import LocalQueryDir
from cutline.storage.recorded_positions import recorded_positions
from cutline.storage.restore_requests import stored_request
from cutline.tiers.checkpoint_files import names_in
from cutline.tiers.remote_checkpoints import RemoteCheckpoints
from cutline.tiers.transfer import MOST_PACKED_BYTES, PACKED_SUFFIX, unpacked
from cutline.transport.request_files import ask

#: Sinks answer between two commits.
_ANSWER_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a person wants to restore."""

    #: An epoch, or the name of a savepoint.
    to: str
    epoch: Epoch
    #: Whether ``to`` is the name of a savepoint.
    is_savepoint: bool
    #: That made it; empty: not known.
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Previewed:
    """What a start with this request would do now."""

    report: RestoreReport
    decision: RestorePlan | Refusal
    #: What the start does about input that is gone, as the option says it.
    missing_input: str


class _Answers(msgspec.Struct, frozen=True):
    """Of the running flow."""

    sinks: list[SinkFacts]
    problems: dict[SinkId, str] = {}
    options: dict[str, Any] = {}
    #: Where they publish to, as a hash; a former version does not tell it.
    places: dict[SinkId, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The records that the preview is made of."""

    layout: Layout
    own: LocalCheckpointStore
    #: The same, with the checkpoint of the savepoint that is restored.
    checkpoints: LocalCheckpointStore
    generations: list[GenerationRecord]
    #: Of the present history, ascending.
    manifests: list[Manifest]
    target: Manifest
    metadata: SqliteMetadata

    @property
    def inputs(self) -> Mapping[OperatorId, Sequence[OperatorId]]:
        """Of the operators that run now, or ran last."""
        return self.generations[-1].inputs if self.generations else {}


def preview_of(
    here: FlowHere,
    savepoints: Savepoints,
    target: Target,
    request: RestoreRequest,
    code: Flow | None,
    options: Options | None = None,
    *,
    missing_input: str | None = None,
) -> Previewed:
    """Asks the sources and, if the flow runs, its sinks.

    ``code``, ``options``: what would be started, and how; None: not known, so what runs now counts. ``missing_input``:
    of the flow that ran until a moment ago.
    """
    stored = _stored(here, savepoints, target)
    with contextlib.closing(stored.metadata):
        return _previewed(here, savepoints, target, request, stored, code, options, missing_input)


def _previewed(
    here: FlowHere,
    savepoints: Savepoints,
    target: Target,
    request: RestoreRequest,
    stored: _Stored,
    code: Flow | None,
    options: Options | None,
    missing_input: str | None,
) -> Previewed:
    is_up, notes = is_running(here.layout), _requested_before(here.layout)
    status = status_if_readable(here.layout, notes)
    operators: Mapping[str, OperatorStatus] = status.operators if status is not None else {}
    answers = _answers(here, stored, notes, is_up=is_up)
    graph = _graph(here.layout, stored, request, answers.sinks, code)
    starts = options or here.options
    missing_input = missing_input or _missing_input(answers, here, options)
    asked = Asked(
        sinks=_as_declared(answers, code, graph, notes) if code is not None else answers.sinks,
        content_problem=_content_check(here, savepoints, stored, target),
        remote_epochs=partial(_remote_epochs, starts, here, notes) if starts.remote else None,
        may_lose_input=missing_input == "continue",
        problems=answers.problems,
    )
    restore_to = RestoreTo(
        epoch=target.epoch, changes=Changes(rename=request.rename, allow_dropped=request.allow_dropped)
    )
    decision, facts = decide(_at_rest(here.layout, stored, graph, request, options), restore_to, asked)
    decision = explained(decision, here, target.to if target.is_savepoint else "", stored.target, stored.generations)
    work = work_since(
        target.epoch,
        layout=here.layout,
        metadata=stored.metadata,
        generations=stored.generations,
        manifests=stored.manifests,
        operators=operators,
    )
    found = preview(
        decision,
        target.epoch,
        sinks=facts.sinks,
        operators=stored.inputs,
        work=work,
        is_per_operator=facts.definition.is_per_operator,
    )
    report = RestoreReport(
        flow=here.flow,
        to=target.to,
        is_running=is_up,
        given_up=[one.epoch for one in work.epochs],
        sinks=_sink_reports(found, answers.problems),
        sources=[_source_report(name, stored, found, operators) for name, read in stored.inputs.items() if not read],
        estimate=_estimate_report(found),
        is_compared_with_code=code is not None,
        notes=[*dict.fromkeys([*notes, *(without_secrets(one) for one in decision.problems)])],
        **_checkpoint(stored),
        **_decided(decision),
    )
    return Previewed(report=report, decision=decision, missing_input=missing_input)


def _missing_input(answers: _Answers, here: FlowHere, options: Options | None) -> str:
    """What the start does about input that is gone: by its own options, if they are known."""
    if options is not None:
        return options.missing_input
    return str(answers.options.get("missing_input", here.options.missing_input))


def _requested_before(layout: Layout) -> list[str]:
    before = stored_request(layout)
    if before is None:
        return []
    return [f"a restore to {before.to} is requested already, and the next start does it; --cancel withdraws it"]


def _checkpoint(stored: _Stored) -> dict[str, Any]:
    manifest = stored.target
    return {
        "epoch": manifest.epoch,
        "completed": iso(manifest.completed_ms),
        "completed_ms": manifest.completed_ms,
        "age_ms": max(now_ms() - manifest.completed_ms, 0),
        "code": manifest.code,
        "size_bytes": size_of(stored.checkpoints, manifest),
    }


def _decided(decision: RestorePlan | Refusal) -> dict[str, Any]:
    if isinstance(decision, Refusal):
        what, next_step = without_secrets(decision.what), without_secrets(decision.next_step)
        return {"would_refuse": True, "why": what, "next_step": next_step}
    return {
        "would_refuse": False,
        "tier": decision.tier,
        "operators": operator_fates(decision.evolution),
        "lost_input": list(decision.lost_input),
    }


# ---------------------------------------------------------------------- what is stored


def _stored(here: FlowHere, savepoints: Savepoints, target: Target) -> _Stored:
    reading = LocalStore.reading(here.layout)
    checkpoints = reading.checkpoints
    if target.is_savepoint:
        savepoints.check_own(target.to)
        layout = savepoints.layout_of(target.to)
        store = store_at(str(layout.root))
        kept = LocalCheckpointStore(layout, is_reader=True)
        checkpoints = WithSavepoint(
            reading.checkpoints, kept, target.epoch, partial(_with_offsets, store=store, layout=here.layout)
        )
    generations = reading.generations.load_all()
    readable = []
    for epoch in checkpoints.epochs():
        try:
            readable.append(checkpoints.load_manifest(epoch))
        except CutlineError:
            continue  # the decision finds out, too
    return _Stored(
        layout=here.layout,
        own=reading.checkpoints,
        checkpoints=checkpoints,
        generations=generations,
        manifests=of_present_history(readable, generations),
        target=checkpoints.load_manifest(target.epoch),
        metadata=SqliteMetadata(here.layout.metadata, is_copy=True),
    )


def _with_offsets(record: OperatorRecord, *, store: ObjectStore, layout: Layout) -> OperatorRecord:
    """The record of a savepoint, with the content of its offsets in it, which may be too large to be there."""

    def inlined(file: SnapshotFile) -> SnapshotFile:
        if file.content is not None or not file.path.startswith("offsets/"):
            return file
        name = layout.name(layout.blob(file.sha256))
        try:
            content = unpacked(store.read(name + PACKED_SUFFIX, MOST_PACKED_BYTES), name)
        except MissingObject:
            content = store.read(name, records.MOST_BYTES)
        return msgspec.structs.replace(file, content=content)

    return msgspec.structs.replace(record, shared=[inlined(file) for file in record.shared])


def _content_check(
    here: FlowHere, savepoints: Savepoints, stored: _Stored, target: Target
) -> Callable[[Manifest], str]:
    """Whether the files are there with their sizes; whether every byte is as written, the start finds out."""

    def of_checkpoint(manifest: Manifest) -> str:
        for name in manifest.operators:
            for file in stored.own.load_record(manifest, name).files():
                if problem := stored.own.file_damage(file, deep=False):
                    return problem
        return ""

    def of_savepoint(manifest: Manifest) -> str:
        store = store_at(str(savepoints.layout_of(target.to).root))
        there = {info.path.removesuffix(PACKED_SUFFIX) for info in store.walk()}
        missing = [name for name in names_in(store, manifest, here.layout) if name not in there]
        return f"savepoint {target.to} lacks {missing[0]}" if missing else ""

    def check(manifest: Manifest) -> str:
        try:
            return of_savepoint(manifest) if target.is_savepoint else of_checkpoint(manifest)
        except (CutlineError, OSError) as error:
            return str(error)

    return check


def _remote_epochs(options: Options, here: FlowHere, notes: list[str]) -> frozenset[Epoch]:
    try:
        place = f"{options.remote.rstrip('/')}/{here.flow}"
        store = store_at(place, options.remote_options, creates=False)
        return frozenset(RemoteCheckpoints(store, here.layout).epochs())
    except (StoreError, OSError) as error:
        notes.append(without_secrets(f"the remote tier does not answer: {error}"))
        return frozenset()


# ---------------------------------------------------------------------- what is asked, and what would run


def _answers(here: FlowHere, stored: _Stored, notes: list[str], *, is_up: bool) -> _Answers:
    """What the sinks say, if the flow runs; else what the records say of them."""
    if is_up:

        def check_running() -> None:
            if not is_running(here.layout):
                raise StoreError("it has just stopped")

        try:
            answer = ask(here.layout.requests, "sink_facts", {}, seconds=_ANSWER_SECONDS, wait=check_running)
            answers = msgspec.convert(answer, _Answers)
        except (CutlineError, OSError, msgspec.MsgspecError) as error:
            notes.append(f"the running flow could not be asked about its sinks: {without_secrets(str(error))}")
        else:
            notes += [f"sink {name} could not be asked: {problem}" for name, problem in answers.problems.items()]
            return answers
    sinks: dict[SinkId, OperatorId] = {}
    for manifest in stored.manifests[-1:]:
        for name in manifest.operators:
            try:
                record = stored.checkpoints.load_record(manifest, name)
            except (CutlineError, OSError):
                continue
            sinks |= dict.fromkeys(record.sinks, name)
    metadata = stored.metadata
    windows = last_limits(here, metadata.published(), notes) if not is_up else []
    return _Answers(sinks_by_records(metadata.published(), metadata.seen(), sinks.items(), windows))


def _graph(
    layout: Layout, stored: _Stored, request: RestoreRequest, sinks: Sequence[SinkFacts], code: Flow | None
) -> FlowGraph:
    """Of the code; if it is not known, the operators of the checkpoint under their new names."""
    if code is not None:
        return code.graph()
    names = {old: OperatorId(request.rename.get(old, old)) for old in stored.target.operators}
    recorded = _taken_in(stored)
    inputs = recorded.inputs if recorded is not None else {}
    return FlowGraph(
        flow=Name(layout.flow),
        operators=tuple(
            OperatorNode(
                operator=new,
                inputs=tuple(names.get(one, one) for one in inputs.get(old, stored.target.operators[old].positions)),
                subtasks=None,
                output_mode=None,
            )
            for old, new in names.items()
        ),
        sinks=tuple(
            SinkNode(
                sink=one.sink,
                operator=names.get(one.operator, one.operator),
                output_mode=None,
                supported_modes=frozenset(),
                on_rollback=one.on_rollback,
                publish=one.publish,
            )
            for one in sinks
        ),
        output_modes={},
    )


def _taken_in(stored: _Stored) -> GenerationRecord | None:
    return next((one for one in stored.generations if one.generation == stored.target.generation), None)


def _as_declared(answers: _Answers, code: Flow, graph: FlowGraph, notes: list[str]) -> list[SinkFacts]:
    """The sinks of the code, with what those of the same name have answered.

    One with another target is not asked: to open it writes to it. It counts as empty, which is what the start refuses.
    """
    known, found = {one.sink: one for one in answers.sinks}, []
    for node in graph.sinks:
        if node.sink in known:
            facts = replace(known[node.sink], on_rollback=node.on_rollback, publish=node.publish)
            there, here = answers.places.get(node.sink, ""), place_of(code.sinks[node.sink])
            if there and here and there != here:
                notes.append(f"sink {node.sink} of the code publishes to another target than that of the running flow")
                facts = replace(facts, published=NO_EPOCH, highest=NO_EPOCH, claim="", takeovers=())
            found.append(replace(facts, operator=node.operator))
        else:
            notes.append(f"sink {node.sink} is new in the code: its start asks it")
    left = sorted(set(known).difference(node.sink for node in graph.sinks))
    notes += [f"sink {name} is not in the code: it stays as it is" for name in left]
    return found


def _at_rest(
    layout: Layout, stored: _Stored, graph: FlowGraph, request: RestoreRequest, options: Options | None
) -> FlowAtRest:
    """As the start would see the flow. Schemas of the code are known only to Spark: those of the checkpoint count."""
    taken_in = _taken_in(stored)
    was_per_operator = bool(stored.generations) and stored.generations[-1].is_per_operator
    schemas = {
        OperatorId(request.rename.get(name, name)): base64.b64decode(encoded)
        for name, encoded in (taken_in.schemas if taken_in is not None else {}).items()
    }
    return FlowAtRest(
        graph=graph,
        plans={
            name: OperatorPlan(operator=name, subtasks=1, is_stateful=False, schema_ipc=schemas.get(name, b""))
            for name in graph.names
        },
        layout=layout,
        query_dirs=LocalQueryDir(layout, stored.own.place, ReplayGuard()),
        checkpoints=stored.checkpoints,
        generations=LocalStore.reading(layout).generations,
        metadata=stored.metadata,
        is_per_operator=was_per_operator if options is None else options.is_per_operator,
    )


# ---------------------------------------------------------------------- in figures


def _sink_reports(found: Preview, problems: Mapping[SinkId, str]) -> list[SinkReport]:
    return [
        SinkReport(
            sink=one.sink,
            operator=one.operator,
            fate=one.fate,
            published=one.published,
            oldest_rewind=one.oldest_rewind,
            epochs=one.epochs,
            rows=one.rows.rows,
            unmeasured=one.rows.unmeasured,
            why=one.why,
            problem=problems.get(one.sink, ""),
        )
        for one in found.sinks
    ]


def _source_report(
    name: OperatorId, stored: _Stored, found: Preview, operators: Mapping[str, OperatorStatus]
) -> SourceReport:
    status, cut = operators.get(name), stored.target.operators.get(name)
    live = stored.layout.live_dirs(stored.generations[-1].spark_dirs)[name]
    then: dict[str, bytes | None] = {}
    if cut is not None:
        try:
            then = recorded_positions(stored.checkpoints.load_record(stored.target, name), stored.layout)
        except (CutlineError, OSError):
            then = {}  # the decision says what is wrong with it
    return SourceReport(
        operator=name,
        rows=found.rows[name].rows,
        unmeasured=found.rows[name].unmeasured,
        batches=max(last_batches(live)[1] - cut.batch, 0) if cut is not None else 0,
        positions_then=_texts(then),
        positions_now=_texts(newest_positions(live)),
        is_guarded=status is not None and bool(status.sources) and all(one.guarded for one in status.sources),
        unguarded=[one.note for one in status.sources if not one.guarded] if status is not None else [],
    )


def _texts(positions: Mapping[str, bytes | None]) -> dict[str, str]:
    return {name: without_secrets(one.decode(errors="replace")) if one else "" for name, one in positions.items()}


def _estimate_report(found: Preview) -> EstimateReport | None:
    one = found.estimate
    if one is None:
        return None
    return EstimateReport(
        seconds=round(one.seconds, 1),
        operator=one.operator,
        rows=one.rows.rows,
        rows_per_second=round(one.rows_per_second, 1),
    )
