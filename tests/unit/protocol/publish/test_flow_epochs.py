"""Which epoch the tables of a flow have in common: single cases, and random lives of a flow with several sinks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cutline.model.history import Takeover
from cutline.model.ids import NO_EPOCH, Epoch, Generation
from cutline.protocol.publish.flow_epochs import (
    Answer,
    Reach,
    Standing,
    common_epoch,
    is_unchanged,
    judge_epoch,
    may_be_rewound,
    reach_to_store,
)
from cutline.protocol.publish.immediate import place_of


def standing(sink: str = "a", published: int = 0, **others: object) -> Standing:
    return Standing(flow="shop", sink=sink, published=Epoch(published), **others)  # type: ignore[arg-type]


def claim(token: str, *starts: tuple[str, int]) -> str:
    """``starts``: the letter that makes an identity, and the epoch that the start continued from."""
    takeovers = [
        Takeover(generation=Generation(1), identity=letter * 32, epoch=Epoch(epoch), started_ms=0)
        for letter, epoch in starts
    ]
    return f"{token} {msgspec.json.encode(takeovers).decode()}"


def with_reach(one: Standing, epoch: int, *, at_start: bool = False) -> Standing:
    reach = reach_to_store(one, Epoch(epoch), is_per_operator=False, at_start=at_start)
    return replace(one, reach=reach or one.reach)


def test_the_slowest_sink_decides() -> None:
    assert common_epoch([standing("a", 9), standing("b", 7), standing("c", 8)]) == 7
    assert common_epoch([standing("a", 9), standing("b")]) == NO_EPOCH


def test_epochs_without_rows_count_if_the_sink_has_recorded_them() -> None:
    sparse = with_reach(standing("b", 3, claim="x"), 9)
    assert sparse.reached == 9
    assert common_epoch([standing("a", 9), sparse]) == 9


def test_a_reach_is_void_once_its_ledger_has_changed() -> None:
    sparse = with_reach(standing("b", 3, claim="x"), 9)
    assert replace(sparse, claim="y").reached == 3
    assert replace(sparse, rewound=Epoch(5)).reached == 3
    assert replace(sparse, published=Epoch(11)).reached == 11
    assert replace(sparse, published=Epoch(2)).reached == 2


def test_a_reach_holds_for_the_next_start_as_far_as_that_continued() -> None:
    sparse = with_reach(standing("b", 3, claim=claim("x", ("1", 0), ("2", 8))), 9)
    for starts, reached in (
        ([("1", 0), ("2", 8), ("3", 9)], 9),
        ([("1", 0), ("2", 8), ("3", 7)], 7),  # restored
        ([("1", 0), ("2", 8), ("3", 7), ("4", 9)], 7),
        ([("1", 0), ("3", 8)], 8),  # it took the place of a start that had no checkpoint
        ([("1", 0), ("2", 8), ("3", 2)], 3),
        ([("5", 9)], 3),  # of another flow's storage
    ):
        assert replace(sparse, claim=claim("y", *starts)).reached == reached, starts
    assert replace(sparse, claim=claim("y", ("2", 9)), rewound=Epoch(4)).reached == 3


def test_a_late_reach_does_not_set_a_sink_back() -> None:
    assert reach_to_store(standing("b", 14), Epoch(13), is_per_operator=False, at_start=False) is None


def test_rows_that_a_sink_keeps_of_a_given_up_history_do_not_count() -> None:
    kept = with_reach(standing("b", 12, claim="x"), 10, at_start=True)
    assert kept.reached == 10
    assert with_reach(kept, 13).reached == 13


def test_sinks_that_a_start_has_taken_over_and_others_share_what_it_continued_from() -> None:
    taken, other = claim("new", ("1", 0), ("2", 7)), claim("old", ("1", 0))
    both = [standing("a", 9, claim=taken), standing("b", 9, claim=other)]
    assert common_epoch(both) == 7
    assert judge_epoch(both, Epoch(8)).answer is Answer.TAKEN_OVER
    assert common_epoch([both[0], replace(both[1], claim=claim("other", ("1", 0), ("2", 7)))]) == 9
    # A sink that was added to the flow later knows only the starts since.
    assert common_epoch([both[0], standing("c", 8, claim=claim("added", ("2", 7)))]) == 8
    # One without a history takes no part in the comparison.
    assert common_epoch([both[0], standing("c", 8)]) == 8


def test_why_an_epoch_cannot_be_read() -> None:
    slow = standing("b", 7)
    found = judge_epoch([standing("a", 9), slow], Epoch(8))
    assert (found.answer, found.of) == (Answer.NOT_YET, slow)
    newest_only = standing("c", 9, oldest=Epoch(9))
    found = judge_epoch([standing("a", 9), newest_only], Epoch(8))
    assert (found.answer, found.of) == (Answer.TOO_OLD, newest_only)
    assert judge_epoch([standing("a", 9, oldest=Epoch(2)), slow], Epoch(7)).answer is Answer.YES


def test_publications_in_between_change_nothing_and_rewinds_do() -> None:
    one = standing("a", 9, claim="x")
    assert is_unchanged([one], [replace(one, published=Epoch(12))])
    for changed in (
        replace(one, published=Epoch(8)),
        replace(one, rewound=Epoch(9)),
        replace(one, claim="y"),
        replace(one, sink="b"),
    ):
        assert not is_unchanged([one], [changed])


def test_a_number_that_no_sink_shows_may_be_of_a_rewound_epoch() -> None:
    both = [standing("a", 14, rewound=Epoch(12)), standing("b", 13)]
    assert may_be_rewound(both, Epoch(11), [Epoch(10), Epoch(9)])
    assert not may_be_rewound(both, Epoch(11), [Epoch(10), Epoch(11)])
    assert not may_be_rewound(both, Epoch(13), [Epoch(10), Epoch(9)])
    sparse = [standing("a", 10, rewound=Epoch(12)), with_reach(standing("b", 8), 11)]
    assert not may_be_rewound(sparse, Epoch(11), [Epoch(10), Epoch(8)])


def test_numbers_of_batches_are_no_epochs() -> None:
    assert standing("a", place_of(Generation(3), 4)).is_immediate  # type: ignore[arg-type]
    assert not standing("a", 4).is_immediate


def test_a_flow_that_takes_checkpoints_by_operator_says_so() -> None:
    reach = Reach(epoch=Epoch(3), published=Epoch(3), rewound=NO_EPOCH, token="x", is_per_operator=True)
    assert standing("a", 5, claim="x", reach=reach).is_per_operator
    assert not standing("a", 5, claim="y", reach=reach).is_per_operator


# ---------------------------------------------------------------------- random lives

#: The epochs of a history, each with the sinks that have rows in it.
History = list[tuple[int, frozenset[int]]]


@dataclass
class Target:
    """One table: which epochs' rows it shows, and what it says about itself."""

    shows: list[int] = field(default_factory=list)
    rewound: int = 0
    claim: str = ""
    starts: list[tuple[str, int]] = field(default_factory=list)
    reach: Reach | None = None
    #: What the coordinator knows: every epoch up to here is committed.
    done: int = 0
    #: The flow no longer has this sink; readers still name its table.
    is_dropped: bool = False

    def standing(self, name: int) -> Standing:
        return Standing(
            flow="f",
            sink=str(name),
            published=Epoch(max(self.shows, default=0)),
            rewound=Epoch(self.rewound),
            claim=self.claim,
            reach=self.reach,
        )

    def record(self, name: int, epoch: int, *, at_start: bool = False) -> None:
        found = reach_to_store(self.standing(name), Epoch(epoch), is_per_operator=False, at_start=at_start)
        self.reach = found or self.reach


