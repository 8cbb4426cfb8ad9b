"""Every error a person or a caller can meet. One root; fields, not prose; each says what to do next."""

from __future__ import annotations


class CutlineError(Exception):
    """Root of all errors that Cutline raises on purpose."""

    def __init__(self, what: str, *, next_step: str = "", **where: object) -> None:
        self.what = what
        self.next_step = next_step
        #: Where it happened: flow, operator, epoch, path … only what is known.
        self.where = {key: value for key, value in where.items() if value is not None}
        super().__init__(str(self))

    def __str__(self) -> str:
        place = ", ".join(f"{key}={value}" for key, value in self.where.items())
        text = f"{self.what} ({place})" if place else self.what
        return f"{text}. Next: {self.next_step}" if self.next_step else text


class FlowDefinitionError(CutlineError):
    """The flow as written cannot run: a cycle, an unknown input, a duplicate name, a mode that does not fit."""


class ConfigError(CutlineError):
    """An option is unknown or has a value that makes no sense."""


class FlowLockedError(CutlineError):
    """Another process runs this flow on this storage."""


class DamagedRecordError(CutlineError):
    """A stored record or file is missing, cut short or does not match its checksum."""


class UnknownFormatError(CutlineError):
    """A stored record was written by a version of Cutline that this one cannot read."""


class RecoveryError(CutlineError):
    """The flow cannot be brought back without losing something; a person must decide."""


class LostInputError(RecoveryError):
    """A source cannot read again what it has read since the checkpoint: going back to it would lose rows silently."""


class FencedError(CutlineError):
    """This incarnation is stale: a newer generation has taken over. It must stop and change nothing."""


class CheckpointFailedError(CutlineError):
    """A checkpoint that somebody waits for was aborted."""


class UnknownEpochError(CutlineError):
    """There is no complete checkpoint of this number, or it was let go of."""


class UnknownSavepointError(CutlineError):
    """There is no savepoint of this name."""


class RequestFailedError(CutlineError):
    """A running flow could not do what it was asked for from outside, or has not answered."""


class FlowFailedError(CutlineError):
    """The running flow gave up: an operator failed more often than its restart limit."""


class JvmLostError(FlowFailedError):
    """The JVM that runs the queries has ended, and with it all of them."""


class ExecutorsFailedError(CutlineError):
    """The executors did not do a piece of work that is no query's; nothing is known of what they did of it."""


class SinkError(CutlineError):
    """A sink cannot be used as asked, or does not match what the flow knows of it."""


class TakenBackError(SinkError):
    """What somebody has read from a sink was taken back since: the flow went back to an earlier checkpoint."""

    def __init__(self, what: str, *, still: int, next_step: str = "", **where: object) -> None:
        super().__init__(what, next_step=next_step, **where)
        #: The newest epoch of those that were read that still stands; 0 if none does.
        self.still = still


class InvariantViolation(CutlineError):  # noqa: N818 (it is not an error of the caller, it is a bug)
    """Something that must always hold does not. Never caught except to report it."""


class StoreError(CutlineError):
    """A storage operation failed; see the two subclasses for what is known of its effect."""


class NotDone(StoreError):  # noqa: N818 (named for the outcome)
    """The operation certainly did not take effect; it may be retried as it is."""


class MissingObject(NotDone):
    """There is no such object."""


class OutcomeUnknown(StoreError):  # noqa: N818 (named for the outcome)
    """The operation may have taken effect; read back before retrying."""
