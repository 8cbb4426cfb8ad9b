"""A spark_checkpoint_dir: what Spark has planned and committed. Spark syncs nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from cutline.model.ids import NO_BATCH, BatchId, OperatorId, Position
from cutline.protocol.history.live_directory import mismatch

#: Per path: how many rows an operator has taken in.
Counts = dict[int, int]
#: Versions of its state that Spark keeps.
VERSIONS_KEPT = 20


@dataclass(slots=True)
class SparkDir:
    """Plans, commits, and the newest versions of the state."""

    #: Per planned batch: how far it reads each input, and for a source how many rows.
    planned: dict[BatchId, tuple[Mapping[OperatorId, Position], int]] = field(default_factory=dict)
    committed: BatchId = NO_BATCH
    states: dict[BatchId, Counts] = field(default_factory=lambda: {NO_BATCH: {}})
    #: Gone, or some of its files are: verification finds out.
    is_lost: bool = False

    def commit(self, batch: BatchId, counts: Counts) -> None:
        self.states[batch] = counts
        self.committed = max(self.committed, batch)
        self.states.pop(BatchId(batch - VERSIONS_KEPT), None)
        self.planned.pop(BatchId(batch - VERSIONS_KEPT), None)

    def snapshot(self) -> SparkDir:
        return replace(self, planned=dict(self.planned), states=dict(self.states))

    def damage(self, last_appended: BatchId, complete: BatchId, *, may_be_behind: bool) -> str | None:
        """As the store's ``live_damage``: by what is there, what the log says, and the newest checkpoint."""
        planned, committed = max(self.planned, default=NO_BATCH), self.committed
        if self.is_lost:
            return "files of Spark's directory are gone or torn"
        return mismatch(
            planned=planned,
            committed=committed,
            last_appended=last_appended,
            complete=complete,
            may_be_behind=may_be_behind,
        )

    def lose_power(self, rng: Random) -> None:
        """The last commits and plans may be gone; a file that is half there makes the directory useless."""
        chance = rng.random()
        if chance < 0.4:
            return
        if chance < 0.55:
            self.is_lost = True
            return
        oldest = min(self.states)
        committed = BatchId(max(self.committed - rng.randint(0, 2), oldest))
        self.states = {batch: counts for batch, counts in self.states.items() if batch <= committed}
        self.committed = committed
        kept_plans = committed + rng.randint(0, 2)
        self.planned = {batch: plan for batch, plan in self.planned.items() if batch <= kept_plans}
