"""The suite that every sink must pass. It is shipped, so that authors of plug-in sinks can run it on theirs.

    class TestMySink(SinkConformance):
        def make_sink(self, tmp_path): return MySink(tmp_path / "target")
        def read_rows(self, tmp_path): return [...]  # what readers of the target see now

The crash tests load the subclass in another process, so its file must be importable without pytest's fixtures.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cutline.connectors.reading import read
from cutline.errors import FencedError, SinkError
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, Generation
from cutline.ports.sinks import Claimable
from cutline.testing.conformance.sink_case import FIRST, RICH, RICH_ROW, SIMPLE, Case, Row, SinkSuite, rows
from cutline.testing.conformance.sink_kills import SinkKills

__all__ = [
    "FIRST",
    "RICH",
    "RICH_ROW",
    "SIMPLE",
    "Case",
    "Row",
    "SinkBehaviour",
    "SinkConformance",
    "SinkKills",
    "SinkSuite",
    "rows",
]


class SinkBehaviour(SinkSuite):
    """All tests without kills."""

    # ------------------------------------------------------------------ staging

    def test_staged_rows_are_invisible(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2, 3))
        assert self.ids(tmp_path) == []
        case.sink.prepare(Epoch(1), [staged])
        assert self.ids(tmp_path) == []
        assert case.sink.published() is None

    def test_an_empty_task_stages_no_piece(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        assert case.stage(0, [], []).pieces == []

    def test_staged_rows_survive_a_restart(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2))
        case.open(self.make_sink(tmp_path))
        case.commit(1, staged)
        assert self.ids(tmp_path) == [1, 2]

    def test_of_two_attempts_at_a_batch_only_the_named_one_is_published(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        case.stage(0, rows(1, 2))
        second = case.stage(0, rows(1, 2))
        case.commit(1, second)
        assert self.ids(tmp_path) == [1, 2]

    def test_an_aborted_batch_never_appears_and_aborting_twice_is_fine(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        aborted, kept = case.stage(0, rows(1, 2)), case.stage(1, rows(3))
        case.sink.abort([aborted])
        case.sink.abort([aborted])
        case.open(self.make_sink(tmp_path))
        case.sink.abort([aborted])
        case.commit(1, kept)
        assert self.ids(tmp_path) == [3]

    def test_aborting_one_attempt_leaves_the_other(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        first, second = case.stage(0, rows(1)), case.stage(0, rows(1))
        case.sink.abort([first])
        case.commit(1, second)
        assert self.ids(tmp_path) == [1]

    def test_aborting_what_is_published_takes_nothing_away(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2))
        case.commit(1, staged)
        case.sink.abort([staged])
        assert self.ids(tmp_path) == [1, 2]

    # ------------------------------------------------------------------ publishing

    def test_commit_publishes_exactly_the_epoch(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        first, second, later = case.stage(0, rows(1)), case.stage(1, rows(2, 3)), case.stage(2, rows(4))
        case.sink.prepare(Epoch(2), [first, second, later])
        case.commit(1, first, second)
        assert self.ids(tmp_path) == [1, 2, 3]
        case.commit(2, later)
        assert self.ids(tmp_path) == [1, 2, 3, 4]

    def test_committing_twice_publishes_once(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2), rows(3))
        permit = case.commit(1, staged)
        case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1, 2, 3]

    def test_committing_again_after_a_restart_publishes_once(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1, 2))
        permit = case.commit(1, staged)
        case.open(self.make_sink(tmp_path))
        case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1, 2]

    def test_epochs_publish_in_order_and_published_tells(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        assert case.sink.published() is None
        # Epochs grow but need not be consecutive: aborted ones leave gaps.
        for batch, epoch in enumerate((1, 2, 5)):
            case.publish(epoch, batch, rows(epoch))
            assert case.sink.published() == epoch
        fresh = self.make_sink(tmp_path)
        fresh.open(case.context)
        assert fresh.published() == 5
        assert self.ids(tmp_path) == [1, 2, 5]

    def test_an_old_epoch_committed_again_changes_nothing(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = case.stage(0, rows(1))
        permit = case.commit(1, staged)
        case.publish(2, 1, rows(2))
        case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1, 2]
        assert case.sink.published() == 2

    def test_an_empty_epoch_is_fine(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        case.commit(1)
        case.publish(2, 0, [], [])
        assert self.ids(tmp_path) == []
        case.publish(3, 1, rows(1))
        case.commit(4)
        assert self.ids(tmp_path) == [1]
        assert case.sink.published() in (3, 4)

    def test_many_tasks_and_many_batches_make_one_epoch(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        staged = [case.stage(batch, *(rows(100 * batch + task) for task in range(12))) for batch in range(4)]
        case.commit(1, *staged)
        assert self.ids(tmp_path) == [100 * batch + task for batch in range(4) for task in range(12)]

    def test_batches_of_an_older_generation_are_published_with_those_of_a_newer_one(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        old = case.stage(0, rows(1))
        case.generation = Generation(2)
        case.open(self.make_sink(tmp_path))
        case.commit(1, old, case.stage(1, rows(2)))
        assert self.ids(tmp_path) == [1, 2]

    def test_every_type_comes_back_as_it_went(self, tmp_path: Path) -> None:
        case = self.start(tmp_path, self.rich_schema)
        case.publish(1, 0, self.rich_rows)
        found = sorted(self.read_rows(tmp_path), key=lambda row: int(row["id"]))
        assert found == self.rich_rows

    # ------------------------------------------------------------------ rewinding

    def test_readers_get_whole_epochs(self, tmp_path: Path) -> None:
        case = self.readable(tmp_path)
        assert self.seen(tmp_path) == (NO_EPOCH, [])
        case.publish(3, 0, rows(1, 2))
        case.publish(5, 1, rows(3), rows(4))
        case.stage(2, rows(9))
        assert self.seen(tmp_path) == (5, [1, 2, 3, 4])
        owner = read(self.make_sink(tmp_path))
        assert (owner.flow, owner.sink) == (case.context.flow, case.context.sink)

    def test_readers_get_what_is_new_and_what_was_or_are_told_that_nobody_knows(self, tmp_path: Path) -> None:
        case = self.readable(tmp_path)
        for epoch in (3, 5, 6):
            case.publish(epoch, epoch, rows(epoch))
        for request, expected in (
            ({"after": 3}, (6, [5, 6])),
            ({"after": 6}, (6, [])),
            ({"as_of": 5}, (5, [3, 5])),
            ({"as_of": 2}, (NO_EPOCH, [])),
            ({"after": 3, "as_of": 5}, (5, [5])),
        ):
            try:
                assert self.seen(tmp_path, **request)[1] == expected[1], request
            except SinkError as error:
                assert "told" in error.what or "cannot be read" in error.what  # noqa: PT017 (a sink may do either)

    def test_readers_are_told_of_what_was_taken_back(self, tmp_path: Path) -> None:
        case = self.readable(tmp_path)
        if not case.sink.can_rewind:
            pytest.skip("the sink declares that it cannot rewind")
        for epoch in (3, 5, 6):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(3))
        case.previous = Epoch(3)
        assert self.seen(tmp_path) == (3, [3])
        case.publish(8, 8, rows(8))
        assert self.seen(tmp_path) == (8, [3, 8])
        with pytest.raises(SinkError) as told:
            self.seen(tmp_path, after=5)
        assert getattr(told.value, "still", 3) == 3

    def test_rewind_hides_later_epochs_and_higher_ones_publish_again(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        for epoch in (1, 2, 3):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(1))
        assert self.ids(tmp_path) == [1]
        assert case.sink.published() == 1
        # The flow is restored to batch 1 in a new generation, which repeats the same batches.
        case.through, case.previous, case.generation = BatchId(1), Epoch(1), Generation(2)
        case.publish(4, 2, rows(2))
        case.publish(5, 3, rows(3))
        assert self.ids(tmp_path) == [1, 2, 3]
        assert case.sink.published() == 5

    def test_rewinding_twice_is_rewinding_once(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        for epoch in (1, 2, 3):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(2))
        case.sink.rewind(Epoch(2))
        case.open(self.make_sink(tmp_path))
        case.sink.rewind(Epoch(2))
        assert self.ids(tmp_path) == [1, 2]
        case.sink.rewind(Epoch(1))
        assert self.ids(tmp_path) == [1]

    def test_rewind_to_an_epoch_without_rows_goes_to_the_one_before(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        case.publish(1, 1, rows(1))
        case.commit(2)
        case.publish(4, 2, rows(4))
        case.sink.rewind(Epoch(3))
        assert self.ids(tmp_path) == [1]

    def test_rewind_to_nothing_empties_the_target(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        case.sink.rewind(NO_EPOCH)
        case.publish(1, 0, rows(1))
        case.sink.rewind(NO_EPOCH)
        assert self.ids(tmp_path) == []
        assert case.sink.published() is None
        case.through, case.previous = NO_BATCH, NO_EPOCH
        case.publish(2, 0, rows(1))
        assert self.ids(tmp_path) == [1]

    def test_rewinding_after_a_rewind_follows_the_new_history(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        for epoch in (1, 2, 3):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(1))
        for epoch in (4, 5):
            case.publish(epoch, epoch, rows(epoch))
        case.sink.rewind(Epoch(4))
        assert self.ids(tmp_path) == [1, 4]
        case.sink.rewind(Epoch(3))  # 2 and 3 are no longer part of the history
        assert self.ids(tmp_path) == [1]
        assert case.sink.published() == 1

    def test_a_late_commit_of_a_rewound_epoch_is_fenced(self, tmp_path: Path) -> None:
        case = self.rewindable(tmp_path)
        case.publish(1, 1, rows(1))
        staged = case.stage(2, rows(2))
        permit = case.commit(2, staged)
        case.sink.rewind(Epoch(1))
        case.open(self.make_sink(tmp_path))
        with pytest.raises(FencedError):
            case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1]
        # Also after the new history has published more: the epoch must not be mistaken for a published one.
        case.through, case.previous, case.generation = BatchId(1), Epoch(1), Generation(2)
        case.publish(3, 2, rows(3))
        with pytest.raises((FencedError, SinkError)):
            case.sink.commit(permit, [staged], {})
        assert self.ids(tmp_path) == [1, 3]

    # ------------------------------------------------------------------ what must be refused

    def test_who_was_replaced_publishes_nothing_more(self, tmp_path: Path) -> None:
        """A process that was believed dead still holds a permit when another one takes over."""
        old = self.start(tmp_path)
        if not isinstance(old.sink, Claimable):
            pytest.skip("the sink declares that it cannot be claimed")
        assert old.sink.claimed() == ""
        old.sink.claim("first", expected="")
        old.publish(1, 1, rows(1))
        late = old.stage(2, rows(2))
        token, permit = old.sink.prepare(Epoch(2), [late]), old.permit(2, [late])
        new = self.start(tmp_path)
        assert isinstance(new.sink, Claimable)
        before = new.sink.claimed()
        assert before.partition(" ")[2] == "first"
        new.sink.claim("second", expected=before)
        assert new.sink.claimed().partition(" ")[2] == "second"
        with pytest.raises(FencedError):
            old.sink.commit(permit, [late], token)
        new.previous, new.through, new.generation = Epoch(1), BatchId(1), Generation(2)
        new.publish(3, 2, rows(3))
        with pytest.raises((FencedError, SinkError)):
            old.sink.commit(permit, [late], token)
        if old.sink.can_rewind:
            with pytest.raises(FencedError):
                old.sink.rewind(Epoch(1))
        assert self.ids(tmp_path) == [1, 3]

    def test_of_two_starts_that_saw_the_same_claim_one_fails(self, tmp_path: Path) -> None:
        """Two storages of one flow are started at once; both have found the sink as an earlier start left it."""
        earlier = self.start(tmp_path)
        if not isinstance(earlier.sink, Claimable):
            pytest.skip("the sink declares that it cannot be claimed")
        earlier.sink.claim("earlier", expected="")
        one, other = self.start(tmp_path), self.start(tmp_path)
        assert isinstance(one.sink, Claimable)
        assert isinstance(other.sink, Claimable)
        seen = one.sink.claimed()
        assert other.sink.claimed() == seen
        one.sink.claim("one", expected=seen)
        with pytest.raises(FencedError):
            other.sink.claim("other", expected=seen)
        assert one.sink.claimed().partition(" ")[2] == "one"
        # The loser has not disturbed the winner.
        one.publish(1, 1, rows(1))
        assert self.ids(tmp_path) == [1]

    def test_rows_of_another_schema_are_refused(self, tmp_path: Path) -> None:
        started = self.start(tmp_path)
        if isinstance(started.sink, Claimable):  # some record their schema with the claim
            started.sink.claim("", expected=started.sink.claimed())
        changed = pa.schema([pa.field("id", pa.string()), pa.field("name", pa.string())])
        with pytest.raises(SinkError, match="id"):
            self.make_sink(tmp_path).open(self.context(changed))
        more = SIMPLE.append(pa.field("extra", pa.int64()))
        with pytest.raises(SinkError, match="extra"):
            self.make_sink(tmp_path).open(self.context(more))

    def test_another_flow_is_refused_or_does_not_disturb(self, tmp_path: Path) -> None:
        case = self.start(tmp_path)
        case.publish(1, 0, rows(1))
        if not self.can_be_shared:
            with pytest.raises(SinkError, match="orders"):
                self.start(tmp_path, flow="strangers")
            return
        other = self.start(tmp_path, flow="strangers")
        assert other.sink.published() is None
        other.publish(1, 0, rows(101))
        case.publish(2, 1, rows(2))
        other.publish(2, 1, rows(102))
        assert self.ids(tmp_path) == [1, 2, 101, 102]
        assert (case.sink.published(), other.sink.published()) == (2, 2)

    def test_an_epoch_of_another_history_is_refused(self, tmp_path: Path) -> None:
        """The flow's storage was deleted, and the flow began again with epoch 1 on the old target."""
        case = self.start(tmp_path)
        case.publish(1, 0, rows(1))
        case.publish(2, 1, rows(2))
        anew = self.start(tmp_path)
        with pytest.raises(SinkError, match="history"):
            anew.publish(1, 0, rows(1))
        assert self.ids(tmp_path) == [1, 2]


class SinkConformance(SinkBehaviour, SinkKills):
    """The whole suite: subclass it and define ``make_sink`` and ``read_rows``."""
