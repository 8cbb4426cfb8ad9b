"""Until when checkpoints can be restored if the flow goes on as it does. For planning: a start asks again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cutline.model.ids import Epoch
from cutline.protocol.history.retention import RetentionPolicy, Rung, flow_time_ms
from cutline.protocol.publish.publishing import CompleteEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """When retention will release an epoch, and what keeps it until then."""

    at_ms: int
    #: The rung on which it is until then; None: it is kept by its age, or is one of the newest.
    rung: Rung | None = None
    is_by_age: bool = False


def kept_until(
    written_ms: int, now_ms: int, *, age_ms: int | None = None, most_bytes: int | None = None, ahead_bytes: int = 0
) -> int | None:
    """Until when a log keeps a message that was written at ``written_ms``, if it grows as it has since; None: forever.

    ``age_ms``: it is dropped when it is that old. ``most_bytes``: it is dropped when more than that follows it;
    ``ahead_bytes``: as much follows it now. A log may keep it longer: it drops whole files.
    """
    ends = [written_ms + age_ms] if age_ms is not None else []
    if most_bytes is not None and ahead_bytes > 0:
        passed_ms = max(now_ms - written_ms, 1)
        ends.append(written_ms + passed_ms * most_bytes // ahead_bytes)
    return min(ends, default=None)


def released_at(
    policy: RetentionPolicy,
    complete: Sequence[CompleteEpoch],
    *,
    published_everywhere: Epoch,
    pins: Collection[Epoch],
    interval_ms: int,
    now_ms: int,
) -> dict[Epoch, Release]:
    """When retention will release each epoch of ``complete``, in ascending order; those that stay are left out.

    ``interval_ms``: between two checkpoints to come; 0: they come on request only, so none is expected.
    """
    if not complete:
        return {}
    flow_ms = flow_time_ms(complete[-1], now_ms, policy.pause_ms)
    # From now on the flow runs, and its own time passes like any other.
    running, pauses_ms = replace(policy, pause_ms=None), now_ms - flow_ms
    here = [replace(one, completed_ms=one.moment_ms) for one in complete]
    own, found, at_ms = {one.epoch for one in here}, dict[Epoch, Release](), flow_ms
    expected = _expected(here[-1], policy.count if interval_ms else 0, interval_ms, flow_ms)
    while True:
        gone = running.expendable(here, published_everywhere=published_everywhere, pins=pins, now_ms=at_ms)
        if gone:
            rungs = running.on_ladder(here, at_ms - 1)
            ages = {one.epoch: at_ms - 1 - one.moment_ms for one in here}
            for epoch in own.intersection(gone):
                is_by_age = policy.age_ms is not None and ages[epoch] < policy.age_ms
                found[epoch] = Release(at_ms=at_ms + pauses_ms, rung=rungs.get(epoch), is_by_age=is_by_age)
        here = [one for one in here if one.epoch not in gone]
        expiry_ms = running.next_expiry_ms(here, pins, at_ms)
        if expected and (expiry_ms is None or expected[0].completed_ms <= expiry_ms):
            next_one = expected.pop(0)
            here.append(next_one)
            published_everywhere, at_ms = next_one.epoch, next_one.completed_ms
        elif expiry_ms is not None:
            at_ms = expiry_ms
        else:
            return found


def _expected(newest: CompleteEpoch, count: int, interval_ms: int, now_ms: int) -> list[CompleteEpoch]:
    """The next checkpoints. A flow that is stopped, or late, takes the first of them one interval from now."""
    due_ms = newest.completed_ms + interval_ms
    first_ms = due_ms if due_ms > now_ms else now_ms + interval_ms
    return [
        replace(newest, epoch=Epoch(newest.epoch + number), completed_ms=at_ms, flow_ms=at_ms)
        for number in range(1, count + 1)
        for at_ms in [first_ms + (number - 1) * interval_ms]
    ]
