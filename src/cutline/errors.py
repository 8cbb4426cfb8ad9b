"""Every error that Cutline raises on purpose. One root class; fields, not prose; each error names the next step."""

from __future__ import annotations

from typing import ClassVar


class CutlineError(Exception):
    """Root of all errors that Cutline raises on purpose."""

    def __init__(self, what: str, *, next_step: str = "", **where: object) -> None:
        self.what = what
        self.next_step = next_step
        #: Where it happened: flow, operator, epoch, path … only what is known.
        self.where = {key: value for key, value in where.items() if value is not None}
        super().__init__(str(self))

    def add_where(self, **where: object) -> None:
        """Add what the code that raised the error did not know; what is there already stays."""
        self.where |= {key: value for key, value in where.items() if value is not None and key not in self.where}
        self.args = (str(self),)

    def add_next_step(self, next_step: str) -> None:
        """Add another way out, which the code that raised the error did not know."""
        self.next_step = f"{self.next_step}; {next_step}" if self.next_step else next_step
        self.args = (str(self),)

    def without_next_step(self) -> str:
        place = ", ".join(f"{key}={value}" for key, value in self.where.items())
        return f"{self.what} ({place})" if place else self.what

    def __str__(self) -> str:
        text = self.without_next_step()
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
    """The flow cannot be restored without losing something; the operator of the flow must decide."""


class OtherHistoryError(RecoveryError):
    """Another storage has the flow's newest history: starting from this one would lose rows or publish them twice."""

    #: Whether the remote tier holds the newest history, so that a start with ``rejoin`` can continue from it.
    can_rejoin = False
    #: The newest checkpoint of this storage that a person can have restored, giving up what others published; or None.
    restorable: int | None = None
    #: Whether this storage has run the flow. If not, it holds only a part of what it downloaded, which is out of date.
    has_run = True


class LostInputError(RecoveryError):
    """A source cannot reread what it has read since the checkpoint: restoring it would lose rows silently."""


class FencedError(CutlineError):
    """This process belongs to a stale generation: a newer one has taken over. It must stop and change nothing."""


class CheckpointFailedError(CutlineError):
    """A checkpoint that the caller waits for was aborted."""


class UnknownEpochError(CutlineError):
    """There is no complete checkpoint with this number, or it has been released."""


class UnknownSavepointError(CutlineError):
    """There is no savepoint with this name."""


class RequestFailedError(CutlineError):
    """A running flow could not carry out a request from outside, or has not answered it."""


class FlowFailedError(CutlineError):
    """The running flow gave up: an operator failed more often than its restart limit. The cause comes first."""


class JvmLostError(FlowFailedError):
    """The JVM that runs the queries has ended, and with it all of them."""


class ExecutorsFailedError(CutlineError):
    """The executors failed at work outside of queries; how much of it they did is unknown."""


class SinkError(CutlineError):
    """A sink cannot be used as requested, or does not match what the flow has recorded about it."""


class RewoundError(SinkError):
    """The sink was rewound behind the epoch that the caller has read: the flow restored an earlier checkpoint."""

    def __init__(self, what: str, *, still: int, next_step: str = "", **where: object) -> None:
        super().__init__(what, next_step=next_step, **where)
        #: The newest of the epochs read that is still published; 0 if none is.
        self.still = still


#: The name of earlier versions.
TakenBackError = RewoundError


class InvariantViolation(CutlineError):  # noqa: N818 (it is not an error of the caller, it is a bug)
    """An invariant does not hold. Never caught except to report it."""


class StorageError(CutlineError):
    """A file system refuses: it is full or read-only, a folder is a file, a permission is missing."""


class StoreError(CutlineError):
    """A storage operation failed; the two subclasses say what is known about its effect."""

    #: The same operation may succeed later although no person changes anything.
    may_pass: ClassVar[bool] = True


class NotDone(StoreError):  # noqa: N818 (named for the outcome)
    """The operation certainly had no effect; it may be retried unchanged."""


class Refused(NotDone):
    """A store or server has answered and refuses: a wrong password, a missing privilege, no such bucket."""

    may_pass = False


class MissingObject(NotDone):
    """There is no such object."""

    may_pass = False


class OutcomeUnknown(StoreError):  # noqa: N818 (named for the outcome)
    """The operation may have taken effect; read back before retrying."""