class Life:
    """A flow whose checkpoints, commits and restores are steps in a random order; kills leave a start half done."""

    def __init__(self, random: Random, sinks: int) -> None:
        self.random = random
        self.targets = [Target() for _ in range(sinks)]
        self.history: History = []
        self.before: History = []
        self.newest = 0
        self.start: Iterator[bool] | None = self._start(restore=False)

    def step(self) -> None:
        if self.start is not None:
            if self.random.random() < 0.1:  # killed; the next start finds what this one left
                self.start = self._start(restore=self.random.random() < 0.5)
            elif next(self.start, None) is None:
                self.start = None
                self.before = self.history
            return
        match self.random.randrange(8):
            case 0 | 1 | 2:
                self.newest += 1
                rows = frozenset(name for name in range(len(self.targets)) if self.random.random() < 0.4)
                self.history = self.before = [*self.history, (self.newest, rows)]
            case 3 | 4 | 5 | 6:
                self._commit(self.random.randrange(len(self.targets)))
            case _:
                self.start = self._start(restore=self.random.random() < 0.6)

    def _commit(self, name: int) -> None:
        target = self.targets[name]
        if target.is_dropped:
            return
        due = [one for one in self.history if one[0] > target.done]
        if not due:
            return
        epoch, rows = due[0]
        target.done = epoch
        if name in rows:
            target.shows.append(epoch)
        elif self.random.random() < 0.8:  # otherwise it was lost
            target.record(name, epoch)

    def _start(self, *, restore: bool) -> Iterator[bool]:
        identity = f"{self.random.getrandbits(128):032x}"
        kept = self.history[: self.random.randrange(len(self.history) + 1)] if restore else self.history
        # Unless a start has rewound a sink, the next one may as well continue from where the flow was.
        self.before, self.history = self.before if self.before[: len(kept)] == kept else self.history, kept
        point = kept[-1][0] if kept else 0
        if self.random.random() < 0.05:
            self.random.choice(self.targets).is_dropped = True
        return self._steps(identity, point)

    def _steps(self, identity: str, point: int) -> Iterator[bool]:
        members = [(name, target) for name, target in enumerate(self.targets) if not target.is_dropped]
        for _, target in members:
            target.starts = [*target.starts, (identity, point)]
            takeovers = [
                Takeover(generation=Generation(1), identity=letter, epoch=Epoch(epoch), started_ms=0)
                for letter, epoch in target.starts
            ]
            target.claim = f"{self.random.getrandbits(64):x} {msgspec.json.encode(takeovers).decode()}"
            yield True
        for _, target in members:
            if max(target.shows, default=0) > point:
                target.rewound = max(target.rewound, *target.shows)
                target.shows = [epoch for epoch in target.shows if epoch <= point]
            target.done = min(target.done, point)
            yield True
        for name, target in members:
            target.record(name, target.done, at_start=True)
            yield True

    def check(self) -> None:
        standings = [target.standing(name) for name, target in enumerate(self.targets)]
        epoch = common_epoch(standings)
        shown = [[one for one in target.shows if one <= epoch] for target in self.targets]
        assert any(shown == self._cut(history, epoch) for history in (self.history, self.before)), (epoch, standings)

    def _cut(self, history: History, epoch: int) -> list[list[int]]:
        return [[one for one, rows in history if one <= epoch and name in rows] for name in range(len(self.targets))]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 4))
def test_every_common_epoch_is_one_cut_of_one_history(seed: int, sinks: int) -> None:
    # Not a random generator of hypothesis: its small numbers would kill every start.
    life = Life(Random(seed), sinks)
    for _ in range(80):
        life.step()
        life.check()


def test_a_flow_that_rests_has_its_newest_epoch_in_common() -> None:
    """Otherwise the random lives would hold for an epoch that is always 0."""
    life = Life(Random(1), 3)
    life.random.random = lambda: 0.5  # type: ignore[method-assign]  # no kill, no lost reach
    for _ in range(200):
        life.step()
    while life.start is not None or not life.history:
        life.step()
    for name in range(3):
        for _ in life.history:
            life._commit(name)
    standings = [target.standing(name) for name, target in enumerate(life.targets)]
    assert common_epoch(standings) == life.history[-1][0] > 0
