"""What a sink must remember so that it can be rewound to every checkpoint that the flow may be restored to.

A sink that replaces rows keeps the former rows of each epoch. Of the epochs between two checkpoints of the flow,
one set of former rows is enough: the oldest of each key. So the former rows become as sparse as the checkpoints.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cutline.model.ids import Epoch

#: Epochs from the first up to, and without, the second: between them a sink no longer tells its states apart.
Gap = tuple[Epoch, Epoch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinning:
    """What a sink does with the older epochs in its ledger."""

    #: Merge the epoch into the one after it, in this order.
    merges: Sequence[tuple[Epoch, Epoch]] = field(default_factory=tuple)
    #: The oldest epoch that stays in the ledger: it can be rewound to, and no further. None: all stay.
    oldest: Epoch | None = None


def thinned(older: Sequence[Epoch], points: Collection[Epoch] | None) -> Thinning:
    """``older``: the epochs in the ledger, ascending, without the newest ones, of which each can be rewound to.

    ``points``: the epochs that the flow may be restored to; none: the older ones need not stay; None: not known.
    """
    if not older or points is None:
        return Thinning()
    if not points:
        return Thinning(oldest=older[-1])
    ordered = sorted(points)
    # At a point, readers saw the newest epoch up to it.
    first = bisect_left(older, Epoch(ordered[0] + 1)) - 1
    oldest = older[first] if first >= 0 else None
    staying = older[max(first, 0) :]
    merges = [
        (one, following)
        for one, following in itertools.pairwise(staying)
        # No point lies in between, so nothing is ever rewound to the first of them.
        if bisect_left(ordered, one) == bisect_left(ordered, following)
    ]
    return Thinning(merges=merges, oldest=oldest)


def gap_at(gaps: Iterable[Gap], epoch: Epoch) -> Gap | None:
    """The gap in which the epoch lies: the sink cannot be rewound to it."""
    return next((gap for gap in gaps if gap[0] <= epoch < gap[1]), None)
