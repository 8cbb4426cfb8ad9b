"""The decision how a flow returns: facts in, plan or refusal out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cutline.errors import LostInputError
from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.history.evolution import Changes
from cutline.protocol.recovery.choose import choose
from cutline.protocol.recovery.facts import (
    InputAhead,
    InputProblem,
    InputSince,
    LiveOperator,
    LogFacts,
    NeedContent,
    NeedFirstRemote,
    NeedRemote,
    NeedSinkLimits,
    PublishedBefore,
    RecoveryFacts,
    RemoteHistory,
    RemoteRecords,
    RestoreTo,
    StoredFacts,
)
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from tests.support.recovery_facts import (
    INPUTS,
    ORDERS,
    TABLE,
    TOTALS,
    World,
    began,
    definition,
    failed,
    known,
    manifest,
    sink,
    stored,
    unreadable,
)

BROKEN = LiveOperator(log=LogFacts(start=Position(0), end=Position(99)), damage=("state files are missing",))
NO_LOG = LiveOperator(log=None, log_problem="log has a hole")
LOST = LostInput(operator=ORDERS, what="orders/7.json", why="deleted", parts=1)


def decided(facts: RecoveryFacts, world: World | None = None) -> RestorePlan | Refusal:
    """Ask until there is a plan or a refusal; each answer must bring the decision forward."""
    world = world or World()
    for _ in range(50):
        answer = choose(facts)
        assert choose(facts) == answer
        if isinstance(answer, RestorePlan | Refusal):
            return answer
        before = facts
        facts = world.answer(facts, answer)
        assert facts != before, f"asked again for {answer}"
    raise AssertionError("it never ends")


def plan(facts: RecoveryFacts, world: World | None = None) -> RestorePlan:
    answer = decided(facts, world)
    assert isinstance(answer, RestorePlan), answer
    return answer


def refusal(facts: RecoveryFacts, world: World | None = None) -> Refusal:
    answer = decided(facts, world)
    assert isinstance(answer, Refusal), answer
    return answer


# ---------------------------------------------------------------------- every path


def test_the_first_start_begins_at_the_beginning() -> None:
    chosen = plan(known(stored(generations=[])))
    assert (chosen.path, chosen.epoch, chosen.manifests) == ("fresh", None, ())


def test_what_is_intact_continues_and_nobody_asks_the_remote_tier() -> None:
    world = World(remote_history=RemoteHistory())
    facts = known(stored(manifest(1), manifest(2)), sinks=(sink(2, seen=2),), has_remote=True, has_run=True)
    chosen = plan(facts, world)
    assert (chosen.path, chosen.epoch) == ("resume", None)
    assert [one.epoch for one in chosen.manifests] == [1, 2]
    assert not [one for one in world.asked if isinstance(one, NeedRemote | NeedFirstRemote | NeedContent)]


def test_a_damaged_directory_takes_what_is_downstream_along() -> None:
    chosen = plan(known(stored(manifest(1), manifest(2))), World(live={TOTALS: BROKEN}))
    assert (chosen.path, chosen.epoch, chosen.region) == ("regional", 2, frozenset({TOTALS}))
    assert chosen.reason == "totals: state files are missing"


def test_a_damaged_source_takes_the_whole_flow_along() -> None:
    chosen = plan(known(stored(manifest(1), manifest(2))), World(live={ORDERS: BROKEN}))
    assert (chosen.path, chosen.epoch, chosen.region) == ("local", 2, frozenset({ORDERS, TOTALS}))


def test_a_region_that_cannot_be_restored_takes_the_whole_flow_along() -> None:
    facts = known(stored(manifest(1), manifest(2)), trials=(failed("regional", "local", 2),))
    chosen = plan(facts, World(live={TOTALS: BROKEN}))
    assert (chosen.path, chosen.epoch) == ("local", 2)
    assert "totals cannot be restored to epoch 2 alone: a blob is missing" in chosen.problems


def test_a_region_with_a_source_whose_input_is_gone_is_not_restored_unasked() -> None:
    """Two sources, so that one of them is restored without the other."""
    other, both = OperatorId("other"), OperatorId("both")
    inputs = {ORDERS: (), other: (), both: (ORDERS, other)}
    found = stored(manifest(1, operators=[ORDERS, other, both]), generations=[began(1, inputs=inputs)])
    facts = known(found, definition=definition(inputs))
    lost = LostInput(operator=ORDERS, what="sequences 3 to 5", why="dropped", parts=3)
    since = InputSince(epoch=Epoch(1), operators=frozenset(), lost=(lost,))
    world = World(live={ORDERS: BROKEN}, input_since={1: since})
    refused = refusal(facts, world)
    assert "sequences 3 to 5" in str(refused.error()) and isinstance(refused.error(), LostInputError)
    chosen = plan(replace(facts, may_lose_input=True), world)
    assert (chosen.path, chosen.region, chosen.lost_input) == ("regional", frozenset({ORDERS, both}), (lost,))


def test_a_checkpoint_from_before_an_operator_joined_restores_no_region_with_it() -> None:
    """Its newest checkpoint holds nothing of ``totals``, which has joined since."""
    found = stored(
        manifest(1, operators=[ORDERS]),
        generations=[began(1, inputs={ORDERS: ()}), began(2, begun={TOTALS: 2})],
    )
    chosen = plan(known(found), World(live={TOTALS: BROKEN}))
    assert (chosen.path, chosen.epoch, chosen.evolution.added) == ("local", 1, (TOTALS,))
    assert "totals cannot be restored to epoch 1 alone: it holds nothing of totals" in chosen.problems


def test_a_damaged_log_restores_the_newest_checkpoint() -> None:
    chosen = plan(known(stored(manifest(1), manifest(2))), World(live={ORDERS: NO_LOG}))
    assert (chosen.path, chosen.tier, chosen.epoch) == ("local", "local", 2)


def test_segments_that_are_read_next_must_be_there() -> None:
    chosen = plan(known(stored(manifest(1))), World(segments={ORDERS: ("batch 7: segment is missing",)}))
    assert (chosen.path, chosen.reason) == ("local", "orders: batch 7: segment is missing")


def test_a_log_that_lost_its_end_is_noticed() -> None:
    short = LiveOperator(log=LogFacts(start=Position(0), end=Position(10)))
    assert (
        "log ends at 10, but its barrier was at 10"
        in plan(known(stored(manifest(1))), World(live={ORDERS: short})).reason
    )
    ahead = LiveOperator(log=LogFacts(start=Position(0), end=Position(15), positions={ORDERS: Position(99)}))
    assert "totals has read up to 99" in plan(known(stored(manifest(1))), World(live={TOTALS: ahead})).reason


def test_an_older_checkpoint_will_do_if_the_newest_is_damaged() -> None:
    facts = known(stored(manifest(1), manifest(2)), trials=(failed("local", "local", 2),), sinks=(sink(1),))
    chosen = plan(facts, World(live={ORDERS: NO_LOG}))
    assert (chosen.path, chosen.epoch) == ("local", 1)
    assert "epoch 2 of the local tier cannot be used: a blob is missing" in chosen.problems


def test_the_remote_tier_is_asked_before_an_older_checkpoint_is_used() -> None:
    found = stored(manifest(1), manifest(2))
    facts = known(found, trials=(failed("local", "local", 2),), has_remote=True)
    remote = RemoteRecords(epochs=frozenset({Epoch(2)}), stored=found)
    chosen = plan(facts, World(live={ORDERS: NO_LOG}, remote=remote))
    assert (chosen.path, chosen.tier, chosen.epoch) == ("remote", "remote", 2)
    away = plan(facts, World(live={ORDERS: NO_LOG}))
    assert (away.path, away.epoch) == ("local", 1)
    assert "the remote tier cannot be asked: no answer" in away.problems


def test_positions_that_are_damaged_here_are_downloaded() -> None:
    found = stored(manifest(1))
    facts = known(found, has_remote=True)
    remote = RemoteRecords(epochs=frozenset({Epoch(1)}), stored=found)
    world = World(live={ORDERS: NO_LOG}, remote=remote)
    torn = InputSince(epoch=Epoch(1), operators=frozenset({ORDERS, TOTALS}), damage="offsets are torn")
    chosen = plan(replace(facts, input_since=(torn,)), world)
    assert (chosen.path, chosen.epoch) == ("remote", 1)
    assert "epoch 1 of the local tier cannot be used: offsets are torn" in chosen.problems


def test_a_lost_host_comes_back_from_the_remote_tier() -> None:
    there = stored(manifest(1), manifest(2))
    remote = RemoteRecords(epochs=frozenset({Epoch(1), Epoch(2)}), stored=there)
    world = World(remote=remote, live={ORDERS: NO_LOG, TOTALS: NO_LOG})
    chosen = plan(known(stored(generations=[]), has_remote=True), world)
    assert (chosen.path, chosen.epoch) == ("remote", 2)
    assert NeedFirstRemote(is_required=True) in world.asked


def test_a_checkpoint_that_cannot_be_downloaded_is_passed_over() -> None:
    there = stored(manifest(1), manifest(2))
    remote = RemoteRecords(epochs=frozenset({Epoch(1), Epoch(2)}), stored=there)
    world = World(remote=remote, live={ORDERS: NO_LOG}, contents={2: "gone"})
    chosen = plan(known(stored(generations=[]), has_remote=True), world)
    assert (chosen.path, chosen.epoch) == ("remote", 1)


def test_of_the_remote_tier_comes_all_that_sinks_have_yet_to_publish() -> None:
    there = stored(manifest(1), manifest(2), manifest(3))
    remote = RemoteRecords(epochs=frozenset({Epoch(3)}), stored=there)
    world = World(remote=remote, live={ORDERS: NO_LOG}, published_before={3: PublishedBefore(everywhere=Epoch(1))})
    chosen = plan(known(stored(generations=[]), has_remote=True, sinks=(sink(1),)), world)
    assert [one.epoch for one in chosen.manifests] == [2, 3]


def test_in_per_operator_mode_one_operator_is_restored_alone() -> None:
    mode = {"definition": definition(is_per_operator=True)}
    found = stored(
        manifest(1, operators=[TOTALS], previous=0),
        manifest(2, operators=[ORDERS], previous=0),
        manifest(3, operators=[TOTALS], previous=1),
        generations=[began(1, is_per_operator=True)],
    )
    world = World(live={TOTALS: BROKEN})
    assert plan(known(found, **mode), world).alone == {TOTALS: 3}
    tried = known(found, **mode, trials=(failed("alone", "local", 3, TOTALS),))
    chosen = plan(tried, world)
    assert (chosen.path, chosen.alone, chosen.epoch) == ("alone", {TOTALS: 1}, None)
    tried = replace(tried, trials=(*tried.trials, failed("alone", "local", 1, TOTALS)))
    assert plan(tried, world).alone == {TOTALS: 0}
    tried = replace(tried, trials=(*tried.trials, failed("alone", "local", 0, TOTALS)))
    assert "does not reach back to the beginning" in refusal(tried, world).what
    # A full disk is no damage.
    full = replace(tried.trials[-1], problem="no space left on device", is_damage=False)
    refused = refusal(replace(tried, trials=(*tried.trials[:-1], full)), world)
    assert "it cannot begin without state either: no space left on device" in refused.what
    assert refused.next_step == "fix the cause, then restart the flow; nothing has been changed"


def test_without_any_checkpoint_ever_a_damaged_flow_begins_anew() -> None:
    chosen = plan(known(stored()), World(live={ORDERS: NO_LOG}))
    assert (chosen.path, chosen.reason) == ("fresh", "no checkpoint had ever completed, and orders: log has a hole")


# ---------------------------------------------------------------------- restore requests


def test_a_person_gets_the_epoch_that_was_asked_for() -> None:
    world = World()
    facts = known(stored(manifest(1), manifest(2)), restore_to=RestoreTo(epoch=Epoch(1)), sinks=(sink(2),))
    chosen = plan(facts, world)
    assert (chosen.path, chosen.epoch, chosen.reason) == ("local", 1, "a restore to epoch 1 was requested")
    assert [one.epoch for one in chosen.manifests] == [1]


def test_what_was_asked_for_is_downloaded_if_it_is_damaged_here() -> None:
    facts = known(
        stored(manifest(1), manifest(2)),
        restore_to=RestoreTo(epoch=Epoch(1)),
        trials=(failed("local", "local", 1),),
        has_remote=True,
    )
    chosen = plan(facts)
    assert (chosen.path, chosen.tier, chosen.epoch) == ("local", "remote", 1)
    again = replace(facts, trials=(*facts.trials, failed("local", "remote", 1)))
    assert refusal(again).what == "epoch 1 cannot be restored: a blob is missing"
    assert refusal(facts, World(contents={1: "gone"})).what == "epoch 1 cannot be restored: gone"


def test_an_operator_that_was_renamed_gets_a_checkpoint_with_a_free_number() -> None:
    sums = OperatorId("sums")
    facts = known(
        stored(manifest(1), manifest(2)),
        definition=definition({ORDERS: (), sums: (ORDERS,)}, schemas={sums: b"totals"}),
        restore_to=RestoreTo(epoch=Epoch(2), changes=Changes(rename={"totals": "sums"})),
        last_epoch=Epoch(4),
        sinks=(sink(2, operator=sums, highest=Epoch(7)),),
    )
    chosen = plan(facts)
    assert chosen.evolution.renaming.new_names == {ORDERS: ORDERS, TOTALS: sums}
    assert chosen.evolved_epoch == 8
    there = RemoteRecords(epochs=frozenset({Epoch(9)}))
    assert plan(replace(facts, has_remote=True), World(remote=there)).evolved_epoch == 10


def test_operators_that_join_begin_with_the_flow() -> None:
    late = OperatorId("late")
    facts = known(stored(manifest(1)), definition=definition({**INPUTS, late: (TOTALS,)}))
    chosen = plan(facts)
    assert (chosen.path, chosen.joined) == ("resume", (late,))


# ---------------------------------------------------------------------- refusals


PER_OPERATOR: dict[str, Any] = {"definition": definition(is_per_operator=True)}
ALONE = [began(1, is_per_operator=True)]
NEW = OperatorId("new")


@pytest.mark.parametrize(
    ("facts", "world", "what", "next_step"),
    [
        pytest.param(
            known(stored(manifest(1)), sinks=(sink(1, seen=2),)),
            World(),
            "epoch 2 was published to it",
            "cutline restore --to 1",
            id="a sink that was put back",
        ),
        pytest.param(
            known(stored(manifest(1)), sinks=(sink(0, seen=1),)),
            World(),
            "holds nothing of this flow",
            "--accept table",
            id="a sink that was emptied",
        ),
        pytest.param(
            known(stored(generations=[]), sinks=(sink(3),)),
            World(),
            "the storage has no readable checkpoint of it",
            "check the storage option",
            id="a sink that is not empty, and storage that is",
        ),
        pytest.param(
            known(stored(manifest(1), unreadable(2)), sinks=(sink(2, on_rollback="fail"),)),
            World(),
            "must not be rewound",
            'on_rollback="keep"',
            id="a sink that must not be rewound",
        ),
        pytest.param(
            known(stored(manifest(1), unreadable(2)), sinks=(sink(2, can_rewind=False),)),
            World(),
            "cannot be rewound",
            "repair the later checkpoint",
            id="a sink that cannot be rewound",
        ),
        pytest.param(
            known(stored(manifest(1), unreadable(2)), sinks=(sink(2, oldest_rewind=Epoch(2)),)),
            World(),
            "cannot be rewound further than epoch 2",
            "empty its target",
            id="a sink that cannot be rewound so far",
        ),
        pytest.param(
            known(stored(manifest(1)), restore_to=RestoreTo(epoch=Epoch(7))),
            World(),
            "epoch 7 is not a checkpoint that the flow can restore",
            "available checkpoints: 1",
            id="an epoch that is not there",
        ),
        pytest.param(
            known(stored(manifest(1)), trials=(failed("local", "local", 1),)),
            World(live={ORDERS: NO_LOG}),
            "no checkpoint can be used",
            "restore the storage folder from a backup",
            id="nothing that can be used",
        ),
        pytest.param(
            known(stored(generations=[]), has_completed=True),
            World(),
            "no checkpoint can be used",
            "start over under a new flow name",
            id="checkpoints that only the history knows",
        ),
        pytest.param(
            known(stored(generations=[])),
            World(has_entries=True),
            "the channels hold data, but all records about it are gone",
            "restore the storage folder from a backup",
            id="logs without records",
        ),
        pytest.param(
            known(stored(generations=[]), has_remote=True),
            World(),
            "whether the remote tier has any is unknown",
            "omit the option remote",
            id="an empty host without the remote tier",
        ),
        pytest.param(
            known(stored(manifest(1), generations=ALONE)),
            World(),
            "cannot go on in coordinated mode",
            "set mode as it was",
            id="the other mode",
        ),
        pytest.param(
            known(stored(manifest(1)), definition=definition({ORDERS: ()})),
            World(),
            "the last run holds operators that the flow no longer has: totals",
            "--allow-dropped",
            id="an operator that was dropped",
        ),
        pytest.param(
            known(stored(manifest(1)), definition=definition(schemas={TOTALS: b"other"})),
            World(),
            "schema of this operator's channel has changed",
            "restore the old columns",
            id="another schema",
        ),
        pytest.param(
            known(
                stored(
                    manifest(1, operators=[ORDERS, TOTALS, NEW]),
                    generations=[began(1), began(2, path="local", restored=1)],
                ),
                definition=definition({**INPUTS, NEW: (TOTALS,)}),
            ),
            World(),
            "there was an operator of this name before",
            "restore epoch 1",
            id="a name that returns",
        ),
        pytest.param(
            known(stored(manifest(1))),
            World(input_ahead=InputAhead(lost=(LOST,))),
            "input that was not read yet is gone: orders/7.json (deleted)",
            'missing_input = "continue"',
            id="input that comes next is gone",
        ),
        pytest.param(
            known(stored(manifest(1))),
            World(
                live={ORDERS: NO_LOG},
                input_since={1: InputSince(epoch=Epoch(1), operators=frozenset(), lost=(LOST, LOST))},
            ),
            "input that was read since epoch 1 is gone: orders/7.json and 1 more",
            "restore a later checkpoint",
            id="input since the checkpoint is gone",
        ),
        pytest.param(
            known(stored(manifest(1))),
            World(
                live={ORDERS: NO_LOG},
                input_since={
                    1: InputSince(
                        epoch=Epoch(1), operators=frozenset(), unknown=InputProblem(operator=ORDERS, what="no route")
                    )
                },
            ),
            "is unknown: no route",
            "check that the server runs",
            id="a server that does not say",
        ),
        pytest.param(
            known(stored(manifest(1), generations=ALONE), restore_to=RestoreTo(epoch=Epoch(1)), **PER_OPERATOR),
            World(),
            "in per-operator mode no checkpoint covers the whole flow",
            "",
            id="a restore in per-operator mode",
        ),
        pytest.param(
            known(stored(generations=[]), has_completed=True, **PER_OPERATOR),
            World(),
            "all generation records are gone",
            "restore the storage folder from a backup",
            id="per-operator mode without generations",
        ),
        pytest.param(
            known(stored(unreadable(1, TOTALS), generations=ALONE), **PER_OPERATOR),
            World(),
            "the newest checkpoints must be whole: epoch 1: checksum does not match",
            "restore the storage folder from a backup",
            id="per-operator mode with an unreadable epoch",
        ),
        pytest.param(
            known(stored(generations=ALONE), **PER_OPERATOR),
            World(live={ORDERS: NO_LOG}),
            "must be whole: orders: log has a hole",
            "restore the storage folder from a backup",
            id="per-operator mode with a damaged log",
        ),
    ],
)
def test_refusals_say_what_is_wrong_and_what_to_do(
    facts: RecoveryFacts, world: World, what: str, next_step: str
) -> None:
    refused = refusal(facts, world)
    assert what in refused.what
    assert next_step in refused.next_step
    assert refused.where["flow"] == "payments"
    assert str(refused.error()).startswith(refused.what)


def test_input_that_is_gone_may_be_given_up() -> None:
    facts = known(stored(manifest(1)), may_lose_input=True)
    assert plan(facts, World(input_ahead=InputAhead(lost=(LOST,)))).lost_input == (LOST,)
    since = {1: InputSince(epoch=Epoch(1), operators=frozenset(), lost=(LOST,))}
    assert plan(facts, World(live={ORDERS: NO_LOG}, input_since=since)).lost_input == (LOST,)


def test_a_server_that_is_away_hinders_nobody_who_continues() -> None:
    world = World(input_ahead=InputAhead(unknown=(InputProblem(operator=ORDERS, what="no route"),)))
    chosen = plan(known(stored(manifest(1))), world)
    assert chosen.path == "resume"
    assert chosen.problems == ("orders: whether its input is available is unknown: no route",)


# ---------------------------------------------------------------------- what sinks decide


def test_a_sink_that_is_ahead_is_rewound_by_a_restore() -> None:
    chosen = plan(known(stored(manifest(1), unreadable(2)), sinks=(sink(2),)))
    assert (chosen.path, chosen.epoch) == ("local", 1)
    assert "sink table has published epoch 2, the newest readable checkpoint is 1" not in chosen.problems
    ahead = plan(known(stored(manifest(1)), sinks=(sink(2),)))
    assert (ahead.path, ahead.epoch) == ("local", 1)
    assert "sink table has published epoch 2, the newest readable checkpoint is 1" in ahead.problems


def test_how_far_a_sink_can_be_rewound_is_asked_only_if_it_must_be() -> None:
    lazy = sink(2, highest=None, oldest_rewind=None)
    found = stored(manifest(1), manifest(2))
    world = World(oldest_rewind=2)
    assert plan(known(found, sinks=(lazy,)), world).path == "resume"
    assert NeedSinkLimits() not in world.asked
    refused = refusal(known(found, sinks=(lazy,), restore_to=RestoreTo(epoch=Epoch(1))), world)
    assert "cannot be rewound further than epoch 2" in refused.what


@pytest.mark.parametrize("here", [stored(manifest(5), unreadable(6)), stored(manifest(5))], ids=["rotten", "not here"])
@pytest.mark.parametrize("must_not", [{"on_rollback": "fail"}, {"can_rewind": False}], ids=str)
def test_a_checkpoint_that_a_sink_forbids_does_not_keep_the_remote_tier_from_being_asked(
    here: StoredFacts, must_not: dict[str, Any]
) -> None:
    """The local tier lacks the epoch that the sink shows; the remote tier has it."""
    facts = known(here, sinks=(sink(6, **must_not),), has_remote=True)
    there = RemoteRecords(epochs=frozenset({Epoch(5), Epoch(6)}), stored=stored(manifest(5), manifest(6)))
    chosen = plan(facts, World(remote=there))
    assert (chosen.path, chosen.epoch) == ("remote", 6)
    assert any("epoch 5 of the local tier cannot be used: sink table has" in one for one in chosen.problems)


def test_a_sink_that_forbids_every_checkpoint_is_the_reason_of_the_refusal() -> None:
    facts = known(stored(manifest(4), manifest(5), unreadable(6)), sinks=(sink(6, on_rollback="fail"),))
    for has_remote in (False, True):
        world = World(remote_history=RemoteHistory())
        refused = refusal(replace(facts, has_remote=has_remote), world)
        assert "the flow would be restored to epoch 5, and the sink must not be rewound" in refused.what
        assert "empty its target" in refused.next_step


def test_lost_input_refuses_the_start_and_no_older_checkpoint_is_tried() -> None:
    """An older checkpoint would need even more of it."""
    since = {2: InputSince(epoch=Epoch(2), operators=frozenset(), lost=(LOST,))}
    refused = refusal(known(stored(manifest(1), manifest(2))), World(live={ORDERS: NO_LOG}, input_since=since))
    assert (refused.kind, refused.where["epoch"]) == ("lost_input", 2)


def test_a_sink_that_keeps_its_rows_may_be_ahead() -> None:
    assert plan(known(stored(manifest(1)), sinks=(sink(2, on_rollback="keep"),))).path == "resume"


def test_a_person_may_restore_what_a_sink_still_has() -> None:
    found = stored(manifest(1), manifest(2))
    facts = known(found, sinks=(sink(1, seen=2),), restore_to=RestoreTo(epoch=Epoch(1)))
    assert plan(facts).epoch == 1


def test_a_sink_that_publishes_at_once_looks_for_itself() -> None:
    assert plan(known(stored(manifest(1)), sinks=(sink(0, seen=9, publish="at_once"),))).path == "resume"


def test_an_epoch_behind_a_lost_one_cannot_be_published() -> None:
    found = stored(manifest(1), unreadable(2), manifest(3))
    chosen = plan(known(found, sinks=(sink(1),)))
    assert (chosen.path, chosen.epoch) == ("local", 1)
    assert "epoch 3: not published, and epoch 2 before it is lost" in chosen.problems
    published = plan(known(found, sinks=(sink(3),)))
    assert (published.path, [one.epoch for one in published.manifests]) == ("resume", [1, 3])


def test_what_was_released_beside_a_pin_is_no_gap() -> None:
    found = stored(manifest(1), manifest(5, previous=4))
    assert plan(known(found, sinks=(sink(0),), pins=frozenset({Epoch(1)}))).path == "resume"
    gap = plan(known(found, sinks=(sink(0),)))
    assert [one.epoch for one in gap.manifests] == [1]


def test_a_new_host_hears_from_the_remote_tier_what_sinks_must_have() -> None:
    there = stored(manifest(1), manifest(2))
    remote = RemoteRecords(epochs=frozenset({Epoch(2)}), stored=there)
    noted = {2: PublishedBefore(everywhere=Epoch(1), seen={TABLE: Epoch(2)})}
    world = World(remote=remote, live={ORDERS: NO_LOG}, published_before=noted)
    facts = known(stored(generations=[]), has_remote=True, sinks=(sink(1),))
    assert "epoch 2 was published to it" in refusal(facts, world).what
    # It has records of its own: they say what was published.
    assert plan(replace(facts, sinks=(sink(1, seen=1),)), world).epoch == 2
    # What was published later may have been rewound by a host that restored this checkpoint.
    later = World(
        remote=remote,
        live={ORDERS: NO_LOG},
        published_before={2: PublishedBefore(everywhere=Epoch(1), seen={TABLE: Epoch(3)})},
    )
    assert plan(facts, later).epoch == 2


def test_a_new_host_hears_from_the_remote_tier_what_was_published_and_released() -> None:
    """Found by the simulator (seed 237): of a sink that leaves no trace of epochs a new host knows nothing else."""
    there = stored(manifest(2), manifest(6, previous=5), manifest(9, previous=8))
    remote = RemoteRecords(epochs=frozenset({Epoch(2), Epoch(6), Epoch(9)}), stored=there)
    noted = {9: PublishedBefore(everywhere=Epoch(8)), 2: PublishedBefore()}
    world = World(remote=remote, live={ORDERS: NO_LOG}, published_before=noted)
    facts = known(stored(generations=[]), has_remote=True, sinks=(sink(0, publish="at_once"),))
    chosen = plan(facts, world)
    assert (chosen.path, [one.epoch for one in chosen.manifests]) == ("remote", [9])


# ---------------------------------------------------------------------- histories


def test_epochs_that_were_given_up_are_not_restored() -> None:
    """Generation 2 was restored to epoch 1: epoch 2 of generation 1 is of another history."""
    found = stored(
        manifest(1),
        manifest(2),
        generations=[began(1), began(2, path="local", restored=1, lineage=((1, 0), (2, 11)))],
    )
    chosen = plan(known(found), World(live={ORDERS: NO_LOG}))
    assert [one.epoch for one in chosen.manifests] == [1]


def test_what_a_fenced_process_completed_is_of_no_history() -> None:
    """Its barriers stand where another generation writes."""
    found = stored(manifest(1), manifest(2), generations=[began(1), began(2, lineage=((1, 0), (2, 15)))])
    chosen = plan(known(found))
    assert [one.epoch for one in chosen.manifests] == [1]
