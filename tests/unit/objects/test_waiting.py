"""Waiting for a store that a start needs."""

from __future__ import annotations

import pytest

from cutline.base.backoff import Backoff
from cutline.base.retry import Retry
from cutline.errors import NotDone, Refused
from cutline.model.ids import FlowName
from cutline.objects import waiting
from cutline.objects.waiting import wait_for_store


def test_a_store_that_does_not_answer_is_asked_again_and_one_that_refuses_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "STORE_RETRY", Retry(limit=5, backoff=Backoff(first_s=0.0)))
    answers: list[Exception] = [NotDone("no answer"), Refused("status 403"), NotDone("not reached")]

    def ask() -> None:
        raise answers.pop(0)

    with pytest.raises(Refused):
        wait_for_store(ask, flow=FlowName("shop"))
    assert len(answers) == 1
