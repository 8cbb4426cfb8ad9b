"""Which errors say something about a checkpoint, and which do not."""

from __future__ import annotations

import errno

import pytest

from cutline.errors import (
    CutlineError,
    DamagedRecordError,
    LostInputError,
    MissingObject,
    NotDone,
    OutcomeUnknown,
    RecoveryError,
    StoreError,
)
from cutline.model.ids import Epoch
from cutline.protocol.recovery.facts import Trial
from cutline.protocol.recovery.plan import RestorePlan
from cutline.protocol.recovery.trial import trial_of
from tests.support.recovery_facts import FLOW, TOTALS

PLAN = RestorePlan(path="local", tier="remote", reason="")


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (DamagedRecordError("a blob is missing"), True),
        (MissingObject("a blob is missing"), True),
        (OSError(errno.ENOSPC, "no space left"), False),
    ],
)
def test_damage_is_a_fact_about_the_checkpoint(error: CutlineError | OSError, is_damage: bool) -> None:
    assert trial_of(PLAN, Epoch(3), error, flow=FLOW, operator=TOTALS) == Trial(
        path="local", tier="remote", epoch=Epoch(3), problem=str(error), operator=TOTALS, is_damage=is_damage
    )


@pytest.mark.parametrize("error", [StoreError("away"), NotDone("away"), OutcomeUnknown("away")])
def test_a_store_that_does_not_answer_says_nothing_about_the_checkpoint(error: StoreError) -> None:
    with pytest.raises(
        RecoveryError, match=r"whether epoch 3 can be restored is unknown: away.*nothing has been changed"
    ):
        trial_of(PLAN, Epoch(3), error, flow=FLOW)


def test_what_no_other_checkpoint_would_help_against_is_raised() -> None:
    for error in (RecoveryError("a sink cannot publish"), LostInputError("gone")):
        with pytest.raises(type(error)) as raised:
            trial_of(PLAN, Epoch(3), error, flow=FLOW)
        assert raised.value is error
