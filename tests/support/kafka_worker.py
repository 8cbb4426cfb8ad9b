"""A process that commits an epoch and stops itself (SIGSTOP) on the way, as a frozen machine does.

``python -m tests.support.kafka_worker`` reads a pickled order and prints how the commit ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

from cutline.connectors.kafka.transactions import Transactions
from cutline.connectors.sink_base import OpenedSink
from cutline.errors import CutlineError
from tests.support.kafka_target import make_kafka

#: After all was sent, before the commit.
BEFORE_COMMIT = "before-commit"


def main() -> None:
    order = pickle.loads(sys.stdin.buffer.read())
    where: str = order["where"]

    def reach(self: OpenedSink, point: str) -> None:
        if point == where:
            os.kill(os.getpid(), signal.SIGSTOP)

    commit = Transactions.commit

    def slow_commit(self: Transactions) -> None:
        if where == BEFORE_COMMIT and order["is_claimed"]:
            self.flush()
            os.kill(os.getpid(), signal.SIGSTOP)
        commit(self)

    setattr(OpenedSink, "reach", reach)  # noqa: B010 (to mypy a method is not to be replaced)
    sink = make_kafka(Path(order["place"]), **order["options"])
    sink.open(order["context"])
    sink.claim("frozen", expected=sink.claimed())
    setattr(Transactions, "commit", slow_commit)  # noqa: B010
    order["is_claimed"] = True
    print("ready", flush=True)
    for _ in range(3):
        try:
            sink.commit(order["permit"], order["staged"], {})
        except CutlineError as error:
            print(type(error).__name__, flush=True)
        else:
            print("published", flush=True)


if __name__ == "__main__":
    main()
