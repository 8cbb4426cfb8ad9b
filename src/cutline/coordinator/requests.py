"""Who waits for which checkpoint."""

from __future__ import annotations

from concurrent.futures import Future

from cutline.errors import CheckpointFailedError
from cutline.model.ids import Epoch, FlowName
from cutline.protocol.messages.coordinator import AnswerRequest


class Requests:
    """Requests for a checkpoint that are not answered yet."""

    def __init__(self, flow: FlowName) -> None:
        self._flow = flow
        self._open: dict[str, Future[Epoch]] = {}
        self._made = 0

    def open(self) -> tuple[str, Future[Epoch]]:
        """A new request: its name, and the future that gives the epoch."""
        self._made += 1
        request, future = f"r{self._made}", Future[Epoch]()
        self._open[request] = future
        return request, future

    def answer(self, action: AnswerRequest) -> None:
        future = self._open.pop(action.request, None)
        if future is None:
            return
        if action.completed:
            future.set_result(action.epoch)
        else:
            future.set_exception(
                CheckpointFailedError(
                    f"the checkpoint was not taken: {action.reason}",
                    next_step="the flow continues; request another one, or see the status for the cause",
                    flow=self._flow,
                    epoch=action.epoch or None,
                )
            )

    def cancel(self) -> None:
        for future in list(self._open.values()):
            future.cancel()
