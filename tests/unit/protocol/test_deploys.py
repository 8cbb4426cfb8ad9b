"""Which starts save the state before them, what of it is kept, and what a person is told."""

from __future__ import annotations

import msgspec
import pytest

from cutline.model.generation import FlowCode, GenerationRecord, OperatorCode
from cutline.model.ids import NO_CODE, CodeHash, Epoch, Generation, OperatorId, SinkId
from cutline.protocol.deploys import (
    Deploy,
    Save,
    SavedState,
    TakenBefore,
    automatic_name,
    before_last_deploy,
    code_since,
    deploy,
    differences,
    left_by,
    newest_code,
    returned_to,
    surplus,
)


def hash_of(letter: str) -> CodeHash:
    return CodeHash(letter * 12)


def code(letter: str = "a", *, function: str = "1", pyspark: str = "4.2.0") -> FlowCode:
    return FlowCode(
        hash=hash_of(letter),
        python="3.11.7",
        pyspark=pyspark,
        cutline="0.1.0",
        operators={
            OperatorId("numbers"): OperatorCode(function=hash_of("0"), declaration=hash_of("0")),
            OperatorId("totals"): OperatorCode(function=hash_of(function), declaration=hash_of("0")),
        },
        sinks={SinkId("table"): hash_of("0")},
    )


def ran(number: int, what: FlowCode | None, since_ms: int = 0) -> GenerationRecord:
    return GenerationRecord(
        generation=Generation(number),
        started_ms=number,
        path="resume",
        restored_epoch=None,
        reason="",
        lineage={},
        spark_dirs={},
        inputs={},
        schemas={},
        code=what,
        code_since_ms=since_ms,
    )


def saved(name: str, at_ms: int, letter: str = "a", before: TakenBefore = "deploy", epoch: int = 1) -> SavedState:
    return SavedState(name=name, epoch=Epoch(epoch), created_ms=at_ms, code=hash_of(letter), taken_before=before)


EPOCHS = {Epoch(4): hash_of("a"), Epoch(5): hash_of("b")}


def test_the_first_start_and_the_same_code_change_nothing() -> None:
    assert deploy(code(), [], {}, keep=5) == Deploy()
    assert deploy(code(), [ran(1, code("b")), ran(2, code())], EPOCHS, keep=5) == Deploy()


def test_other_code_saves_the_newest_whole_epoch_first() -> None:
    found = deploy(code("b", function="2", pyspark="4.3.0"), [ran(1, code())], EPOCHS, keep=5)
    assert found == Deploy(
        change="code changed since epoch 5: operators totals (function), PySpark 4.2.0 → 4.3.0",
        saves=(Save(epochs=(Epoch(5), Epoch(4)), taken_before="deploy", is_required=True),),
    )


def test_a_requested_restore_saves_what_it_gives_up_but_does_not_depend_on_it() -> None:
    given_up = Save(epochs=(Epoch(5),), taken_before="restore", is_required=False)
    begins = Save(epochs=(Epoch(4),), taken_before="deploy", is_required=True)
    former = [ran(1, code("b"))]
    assert deploy(code("c"), former, EPOCHS, keep=5, restored=Epoch(4)).saves == (begins, given_up)
    assert deploy(code("a"), former, EPOCHS, keep=5, restored=Epoch(4)).saves == (given_up,), "it is its own state"


def test_code_that_restores_the_newest_epoch_is_deployed_there() -> None:
    """As for changed operators: stop with a savepoint, restore it with new code."""
    found = deploy(code("c"), [ran(1, code("b"))], EPOCHS, keep=5, restored=Epoch(5))
    assert found.saves == (Save(epochs=(Epoch(5),), taken_before="deploy", is_required=True),)


@pytest.mark.parametrize(
    ("epochs", "keep", "is_per_operator", "why_not"),
    [
        ({}, 5, False, "there is no complete checkpoint"),
        (EPOCHS, 0, False, "auto_savepoints is 0"),
        (EPOCHS, 5, True, "in per-operator mode no checkpoint covers the whole flow"),
    ],
)
def test_what_prevents_a_savepoint_is_said(
    epochs: dict[Epoch, CodeHash], keep: int, why_not: str, *, is_per_operator: bool
) -> None:
    found = deploy(code("b"), [ran(1, code())], epochs, keep=keep, is_per_operator=is_per_operator)
    assert found.change.startswith("code changed since ")
    assert (found.saves, found.why_not) == ((), why_not)


def test_code_that_was_never_recorded_counts_as_other_code() -> None:
    found = deploy(code(), [ran(1, None)], EPOCHS, keep=5)
    assert found.saves
    assert "former version" in found.change


