"""Requested checkpoints: which requests wait for room, which wait for their epoch to be published, and the answers."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.messages.coordinator import AnswerRequest, CheckpointRequested

#: Most requests that wait for room; one more is refused.
POSTPONED_LIMIT = 256


class Requests:
    """The requests that no pending epoch holds: before their epoch begins, and after it is complete."""

    def __init__(self) -> None:
        self._postponed: list[CheckpointRequested] = []
        #: Requests of complete epochs, answered once every sink has published the epoch.
        self._awaiting_publication: dict[str, Epoch] = {}

    def postpone(self, request: CheckpointRequested) -> list[AnswerRequest]:
        """Keep a request until there is room; refuse it if too many wait already."""
        if len(self._postponed) >= POSTPONED_LIMIT:
            return [refusal(request.request, "too many requests")]
        self._postponed.append(request)
        return []

    def take_postponed(self) -> list[CheckpointRequested]:
        taken, self._postponed = self._postponed, []
        return taken

    def await_publication(self, requests: Iterable[str], epoch: Epoch) -> None:
        """Their epoch is complete."""
        self._awaiting_publication.update(dict.fromkeys(requests, epoch))

    def published(self, everywhere: Epoch) -> list[AnswerRequest]:
        """Every sink has published all epochs up to ``everywhere``: answer the requests that waited for that."""
        done = {request: epoch for request, epoch in self._awaiting_publication.items() if epoch <= everywhere}
        for request in done:
            del self._awaiting_publication[request]
        return [AnswerRequest(request=request, epoch=epoch, completed=True) for request, epoch in done.items()]


def refusal(request: str, reason: str, epoch: Epoch = NO_EPOCH) -> AnswerRequest:
    return AnswerRequest(request=request, epoch=epoch, completed=False, reason=reason)
