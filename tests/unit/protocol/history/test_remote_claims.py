"""Which host may write to the remote tier."""

from __future__ import annotations

import msgspec
import pytest

from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, FlowName, Generation
from cutline.protocol.history.remote_claims import (
    Seal,
    claims_needed,
    generation_to_take,
    is_replaced,
    is_won,
    judge_seal,
    newest_generation,
)


def manifest(generation: int, *, flow: str = "payments", completed_ms: int = 1) -> Manifest:
    return Manifest(
        flow=FlowName(flow),
        epoch=Epoch(7),
        generation=Generation(generation),
        previous_epoch=Epoch(6),
        started_ms=0,
        completed_ms=completed_ms,
        operators={},
        channels={},
    )


def test_a_claim_counts_like_a_generation_that_has_begun() -> None:
    assert newest_generation([], []) == 0
    assert newest_generation([Generation(3)], [Generation(5)]) == 5
    assert newest_generation([Generation(9)], [Generation(5)]) == 9


def test_a_start_takes_a_number_that_no_tier_knows() -> None:
    assert generation_to_take() == 1
    assert generation_to_take(Generation(4), Generation(2)) == 5


def test_a_host_without_records_leaves_room_for_generations_that_nothing_else_knows() -> None:
    assert generation_to_take(are_records_lost=True) == 1
    assert generation_to_take(Generation(4), are_records_lost=True) > 50


def test_a_claim_is_won_by_creating_it_or_by_finding_the_own_token() -> None:
    assert is_won(b"us", is_created=True, found=None)
    assert is_won(b"us", is_created=False, found=b"us"), "the answer to an earlier attempt was lost"
    assert not is_won(b"us", is_created=False, found=b"them")
    assert not is_won(b"us", is_created=False, found=None)


def test_every_generation_since_the_start_must_be_owned() -> None:
    assert claims_needed(Generation(3), Generation(5)) == [3, 4, 5]
    assert claims_needed(None, Generation(5)) == [5]
    assert claims_needed(Generation(6), Generation(5)) == [5], "in the name of an earlier one"


def test_a_newer_generation_replaces_a_process() -> None:
    assert is_replaced(Generation(3), Generation(4))
    assert not is_replaced(Generation(4), Generation(4))
    assert not is_replaced(Generation(4), Generation(0))


@pytest.mark.parametrize(
    ("there", "verdict"),
    [
        (manifest(3), Seal.SEALED),
        (manifest(3, completed_ms=2), Seal.TAKEN),
        (manifest(2), Seal.TAKEN),
        (manifest(4), Seal.FENCED),
        (manifest(3, flow="refunds"), Seal.FENCED),
    ],
)
def test_what_stands_under_the_number_decides(there: Manifest, verdict: Seal) -> None:
    assert judge_seal(manifest(3), there, Generation(3)) is verdict


def test_a_region_that_began_later_seals_what_its_process_began() -> None:
    older = msgspec.structs.replace(manifest(3))
    assert judge_seal(older, older, Generation(5)) is Seal.SEALED
