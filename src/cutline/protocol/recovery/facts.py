"""What is known when a flow starts: plain data, read by ``cutline.recovery.facts`` or made up by the simulator.

``choose`` decides from these. Facts that are expensive to find out are None, or missing in a mapping, until ``choose``
asks for them with one of the ``Need…`` structs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord, LostInput
from cutline.model.graph import PublishPolicy, RollbackPolicy
from cutline.model.history import Identity, Takeover
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, Generation, OperatorId, Position, SinkId
from cutline.protocol.history.evolution import Changes, Definition
from cutline.protocol.publish.rewind_points import Gap

# ---------------------------------------------------------------------- known from the start


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTo:
    """A restore request: the whole flow must be restored to this epoch."""

    epoch: Epoch
    changes: Changes = field(default_factory=Changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFacts:
    """One sink, open and at rest."""

    sink: SinkId
    operator: OperatorId
    #: Newest epoch whose rows readers see, according to its own ledger; NO_EPOCH if none.
    published: Epoch = NO_EPOCH
    #: The same according to the coordinator's records: an epoch without rows need not leave a trace in the ledger.
    recorded: Epoch = NO_EPOCH
    #: Newest epoch with rows that it was told to publish, by the coordinator's records; None without a record.
    seen: Epoch | None = None
    #: Highest epoch that its target has ever seen, rewound or not; None: not known yet.
    highest: Epoch | None = NO_EPOCH
    on_rollback: RollbackPolicy = "rewind"
    publish: PublishPolicy = "checkpoint"
    can_rewind: bool = True
    #: The oldest epoch that ``rewind`` reaches; None: not known yet.
    oldest_rewind: Epoch | None = NO_EPOCH
    #: Above that, the epochs that it does not reach; known with ``oldest_rewind``.
    rewind_gaps: tuple[Gap, ...] = ()
    #: The newest claim in its target, which the start will replace; empty: none, or it cannot be claimed.
    claim: str = ""
    #: The starts that took it over, oldest first; None: its target does not tell.
    takeovers: tuple[Takeover, ...] | None = None
    #: Of immediate publishing: the number of the newest published batch.
    newest_batch: Epoch = NO_EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpoch:
    """A complete checkpoint in the local tier."""

    epoch: Epoch
    #: None if it cannot be read.
    manifest: Manifest | None
    #: Why it is unusable: its manifest, or a record that a sink has yet to publish, is unreadable. Empty: it is usable.
    problem: str = ""
    #: Operators whose records exist, even if nothing else can be read; filled in only for epochs with a problem.
    recorded: frozenset[OperatorId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFacts:
    """The flow's records in the local tier at one moment."""

    #: All generations, ascending.
    generations: tuple[GenerationRecord, ...] = ()
    #: All epochs that have a manifest, readable or not, ascending.
    epochs: tuple[StoredEpoch, ...] = ()
    #: Per operator of the requested checkpoint: its sinks, as far as its record can be read.
    requested_sinks: Mapping[OperatorId, tuple[SinkId, ...]] = field(default_factory=dict)


