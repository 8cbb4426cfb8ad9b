"""Which storages may start a flow that others may have gone on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cutline.model.generation import GenerationRecord
from cutline.model.history import Takeover
from cutline.model.ids import Epoch, Generation, Position
from cutline.protocol.publish.immediate import place_of
from cutline.protocol.recovery.choose import choose
from cutline.protocol.recovery.facts import (
    LiveOperator,
    LogFacts,
    NeedRemoteHistory,
    RecoveryFacts,
    RemoteHistory,
    RemoteRecords,
    RestoreTo,
    SinkFacts,
)
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from tests.support.recovery_facts import TOTALS, World, began, definition, known, manifest, sink, stored

MINE, OTHERS, LATER = ("a" * 32, "b" * 32, "c" * 32)


def mine(**more: Any) -> GenerationRecord:
    return began(1, identity=MINE, host="host-a", **more)


def others(generation: int = 101, **more: Any) -> GenerationRecord:
    return began(generation, identity=OTHERS, host="host-b", **more)


def taken_by(*whom: tuple[str, int], published: int = 2, **more: Any) -> SinkFacts:
    """The table, with those who took it over and the epochs that they went on from."""
    takeovers = tuple(
        Takeover(generation=Generation(1 + number), identity=identity, epoch=Epoch(epoch), started_ms=0, host="host-b")
        for number, (identity, epoch) in enumerate(whom)
    )
    return sink(published, seen=min(published, 2), claim="x y", takeovers=takeovers, **more)


def has_run(one: SinkFacts, **more: Any) -> RecoveryFacts:
    """A storage with epochs 1 and 2."""
    found = stored(manifest(1), manifest(2), generations=(mine(),))
    return known(found, sinks=(one,), last_epoch=Epoch(2), has_run=True, **more)


def decided(facts: RecoveryFacts, world: World | None = None) -> RestorePlan | Refusal:
    world = world or World()
    for _ in range(50):
        answer = choose(facts)
        if isinstance(answer, RestorePlan | Refusal):
            return answer
        facts = world.answer(facts, answer)
    raise AssertionError("asked without end")


def refused(facts: RecoveryFacts, world: World | None = None) -> Refusal:
    answer = decided(facts, world)
    assert isinstance(answer, Refusal), answer
    assert answer.kind == "other_history"
    return answer


def planned(facts: RecoveryFacts, world: World | None = None) -> RestorePlan:
    answer = decided(facts, world)
    assert isinstance(answer, RestorePlan), answer
    return answer


# ---------------------------------------------------------------------- sinks alone


def test_a_storage_that_took_the_sink_over_last_goes_on() -> None:
    assert planned(has_run(taken_by((MINE, 0)))).path == "resume"


def test_a_storage_from_which_another_one_took_the_sink_over_is_refused_with_the_whole_story() -> None:
    answer = refused(has_run(taken_by((MINE, 0), (OTHERS, 1), published=9)))
    assert "host-b" in answer.what
    assert "host-a" in answer.what
    assert (answer.can_rejoin, answer.restorable) == (False, 1)
    assert "cutline restore --to 1" in answer.next_step
    assert "cutline clone" in answer.next_step
    assert "--rejoin" not in answer.next_step


def test_numbers_that_fit_do_not_make_another_history_fit() -> None:
    """A copy published a few epochs while the original went on without rows: no number shows it."""
    assert refused(has_run(taken_by((MINE, 0), (OTHERS, 2), published=2)))


def test_a_storage_that_gave_up_the_others_history_on_request_goes_on() -> None:
    assert planned(has_run(taken_by((OTHERS, 1), (MINE, 0)))).path == "resume"


def test_a_storage_that_knows_nothing_of_what_was_published_is_behind() -> None:
    answer = refused(has_run(taken_by((MINE, 0), published=5)))
    assert "older than the flow" in answer.what
    assert answer.restorable == 2


def test_an_epoch_that_cannot_be_read_is_known_nevertheless() -> None:
    """The newest checkpoint is damaged: the newest history itself says that sinks are rewound."""
    facts = has_run(taken_by((MINE, 0), published=5))
    assert planned(replace(facts, last_epoch=Epoch(5), last_completed=Epoch(5))).path == "local"


def test_an_epoch_that_was_only_begun_here_may_have_completed_elsewhere() -> None:
    """The storage was copied while an epoch was pending."""
    facts = has_run(taken_by((MINE, 0), published=3))
    assert "older than the flow" in refused(replace(facts, last_epoch=Epoch(3))).what


def test_sinks_that_tell_nothing_are_judged_by_numbers() -> None:
    assert planned(has_run(sink(2, seen=2))).path == "resume"
    assert refused(has_run(sink(5, seen=2)))


@pytest.mark.parametrize(("epoch", "is_refused"), [(1, False), (2, True)])
def test_a_restore_request_reaches_back_to_what_is_shared(epoch: int, *, is_refused: bool) -> None:
    facts = has_run(taken_by((MINE, 0), (OTHERS, 1), published=9), restore_to=RestoreTo(epoch=Epoch(epoch)))
    answer = decided(facts)
    assert isinstance(answer, Refusal) is is_refused
    if isinstance(answer, Refusal):
        assert "only up to epoch 1" in answer.what


def test_in_per_operator_mode_no_restore_is_advised() -> None:
    facts = has_run(taken_by((MINE, 0), (OTHERS, 1)), definition=definition(is_per_operator=True))
    answer = refused(facts)
    assert answer.restorable is None
    assert "cutline restore" not in answer.next_step


# ---------------------------------------------------------------------- the remote tier


def with_remote(one: SinkFacts, **more: Any) -> RecoveryFacts:
    return has_run(one, has_remote=True, **more)


def test_a_host_always_asks_the_remote_tier() -> None:
    answer = choose(with_remote(taken_by((MINE, 0))))
    assert answer == NeedRemoteHistory(is_required=False)
    assert choose(with_remote(sink(2, seen=2))) == NeedRemoteHistory(is_required=True)


def test_a_host_that_was_replaced_can_rejoin() -> None:
    there = RemoteHistory(generations=(mine(), others()), epochs=((Epoch(1_004), others().generation),))
    answer = refused(with_remote(taken_by((MINE, 0))), World(remote_history=there))
    assert answer.can_rejoin
    assert "--rejoin" in answer.next_step


def test_nobody_rejoins_a_history_of_which_the_remote_tier_has_no_checkpoint() -> None:
    """The other host went back to epoch 1 and has copied nothing since: what is there was given up."""
    back = msgspec.structs.replace(others(), path="local", restored_epoch=Epoch(1))
    there = RemoteHistory(generations=(mine(), back), epochs=((Epoch(7), mine().generation),))
    answer = refused(with_remote(taken_by((MINE, 0))), World(remote_history=there))
    assert not answer.can_rejoin
    assert "--rejoin" not in answer.next_step
    shared = replace(there, epochs=((Epoch(1), mine().generation), (Epoch(7), mine().generation)))
    assert refused(with_remote(taken_by((MINE, 0))), World(remote_history=shared)).can_rejoin


def test_a_generation_that_this_host_announced_and_never_entered_is_its_own() -> None:
    there = RemoteHistory(generations=(mine(), others()), epochs=((Epoch(2), mine().generation),))
    facts = with_remote(taken_by((MINE, 0)), announced=frozenset({OTHERS}))
    assert planned(facts, World(remote_history=there)).path == "resume"


def test_a_backup_of_the_storage_is_behind_the_remote_tier() -> None:
    there = RemoteHistory(generations=(mine(),), epochs=((Epoch(7), mine().generation),))
    answer = refused(with_remote(taken_by((MINE, 0))), World(remote_history=there))
    assert "remote tier has epoch 7" in answer.what
    assert answer.can_rejoin


def test_a_remote_tier_that_is_behind_does_not_matter() -> None:
    there = RemoteHistory(generations=(mine(),), epochs=((Epoch(1), mine().generation),))
    assert planned(with_remote(taken_by((MINE, 0))), World(remote_history=there)).path == "resume"


def test_while_the_remote_tier_is_away_the_sinks_must_tell_that_no_one_took_over() -> None:
    away = World(remote_history=RemoteHistory(problem="no answer"))
    assert planned(with_remote(taken_by((MINE, 0))), away).path == "resume"
    answer = decided(with_remote(sink(2, seen=2)), away)
    assert isinstance(answer, Refusal)
    assert "another host" in answer.what


# ---------------------------------------------------------------------- a new host


def new_host(one: SinkFacts) -> RecoveryFacts:
    return known(stored(generations=()), sinks=(one,), has_remote=True)


def remote_with(*epochs: int, generations: tuple[GenerationRecord, ...]) -> World:
    found = stored(*(manifest(epoch) for epoch in epochs), generations=generations)
    numbers = frozenset(map(Epoch, epochs))
    return World(remote=RemoteRecords(epochs=numbers, stored=found), live={TOTALS: LiveOperator(log=None)})


def test_a_new_host_takes_over_from_a_host_that_was_ahead_of_the_remote_tier() -> None:
    """The lost host had gone on in a generation that it never uploaded."""
    facts = new_host(taken_by((MINE, 0), (LATER, 2), published=9))
    assert planned(facts, remote_with(1, 2, generations=(mine(),))).epoch == 2


def test_a_new_host_restores_nothing_that_a_sink_does_not_share() -> None:
    """A person restored epoch 1 on the lost host, and a backup of the bucket does not know."""
    facts = new_host(taken_by((MINE, 0), (LATER, 1), published=1))
    assert planned(facts, remote_with(1, 2, generations=(mine(),))).epoch == 1


# ---------------------------------------------------------------------- immediate publishing


def at_once(generation: int, batch: int, log: tuple[int, int]) -> tuple[RecoveryFacts, World]:
    one = taken_by((MINE, 0), published=0, publish="at_once", newest_batch=place_of(Generation(generation), batch))  # type: ignore[arg-type]
    place = place_of(Generation(log[0]), log[1])  # type: ignore[arg-type]
    facts = LogFacts(start=Position(0), end=Position(99), place=place)
    return has_run(one), World(live={TOTALS: LiveOperator(log=facts)})


def test_a_log_that_lacks_published_batches_is_an_older_copy() -> None:
    assert planned(*at_once(1, 7, (1, 7))).path == "resume"
    assert "lacks" in refused(*at_once(1, 8, (1, 7))).what


def test_batches_that_a_restore_gave_up_may_be_published() -> None:
    facts, world = at_once(1, 8, (1, 7))
    generations = (mine(), began(2, restored=2, identity=LATER))
    facts = replace(facts, stored=replace(facts.stored, generations=generations))
    assert planned(facts, world).path == "resume"
