"""What a consumer returns in one page: messages, and among them where the partition ends."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError

from cutline.connectors.kafka.fetching import _pages, _Place
from cutline.errors import NotDone


class _Message:
    def __init__(self, offset: int, code: int | None = None, partition: int = 0) -> None:
        self._offset, self._error, self._partition = offset, None if code is None else KafkaError(code), partition

    def error(self) -> KafkaError | None:
        return self._error

    def offset(self) -> int:
        return self._offset

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return self._partition


class _Consumer:
    """Returns all that has arrived since it was asked last."""

    def __init__(self, *arrivals: list[_Message]) -> None:
        self._arrivals = list(arrivals)
        self._now: list[_Message] = []

    def poll(self, _: float) -> _Message:
        self._now = self._now or self._arrivals.pop(0)
        return self._now.pop(0)

    def consume(self, count: int, timeout: float) -> list[_Message]:
        taken, self._now = self._now[:count], self._now[count:]
        return taken


def end(offset: int) -> _Message:
    return _Message(offset, KafkaError._PARTITION_EOF)


def read(first: int, until: int, *arrivals: list[_Message]) -> list[int]:
    client: Any = _Consumer(*arrivals)
    pages = _pages(client, "127.0.0.1:9", _Place("orders", 0, first), until)
    return [message.offset() for page, _ in pages for message in page]


def test_the_end_of_the_partition_may_come_in_the_page_of_the_last_messages() -> None:
    # Offset 3 is the marker of a transaction.
    assert read(1, 4, [_Message(1), _Message(2), end(4)]) == [1, 2]
    assert read(1, 4, [_Message(1)], [_Message(2), end(4)]) == [1, 2]
    assert read(1, 4, [end(1), _Message(1), _Message(2)], [end(4)]) == [1, 2]
    assert read(1, 4, [end(4)]) == []


def test_what_was_fetched_for_another_range_is_refused() -> None:
    for page in ([_Message(0), end(4)], [_Message(2, partition=1)], [_Message(1), _Message(2, partition=1)]):
        with pytest.raises(NotDone, match="offset 1 was requested"):
            read(1, 4, page)
    with pytest.raises(NotDone, match="offset 3 was requested"):
        read(1, 9, [_Message(1), _Message(2)], [_Message(1), end(9)])
