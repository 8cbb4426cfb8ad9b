"""What is restored while the flow runs, when an operator has failed for good."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from cutline.model.checkpoint import Manifest
from cutline.model.generation import LostInput
from cutline.model.ids import BatchId, Epoch
from cutline.protocol.history.regions import FUTILE_RESTORES, LastRestore, next_restore
from cutline.protocol.recovery.facts import InputSince, NeedInputSince
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.protocol.recovery.region import Hopeless, RegionFacts, choose_region, region_to_stop, remembered
from tests.support.recovery_facts import ORDERS, TOTALS, definition, failed, manifest

LOST = LostInput(operator=ORDERS, what="orders/7.json", why="deleted", parts=1)


def facts(*epochs: int, is_per_operator: bool = False) -> RegionFacts:
    """``totals`` has failed; it has these complete epochs."""
    held = [TOTALS] if is_per_operator else [ORDERS, TOTALS]
    return RegionFacts(
        definition=definition(is_per_operator=is_per_operator),
        failed=TOTALS,
        reason="it fails",
        manifests=tuple(manifest(epoch, operators=held) for epoch in epochs),
        reached=BatchId(9),
        has_caught_up=False,
    )


def at_batch(epoch: int, batch: int) -> Manifest:
    """An epoch at which ``totals`` cut after this batch."""
    made = manifest(epoch)
    return structs.replace(
        made, operators={**made.operators, TOTALS: structs.replace(made.operators[TOTALS], batch=BatchId(batch))}
    )


def since(epoch: int, *, lost: tuple[LostInput, ...] = (), damage: str = "") -> InputSince:
    return InputSince(epoch=Epoch(epoch), operators=frozenset({TOTALS}), lost=lost, damage=damage)


def test_what_failed_and_all_downstream_of_it_stops() -> None:
    assert region_to_stop(definition(), ORDERS) == {ORDERS, TOTALS}
    assert region_to_stop(definition(), TOTALS) == {TOTALS}
    assert region_to_stop(definition(is_per_operator=True), ORDERS) == {ORDERS}


def test_the_region_returns_to_the_newest_epoch() -> None:
    known = facts(2)
    assert isinstance(choose_region(known), NeedInputSince)
    chosen = choose_region(replace(known, input_since=(since(2),)))
    assert isinstance(chosen, RestorePlan)
    assert (chosen.path, chosen.epoch, chosen.region, chosen.reason) == (
        "regional",
        2,
        frozenset({TOTALS}),
        "it fails",
    )


def test_a_region_is_not_restored_if_rows_would_be_lost() -> None:
    known = replace(facts(2), input_since=(since(2, lost=(LOST,)),))
    refused = choose_region(known)
    assert isinstance(refused, Refusal)
    assert refused.kind == "lost_input"
    allowed = choose_region(replace(known, may_lose_input=True))
    assert isinstance(allowed, RestorePlan)
    assert allowed.lost_input == (LOST,)


def test_a_region_without_a_usable_checkpoint_is_not_restored() -> None:
    none, damaged = choose_region(facts()), choose_region(replace(facts(2), input_since=(since(2, damage="torn"),)))
    assert isinstance(none, Refusal)
    assert none.what == "there is no checkpoint to restore"
    assert isinstance(damaged, Refusal)
    assert damaged.what == "epoch 2 cannot be used: torn"


def test_alone_an_operator_tries_one_checkpoint_after_the_other() -> None:
    known = facts(1, 3, is_per_operator=True)
    chosen = [choose_region(known)]
    for epoch in (3, 1):
        known = replace(known, trials=(*known.trials, failed("alone", "local", epoch, TOTALS)))
        chosen.append(choose_region(known))
    assert [one.alone[TOTALS] for one in chosen if isinstance(one, RestorePlan)] == [3, 1, 0]
    last = choose_region(replace(known, trials=(*known.trials, failed("alone", "local", 0, TOTALS))))
    assert isinstance(last, Refusal)
    assert "does not reach back to the beginning" in last.what


def test_a_restore_without_a_batch_finished_since_the_last_one_is_hopeless() -> None:
    known = facts(2)
    assert remembered(known) == LastRestore(batch=BatchId(2), reached=BatchId(9))
    again = replace(known, last=remembered(known))
    assert choose_region(again) == Hopeless()
    assert choose_region(replace(again, reached=BatchId(10))) != Hopeless()


def test_a_newer_epoch_is_progress_only_if_it_holds_a_batch_more() -> None:
    """While an operator fails, epochs go on: it cuts at its last finished batch, again and again."""
    again = replace(facts(2), last=remembered(facts(2)))
    assert choose_region(replace(again, manifests=(at_batch(3, 2),))) == Hopeless()
    assert choose_region(replace(again, manifests=(at_batch(3, 3),), reached=BatchId(3))) != Hopeless()


def test_what_was_reached_once_is_remembered() -> None:
    last = next_restore(
        LastRestore(batch=BatchId(2), reached=BatchId(9)), batch=BatchId(4), reached=BatchId(5), has_caught_up=False
    )
    assert last == LastRestore(batch=BatchId(4), reached=BatchId(9))
    assert next_restore(last, batch=BatchId(4), reached=BatchId(8), has_caught_up=False) is None


def test_catching_up_with_its_log_is_progress_a_few_times() -> None:
    last: LastRestore | None = LastRestore(batch=BatchId(2), reached=BatchId(9))
    for _ in range(FUTILE_RESTORES):
        last = next_restore(last, batch=BatchId(2), reached=BatchId(9), has_caught_up=True)
        assert last is not None
    assert next_restore(last, batch=BatchId(2), reached=BatchId(9), has_caught_up=True) is None
    assert next_restore(last, batch=BatchId(2), reached=BatchId(10), has_caught_up=False) == LastRestore(
        batch=BatchId(2), reached=BatchId(10)
    )
