"""What readers of a sink see, and the ledger in its target. Every judgement is the protocol's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.model.staging import StagedBatch
from cutline.protocol.publish import sink_ledger
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.sink_ledger import RewindVerdict, SinkLedger, Verdict
from cutline.testing.simulator.storage.log import Rows
from cutline.testing.simulator.storage.spark_dir import Counts
from cutline.testing.simulator.world import Violation

FLOW = FlowName("simulated")


def staged_rows(staged: Iterable[StagedBatch]) -> Rows:
    return tuple(row for batch in staged for piece in batch.pieces for row in piece["rows"])


class SinkTarget:
    """One sink's target. It outlives the hosts of the flow."""

    def __init__(self, sink: SinkId, operator: OperatorId, *, is_immediate: bool) -> None:
        self.sink = sink
        self.operator = operator
        self.is_immediate = is_immediate
        #: It takes no commits for a while.
        self.is_away = False
        self.ledger = SinkLedger(flow=FLOW, sink=sink)
        #: Stored with the newest claim.
        self._history = ""
        #: Output in the target that no commit has published. A commit moves it to where readers see it.
        self._staged: set[tuple[Generation, BatchId]] = set()
        #: Per published epoch, or batch of a sink that publishes immediately: its rows.
        self.content: dict[Epoch, Rows] = {}
        #: Per path: the next row that readers have not seen.
        self.next_row: Counts = {}
        #: What stood here before the commits that are visible and not synced.
        self._before: tuple[SinkLedger, dict[Epoch, Rows], Counts] | None = None
        #: What these commits have taken of the staged output.
        self._taken: set[tuple[Generation, BatchId]] = set()

    def stage(self, batch: StagedBatch) -> None:
        """Synced when it returns."""
        if batch.pieces:
            self._staged.add((batch.generation, batch.batch))

    # ------------------------------------------------------------------ what the process that holds the claim does

    def claimed(self) -> str:
        return f"{self.ledger.claim} {self._history}" if self.ledger.claim else ""

    def claim(self, token: str, history: str, *, expected: str) -> bool:
        """False: another start was faster. Synced when it returns."""
        if self.claimed() != expected:
            return False
        self.sync()
        self.ledger = sink_ledger.claimed(self.ledger, token)
        self._history = history
        return True

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: str) -> Verdict:
        """Make rows visible if the ledger lets them; they are durable after ``sync``. Without rows nothing is left."""
        rows = staged_rows(staged)
        if not rows:
            return Verdict.ALREADY
        digest = repr(rows)
        verdict = sink_ledger.judge(self.ledger, permit, digest, claim=token)
        if verdict is not Verdict.PUBLISH:
            return verdict
        if self._before is None:
            self._before = (self.ledger, dict(self.content), dict(self.next_row))
        self._take_staged(staged)
        for path, first, count in rows:
            expected = self.next_row.get(path, 0)
            if first != expected:
                raise Violation(
                    f"sink {self.sink} publishes rows {first}… of path {path} in epoch {permit.epoch}, "
                    f"readers have seen {expected}: {'lost' if first > expected else 'doubled'}"
                )
            self.next_row[path] = first + count
        self.content[permit.epoch] = rows
        self.ledger = sink_ledger.published(self.ledger, permit, digest)
        if self.ledger.published != max(self.content):
            raise Violation(f"sink {self.sink} publishes epoch {permit.epoch} after epoch {max(self.content)}")
        return verdict

    def _take_staged(self, staged: Sequence[StagedBatch]) -> None:
        """What was published and then rewound is not staged any more: its batches must run again."""
        wanted = {(one.generation, one.batch) for one in staged if one.pieces}
        gone = sorted(wanted - self._staged)
        if gone:
            generation, batch = gone[0]
            raise Violation(f"what {self.sink} had staged of batch {batch} of generation {generation} is gone")
        self._staged -= wanted
        self._taken |= wanted

    def sync(self) -> None:
        self._before = None
        self._taken = set()

    def rewind(self, epoch: Epoch, token: str) -> RewindVerdict:
        """Readers see what they saw when ``epoch`` was newest. Synced when it returns."""
        verdict = sink_ledger.judge_rewind(self.ledger, epoch, claim=token)
        if verdict is RewindVerdict.REWIND:
            self.sync()
            self.ledger = sink_ledger.rewind(self.ledger, epoch)
            self.content = {one: rows for one, rows in self.content.items() if one <= epoch}
            self.next_row = {}
            for one in sorted(self.content):
                for path, first, count in self.content[one]:
                    self.next_row[path] = first + count
            if self.ledger.published != max(self.content, default=NO_EPOCH):
                raise Violation(f"sink {self.sink} says that it has {self.ledger.published} after a rewind to {epoch}")
        return verdict

    # ------------------------------------------------------------------ a power cut

    def lose_power(self, rng: Random) -> None:
        """A commit that is not synced is there or not; a database or a table's log is never half there."""
        if self._before is not None and rng.random() < 0.5:
            self.ledger, self.content, self.next_row = self._before
            self._staged |= self._taken
        self.sync()
