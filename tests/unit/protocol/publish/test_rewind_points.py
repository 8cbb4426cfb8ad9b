"""A sink forgets only what no rewind to a checkpoint of the flow needs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.publish.rewind_points import gap_at, thinned


def epochs(*numbers: int) -> list[Epoch]:
    return [Epoch(number) for number in numbers]


@pytest.mark.parametrize(
    ("older", "points", "merges", "oldest"),
    [
        pytest.param(epochs(), epochs(1), [], None, id="nothing is old"),
        pytest.param(epochs(1, 2, 3), None, [], None, id="it is not known what is needed"),
        pytest.param(epochs(1, 2, 3), epochs(), [], 3, id="nothing old is needed"),
        pytest.param(epochs(1, 2, 3), epochs(9), [], 3, id="nor is it here"),
        pytest.param(epochs(1, 2, 3), epochs(2, 9), [], 2, id="an epoch of its own"),
        pytest.param(epochs(2, 4, 6, 8), epochs(5, 9), [(6, 8)], 4, id="between two epochs"),
        pytest.param(epochs(5, 6, 7), epochs(3), [(5, 6), (6, 7)], None, id="before all of them"),
    ],
)
def test_what_is_merged_and_what_is_the_oldest(
    older: list[Epoch], points: list[Epoch] | None, merges: list[tuple[int, int]], oldest: int | None
) -> None:
    found = thinned(older, points)
    assert (list(found.merges), found.oldest) == (merges, oldest)


@dataclass
class Table:
    """Rows by key, and the former rows of each epoch, as the sinks keep them."""

    rows: dict[int, int] = field(default_factory=dict)
    listed: dict[Epoch, Epoch] = field(default_factory=dict)  # epoch -> number of its images
    images: dict[Epoch, dict[int, int | None]] = field(default_factory=dict)
    reach: Epoch = NO_EPOCH

    def publish(self, epoch: Epoch, changes: dict[int, int], *, dense: int, points: list[Epoch]) -> None:
        self.images[epoch] = {key: self.rows.get(key) for key in changes}
        self.rows.update(changes)
        self.listed[epoch] = epoch
        plan = thinned(sorted(self.listed)[: -dense or None], points)
        for one, following in plan.merges:
            first = self.listed.pop(one)
            self.images[first] = {**self.images.pop(self.listed[following]), **self.images[first]}
            self.listed[following] = first
        if plan.oldest is not None:
            self.reach = max(self.reach, plan.oldest)
            self.listed = {epoch: first for epoch, first in self.listed.items() if epoch >= plan.oldest}
            self.images = {first: images for first, images in self.images.items() if first > plan.oldest}

    def gaps(self) -> list[tuple[Epoch, Epoch]]:
        return [(first, epoch) for epoch, first in self.listed.items() if first != epoch]

    def at(self, epoch: Epoch) -> dict[int, int]:
        rows: dict[int, int | None] = dict(self.rows)
        for first in sorted(self.images, reverse=True):
            if first > epoch:
                rows.update(self.images[first])
        return {key: value for key, value in rows.items() if value is not None}


@given(
    steps=st.lists(
        st.tuples(st.dictionaries(st.integers(0, 4), st.integers(0, 9), max_size=3), st.sets(st.integers(0, 30))),
        max_size=30,
    ),
    dense=st.integers(1, 3),
)
def test_whatever_stays_restorable_can_be_rewound_to_exactly(
    steps: list[tuple[dict[int, int], set[int]]], dense: int
) -> None:
    table, seen, points = Table(), {Epoch(0): dict[int, int]()}, set(epochs(0))
    for number, (changes, released) in enumerate(steps, 1):
        epoch = Epoch(number)
        points = {point for point in {*points, epoch} if point not in released or point == epoch}
        if changes:  # an epoch without rows leaves no trace
            table.publish(epoch, changes, dense=dense, points=sorted(points))
        seen[epoch] = dict(table.rows)
        for one, rows in seen.items():
            is_reached = one >= table.reach and gap_at(table.gaps(), one) is None
            assert is_reached or one not in points, "a checkpoint of the flow"
            assert not is_reached or table.at(one) == rows