# ---------------------------------------------------------------------- asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRecords:
    """The remote tier's answer to a request for its records, which are in the local tier now."""

    #: Why it does not answer; empty: it answered.
    problem: str = ""
    #: Its complete checkpoints. Of those that the local tier lacked before, it now has the records only.
    epochs: frozenset[Epoch] = frozenset()
    #: The local tier afterwards.
    stored: StoredFacts = field(default_factory=StoredFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHistory:
    """The newest generations and the newest checkpoints of the remote tier; nothing was downloaded."""

    #: Why it does not tell; empty: it does.
    problem: str = ""
    #: Ascending, from a generation that the local tier has too, if there is one.
    generations: tuple[GenerationRecord, ...] = ()
    #: With the generations that completed them, ascending, from the newest one that no generation has given up.
    epochs: tuple[tuple[Epoch, Generation], ...] = ()

    @property
    def newest_epoch(self) -> Epoch:
        return self.epochs[-1][0] if self.epochs else NO_EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBefore:
    """How far sinks were when a checkpoint was sealed in the remote tier, as noted there."""

    problem: str = ""
    #: Every sink has published up to here.
    everywhere: Epoch = NO_EPOCH
    #: The newest epoch with rows that each was told to publish.
    seen: Mapping[SinkId, Epoch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """A channel's log that could be read."""

    start: Position
    #: The position of the next entry.
    end: Position
    last_batch: BatchId = NO_BATCH
    #: Per input: how far its operator had read after its last batch.
    positions: Mapping[OperatorId, Position] = field(default_factory=dict)
    #: The number that immediate publishing gives to its end; None without entries.
    place: Epoch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOperator:
    """The live state of an operator of the newest generation: its log and its Spark directory."""

    #: None: the log cannot be read.
    log: LogFacts | None
    #: Why the log cannot be read.
    log_problem: str = ""
    #: Why its query cannot continue in its directory; empty: it can.
    damage: tuple[str, ...] = ()
    #: Per input: from where it reads when it continues, after the last batch that Spark has committed.
    resumes_at: Mapping[OperatorId, Position] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProblem:
    """A server does not answer, so whether an operator's sources still have its input is unknown."""

    operator: OperatorId
    what: str
    next_step: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSince:
    """The input since an epoch that sources can no longer read again."""

    epoch: Epoch
    operators: frozenset[OperatorId]
    #: "remote": asked after the checkpoint's content was downloaded, which may have replaced what was damaged.
    tier: str = "local"
    lost: tuple[LostInput, ...] = ()
    unknown: InputProblem | None = None
    #: The checkpoint does not say how far they had read: it is damaged.
    damage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAhead:
    """The next input that continuing sources can no longer read."""

    lost: tuple[LostInput, ...] = ()
    #: Servers that do not answer; their queries will wait for them.
    unknown: tuple[InputProblem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that could not be built, most likely because what it restores is damaged."""

    #: ``RestorePlan.path`` and ``tier`` of it.
    path: str
    tier: str
    epoch: Epoch
    problem: str
    #: The operator that was restored alone; None: not one alone.
    operator: OperatorId | None = None
    #: False: a file could not be read or written, for a reason that only the problem says.
    is_damage: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFacts:
    """All that is known about a starting flow, after it has fenced earlier processes."""

    definition: Definition
    stored: StoredFacts
    #: Those that are open; a flow may declare more.
    sinks: tuple[SinkFacts, ...] = ()
    restore_to: RestoreTo | None = None
    #: Whether the flow may continue without input that is gone.
    may_lose_input: bool = False
    pins: frozenset[Epoch] = frozenset()
    #: The highest epoch in the coordinator's records.
    last_epoch: Epoch = NO_EPOCH
    #: The highest epoch that completed, by the coordinator's records.
    last_completed: Epoch = NO_EPOCH
    #: Whether any record names a completed epoch, if only the coordinator's history.
    has_completed: bool = False
    has_remote: bool = False
    #: Whether this storage has run the flow before; if not, it may hold a part of what was downloaded.
    has_run: bool = False
    #: Generations that this storage has announced in the remote tier.
    announced: frozenset[Identity] = frozenset()

    #: Asked before anything else by a storage that has run the flow: another host may have taken over since.
    remote_history: RemoteHistory | None = None
    #: Asked first because the local tier has no checkpoint; with retries only if it has no generation either.
    first_remote: RemoteRecords | None = None
    #: Asked with retries, because nothing in the local tier can be used.
    remote: RemoteRecords | None = None
    published_before: Mapping[Epoch, PublishedBefore] = field(default_factory=dict)
    #: Checkpoints whose content was downloaded, and why it could not be; an empty text: it was.
    contents: Mapping[Epoch, str] = field(default_factory=dict)
    remote_epochs: frozenset[Epoch] | None = None
    live: Mapping[OperatorId, LiveOperator] | None = None
    #: Per channel: segments that are read next and missing, as texts.
    missing_segments: Mapping[OperatorId, tuple[str, ...]] | None = None
    input_since: tuple[InputSince, ...] = ()
    input_ahead: InputAhead | None = None
    #: Whether the logs that a flow would begin with hold entries already.
    has_entries: bool | None = None
    trials: tuple[Trial, ...] = ()


# ---------------------------------------------------------------------- what ``choose`` asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedSinkLimits:
    """``SinkFacts.highest`` and ``oldest_rewind`` of every sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedRemoteHistory:
    """``RecoveryFacts.remote_history``. ``is_required``: nothing else tells whether another host has taken over."""

    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedFirstRemote:
    """``RecoveryFacts.first_remote``. ``is_required``: the flow cannot start without the remote tier."""

    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedRemote:
    """``RecoveryFacts.remote``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedPublishedBefore:
    """``RecoveryFacts.published_before`` of an epoch."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedContent:
    """``RecoveryFacts.contents``: the content of this checkpoint, downloaded from the remote tier."""

    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedRemoteEpochs:
    """``RecoveryFacts.remote_epochs``, as far as they can be listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedLive:
    """``RecoveryFacts.live`` of these operators."""

    generation: GenerationRecord
    #: Per operator: its cut batch in its newest complete epoch. In per-operator mode a directory may be behind its log.
    complete: Mapping[OperatorId, BatchId]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedSegments:
    """``RecoveryFacts.missing_segments``, per channel from this position on."""

    first: Mapping[OperatorId, Position]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedInputSince:
    """One of ``RecoveryFacts.input_since``. Operators may have run under another name since (``new_names``)."""

    manifest: Manifest
    operators: frozenset[OperatorId]
    tier: str = "local"
    new_names: Mapping[OperatorId, OperatorId] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedInputAhead:
    """``RecoveryFacts.input_ahead``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedEntries:
    """``RecoveryFacts.has_entries``."""


NeedFacts = (
    NeedSinkLimits
    | NeedRemoteHistory
    | NeedFirstRemote
    | NeedRemote
    | NeedPublishedBefore
    | NeedContent
    | NeedRemoteEpochs
    | NeedLive
    | NeedSegments
    | NeedInputSince
    | NeedInputAhead
    | NeedEntries
)


class MissingFacts(Exception):  # noqa: N818 (no error: the caller adds the fact and asks again)
    """The decision depends on something that is not known yet."""

    def __init__(self, need: NeedFacts) -> None:
        super().__init__(need)
        self.need = need