def test_only_automatic_savepoints_are_surplus_and_the_oldest_first() -> None:
    mine = [saved("auto-mine", 1, before=""), saved("release", 2, before="")]
    automatic = [saved(f"auto-{number}", number, before="restore" if number % 2 else "deploy") for number in range(9)]
    assert surplus([*reversed(automatic), *mine], keep=7) == ["auto-0", "auto-1"]
    assert surplus([*automatic, *mine], keep=7, spared={"auto-0"}) == ["auto-1"]
    assert surplus([*automatic, *mine], keep=9) == []
    assert surplus([*automatic, *mine], keep=0) == []
    assert surplus([saved("renamed", 1), *automatic], keep=9) == []


def test_the_oldest_are_told_by_their_epoch_not_by_clocks() -> None:
    """The clock of a host was an hour fast for a day."""
    states = [saved("auto-fast", 9_000, epoch=1), saved("auto-b", 20, epoch=2), saved("auto-c", 30, epoch=3)]
    assert surplus(states, keep=2) == ["auto-fast"]


def begun(number: int, letter: str, saved: str = "", restored: str = "") -> GenerationRecord:
    return msgspec.structs.replace(ran(number, code(letter)), saved=saved, restored_savepoint=restored)


def test_before_last_deploy_is_what_the_newest_change_of_code_continued_from() -> None:
    history = [begun(1, "a"), begun(2, "b", "auto-1"), begun(3, "b"), begun(4, "c", "auto-2"), begun(5, "c")]
    assert before_last_deploy(history) == "auto-2"
    assert before_last_deploy(history[:3]) == "auto-1"
    assert before_last_deploy(history[:1]) == before_last_deploy([]) == "", "no code was changed"
    back = [*history, begun(6, "b", "auto-2")]
    assert before_last_deploy(back) == "auto-2", "the code was changed back: its own work is not jumped over"
    assert before_last_deploy([*back, begun(7, "d")]) == "", "no savepoint was taken: an earlier one is not meant"
    assert before_last_deploy([ran(1, None), begun(2, "a", "auto-1")]) == "auto-1"


def test_a_change_of_code_that_undid_another_is_not_undone_again() -> None:
    history = [begun(1, "a"), begun(2, "b", "auto-1"), begun(3, "c", "auto-2")]
    assert returned_to(history) == returned_to([]) == ""
    for one in (begun(4, "b", "", "auto-2"), begun(4, "d", "auto-2", "auto-2")):
        assert returned_to([*history, one]) == "auto-2", "by the former code, or by corrected code"
        again = msgspec.structs.replace(one, generation=Generation(5), saved="", restored_savepoint="")
        assert returned_to([*history, one, again]) == "auto-2", "however often it is started"
        assert returned_to([*history, one, begun(5, "e", "auto-3")]) == "", "this one was deployed"
    assert returned_to([*history, begun(4, "d", "auto-4", "release")]) == "", "deployed with a savepoint of a person"
    assert returned_to([*history, begun(4, "b", "", "auto-1")]) == "auto-1", "it has returned to what it left"


def test_what_a_code_left_is_what_the_next_one_continued_from() -> None:
    states = [saved("auto-1", 1, "a"), saved("auto-2", 2, "b"), saved("auto-3", 3, "a")]
    history = [begun(1, "a"), begun(2, "b", "auto-1"), begun(3, "a", "auto-2"), begun(4, "b", "auto-3")]
    assert left_by(states, history, hash_of("a")) == "auto-3"
    assert left_by(states, history, hash_of("b")) == "auto-2"
    assert left_by(states, history, hash_of("c")) is None
    assert left_by(states[:2], history, hash_of("a")) == "auto-1", "the newer one was removed"


def test_the_newest_code_is_that_of_the_newest_generation() -> None:
    assert newest_code([]) == newest_code([ran(1, code()), ran(2, None)]) == NO_CODE
    assert newest_code([ran(1, code()), ran(2, code("b"))]) == hash_of("b")


def test_code_is_as_old_as_its_first_generation() -> None:
    history = [ran(1, None), ran(2, code("a"), 20), ran(3, code("b"), 30), ran(4, code("a"), 20)]
    assert code_since(history, code("a"), 50) == 20
    assert code_since(history, code("c"), 50) == 50


def test_an_automatic_name_tells_time_and_epoch() -> None:
    assert automatic_name(Epoch(12), 1_795_068_890_123) == "auto-20261119T061450Z-e12"


def test_every_difference_has_words() -> None:
    before = code()
    now = msgspec.structs.replace(
        before,
        cutline="",
        operators={
            OperatorId("totals"): OperatorCode(function=hash_of("7"), declaration=hash_of("7")),
            OperatorId("extra"): OperatorCode(function=hash_of("0"), declaration=hash_of("0")),
        },
        sinks={SinkId("table"): hash_of("7"), SinkId("copy"): hash_of("0")},
    )
    assert differences(before, now) == (
        "operators totals (function, declaration), extra (new), numbers (removed), "
        "sinks table (settings), copy (new), Cutline 0.1.0 → unknown"
    )
    assert "table (removed)" in differences(before, msgspec.structs.replace(now, sinks={}))
    assert differences(before, msgspec.structs.replace(before, hash=hash_of("f")))
