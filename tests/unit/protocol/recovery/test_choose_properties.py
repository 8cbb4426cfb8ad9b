"""Whatever has happened to a flow, the decision how it returns loses nothing and repeats nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage, spans_of
from cutline.protocol.recovery.choose import choose
from cutline.protocol.recovery.facts import (
    LiveOperator,
    LogFacts,
    PublishedBefore,
    RecoveryFacts,
    RemoteRecords,
    RestoreTo,
    SinkFacts,
    StoredEpoch,
    StoredFacts,
    Trial,
)
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.protocol.recovery.sink_rules import settle
from tests.support.recovery_facts import (
    ORDERS,
    TOTALS,
    World,
    began,
    known,
    manifest,
    sink,
    unreadable,
)

END = Position(1_000_000)
EVENTS = ["complete", "complete", "resume", "restore"]
#: A start is a long story: fewer of them than of most properties.
few = settings(max_examples=60, deadline=None)


@dataclass
class Life:
    """A flow that has run, been stopped and been restored; both channels grow alike."""

    generations: list[GenerationRecord]
    #: All that ever completed, by epoch.
    complete: dict[int, Manifest]
    #: The epochs of the present history.
    present: list[int]


@st.composite
def lives(draw: st.DrawFn) -> Life:
    lineage, at, epoch = Lineage.begin(Generation(1)), 0, 0
    life = Life([began(1, path="fresh", lineage=((1, 0),))], {}, [])
    for event in draw(
        st.lists(st.sampled_from(["complete", "complete", "resume", "restore"]), min_size=2, max_size=12)
    ):
        generation = life.generations[-1].generation + 1
        if event == "complete":
            epoch, at = epoch + draw(st.integers(1, 2)), at + draw(st.integers(1, 3))
            life.complete[epoch] = manifest(
                epoch,
                generation=generation - 1,
                previous=life.present[-1] if life.present else 0,
                barrier=at,
                lineage=spans_of(lineage),
            )
            life.present.append(epoch)
            at += 1
        elif event == "resume":
            lineage = lineage.fork(Generation(generation), Position(at))
            life.generations.append(began(generation, lineage=spans_of(lineage)))
        elif life.present:
            back = draw(st.sampled_from(life.present))
            life.present = [one for one in life.present if one <= back]
            cut = life.complete[back].channels[ORDERS]
            at = cut.barrier + 1
            lineage = Lineage.begin(Generation(1))
            for one, start in cut.lineage[1:]:
                lineage = lineage.fork(one, start)
            lineage = lineage.fork(Generation(generation), Position(at))
            life.generations.append(began(generation, path="local", restored=back, lineage=spans_of(lineage)))
    return life


@dataclass
class Start:
    """A start of such a flow, in whatever state it is."""

    life: Life
    facts: RecoveryFacts
    world: World
    #: How many of the plans that are made first cannot be built.
    failing: int


@st.composite
def starts(draw: st.DrawFn) -> Start:
    life = draw(lives())
    ever = sorted(life.complete)
    published = draw(st.sampled_from([0, *ever, *life.present]))
    reached = [one for one in life.present if one <= published]
    recorded = draw(st.sampled_from([0, *reached]))
    slowest = max(published, recorded)
    # Retention releases only what every sink has published, oldest first; what was given up may lie there or not.
    first = draw(st.integers(0, max(sum(one < slowest for one in life.present) - 1, 0)))
    released = set(life.present[:first]) | {one for one in ever if one not in life.present and draw(st.booleans())}
    bad = draw(st.sets(st.sampled_from(ever), max_size=2)) if ever else set()
    stored = _stored(life, released, bad)
    remote = set(life.present) - draw(st.sets(st.sampled_from(ever), max_size=2)) if ever else set()
    is_host_lost = draw(st.integers(0, 3)) == 0
    is_requested = bool(ever) and draw(st.integers(0, 3)) == 0
    facts = known(
        StoredFacts() if is_host_lost else stored,
        sinks=(
            sink(
                published,
                seen=None if is_host_lost else draw(st.sampled_from([published] * 5 + ever[-1:])),
                recorded=Epoch(0 if is_host_lost else recorded),
                on_rollback=draw(st.sampled_from(["rewind", "keep", "fail"])),
                can_rewind=draw(st.booleans()),
                oldest_rewind=Epoch(draw(st.sampled_from([0, 0, *ever]))),
            ),
        ),
        restore_to=RestoreTo(epoch=Epoch(draw(st.sampled_from(ever)))) if is_requested else None,
        has_remote=is_host_lost or draw(st.booleans()),
        has_completed=bool(ever) and not is_host_lost,
    )
    there = _stored(life, set(ever) - remote, set()) if is_host_lost else _stored(life, released - remote, bad - remote)
    noted = draw(st.sampled_from([0, *[one for one in life.present if one <= published]]))
    world = World(
        live=_live(draw, is_host_lost=is_host_lost),
        remote=RemoteRecords(epochs=frozenset(Epoch(one) for one in remote), stored=there)
        if draw(st.integers(0, 3))
        else None,
        contents={one: "gone" for one in remote if not draw(st.integers(0, 3))},
        published_before=dict.fromkeys(remote, PublishedBefore(everywhere=Epoch(noted))),
    )
    return Start(life, facts, world, draw(st.integers(0, 4)))


def _stored(life: Life, released: set[int], bad: set[int]) -> StoredFacts:
    epochs: list[StoredEpoch] = []
    for epoch, one in sorted(life.complete.items()):
        if epoch not in released:
            epochs.append(
                unreadable(epoch, ORDERS, TOTALS) if epoch in bad else StoredEpoch(epoch=one.epoch, manifest=one)
            )
    return StoredFacts(generations=tuple(life.generations), epochs=tuple(epochs))


def _live(draw: st.DrawFn, *, is_host_lost: bool) -> dict[OperatorId, LiveOperator]:
    states = {
        "whole": LiveOperator(log=LogFacts(start=Position(0), end=END)),
        "damaged": LiveOperator(log=LogFacts(start=Position(0), end=END), damage=("state files are missing",)),
        "no log": LiveOperator(log=None, log_problem="log has a hole"),
    }
    if is_host_lost:
        return dict.fromkeys((ORDERS, TOTALS), states["no log"])
    kinds = st.sampled_from(["whole", "whole", "whole", "damaged", "no log"])
    return {name: states[draw(kinds)] for name in (ORDERS, TOTALS)}


def returned(start: Start) -> tuple[RestorePlan | Refusal, RecoveryFacts]:
    """Ask, answer and build, as recovery does; what the decision is in the end, and from which facts."""
    facts, failing = start.facts, start.failing
    tried: set[tuple[str, str, Epoch | None]] = set()
    for _ in range(200):
        decision = choose(facts)
        assert choose(facts) == decision, "equal facts, another answer"
        if isinstance(decision, Refusal):
            assert decision.what
            return decision, facts
        if not isinstance(decision, RestorePlan):
            assert decision not in start.world.asked, f"asked again for {decision}"
            facts = start.world.answer(facts, decision)
            continue
        key = (decision.path, decision.tier, decision.epoch)
        assert key not in tried, "a plan that could not be built is made again"
        if not failing or decision.epoch is None:
            return decision, facts
        failing -= 1
        tried.add(key)
        trial = Trial(path=decision.path, tier=decision.tier, epoch=decision.epoch, problem="a blob is missing")
        facts = replace(facts, trials=(*facts.trials, trial))
    raise AssertionError("it never ends")


@few
@given(starts())
def test_only_epochs_of_the_present_history_are_restored(start: Start) -> None:
    plan, facts = returned(start)
    assume(isinstance(plan, RestorePlan))
    assert isinstance(plan, RestorePlan)
    assert [one.epoch for one in plan.manifests] == sorted(one.epoch for one in plan.manifests)
    assert {int(one.epoch) for one in plan.manifests} <= set(start.life.present)
    if plan.epoch is not None:
        assert plan.epoch == plan.manifests[-1].epoch
    if facts.restore_to is not None:
        assert plan.epoch == facts.restore_to.epoch


@few
@given(starts())
def test_no_epoch_that_a_sink_has_yet_to_publish_is_skipped(start: Start) -> None:
    plan, facts = returned(start)
    assume(isinstance(plan, RestorePlan))
    assert isinstance(plan, RestorePlan)
    epochs = [int(one.epoch) for one in plan.manifests]
    one = facts.sinks[0]
    published = max(one.published, one.recorded)
    if plan.path == "remote":
        noted = facts.published_before[plan.manifests[-1].epoch].everywhere
        published = max(published, min(noted, plan.manifests[-1].epoch))
    due = [epoch for epoch in start.life.present if epochs and published < epoch <= epochs[-1]]
    assert [epoch for epoch in epochs if epoch > published] == due


@few
@given(starts())
def test_no_sink_keeps_what_is_given_up_unless_it_is_told_to(start: Start) -> None:
    plan, facts = returned(start)
    assume(isinstance(plan, RestorePlan))
    assert isinstance(plan, RestorePlan)
    one: SinkFacts = facts.sinks[0]
    settled = settle(one, plan.manifests, is_per_operator=False)
    newest = plan.manifests[-1].epoch if plan.manifests else 0
    if one.published <= newest:
        return  # if it was published by a history that was given up, that was rewound when it was
    if one.on_rollback == "keep":
        assert settled.keeps
    else:
        assert settled.rewind_to == newest > 0
        assert one.on_rollback == "rewind"
        assert one.can_rewind
        assert one.oldest_rewind is not None
        assert newest >= one.oldest_rewind


@few
@given(starts())
def test_a_flow_begins_at_the_beginning_only_if_no_checkpoint_is_known(start: Start) -> None:
    plan, facts = returned(start)
    if isinstance(plan, RestorePlan) and plan.path == "fresh":
        assert not facts.stored.epochs
        assert not facts.has_completed
        assert not facts.sinks[0].published
        assert not facts.has_remote or not start.world.remote.epochs
