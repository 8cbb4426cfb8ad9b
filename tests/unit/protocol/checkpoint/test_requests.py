"""Requested checkpoints: postponed in order, answered once, when all is published."""

from __future__ import annotations

from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.checkpoint.requests import POSTPONED_LIMIT, Requests, refusal
from cutline.protocol.messages.coordinator import AnswerRequest, CheckpointRequested


def test_postponed_requests_come_back_once_and_in_order() -> None:
    requests = Requests()
    for name in ("first", "second"):
        assert requests.postpone(CheckpointRequested(request=name)) == []
    assert [request.request for request in requests.take_postponed()] == ["first", "second"]
    assert requests.take_postponed() == []


def test_one_request_too_many_is_refused() -> None:
    requests = Requests()
    for number in range(POSTPONED_LIMIT):
        assert requests.postpone(CheckpointRequested(request=str(number))) == []
    assert requests.postpone(CheckpointRequested(request="one more")) == [refusal("one more", "too many requests")]
    assert len(requests.take_postponed()) == POSTPONED_LIMIT


def test_a_request_is_answered_once_when_its_epoch_is_published_everywhere() -> None:
    requests = Requests()
    requests.await_publication(["a", "b"], Epoch(3))
    requests.await_publication(["c"], Epoch(4))
    assert requests.published(Epoch(2)) == []
    assert requests.published(Epoch(3)) == [
        AnswerRequest(request=name, epoch=Epoch(3), completed=True) for name in ("a", "b")
    ]
    assert requests.published(Epoch(3)) == []
    assert [answer.request for answer in requests.published(Epoch(9))] == ["c"]


def test_a_refusal_names_its_reason_and_no_epoch() -> None:
    assert refusal("r", "why") == AnswerRequest(request="r", epoch=NO_EPOCH, completed=False, reason="why")
