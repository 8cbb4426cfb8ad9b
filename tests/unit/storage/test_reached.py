"""What complete epochs hold is read once, and is given up only with the last epoch that holds it."""

from __future__ import annotations

import pytest

from cutline.errors import DamagedRecordError
from cutline.model.ids import Epoch
from cutline.storage.reached import ReachedContent

HELD = {1: ["a", "b"], 2: ["b", "c"], 3: ["c", "c", "d"]}


def epochs(*numbers: int) -> list[Epoch]:
    return [Epoch(number) for number in numbers]


def test_content_is_lost_with_the_last_epoch_that_reaches_it() -> None:
    content = ReachedContent(lambda epoch: HELD[epoch])
    assert content.update(epochs(1, 2)) == set()
    assert all(one in content for one in "abc") and "d" not in content
    assert content.update(epochs(2, 3)) == {"a"}
    assert "a" not in content and "b" in content
    assert content.update(epochs(3)) == {"b"}
    assert content.update([]) == {"c", "d"}
    assert content.update(epochs(1)) == set() and "a" in content


def test_an_epoch_is_read_once() -> None:
    read: list[int] = []

    def load(epoch: Epoch) -> list[str]:
        read.append(epoch)
        return HELD[epoch]

    content = ReachedContent(load)
    for last in (1, 2, 3, 3):
        content.update(epochs(*range(1, last + 1)))
    assert read == [1, 2, 3]


def test_nothing_is_lost_while_an_epoch_cannot_be_read() -> None:
    damaged = {2}

    def load(epoch: Epoch) -> list[str]:
        if epoch in damaged:
            raise DamagedRecordError("a record cannot be read")
        return HELD[epoch]

    content = ReachedContent(load)
    content.update(epochs(1))
    with pytest.raises(DamagedRecordError):
        content.update(epochs(2))
    assert "a" in content and "b" in content
    damaged.clear()
    assert content.update(epochs(2)) == {"a"}
