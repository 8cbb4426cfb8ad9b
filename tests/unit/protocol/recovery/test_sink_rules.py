"""What becomes of sinks when the flow has returned."""

from __future__ import annotations

import pytest

from cutline.model.ids import Epoch
from cutline.protocol.recovery.facts import SinkFacts
from cutline.protocol.recovery.sink_rules import SinkSettlement, published_everywhere, settle, slowest
from tests.support.recovery_facts import ORDERS, manifest, sink


def settled(one: SinkFacts, *epochs: int, is_per_operator: bool = False) -> SinkSettlement:
    return settle(one, [manifest(epoch) for epoch in epochs], is_per_operator=is_per_operator)


def test_a_sink_that_is_not_ahead_stays_as_it_is() -> None:
    one = settled(sink(2), 1, 2, 3)
    assert (one.rewind_to, one.keeps, one.newest, one.reached, one.published) == (None, False, 3, 2, 2)


def test_an_epoch_without_rows_counts_by_the_records() -> None:
    assert settled(sink(1, recorded=Epoch(3)), 1, 2, 3).reached == 3


def test_what_came_before_the_first_epoch_is_published() -> None:
    """Found by the simulator (seed 236): a new host took epochs for lost that every sink had published."""
    assert settle(sink(0), [manifest(6, previous=5)], is_per_operator=False).reached == 5


def test_what_is_missing_between_epochs_is_published() -> None:
    """Retention thins a history out only when every sink has published it."""
    manifests = [manifest(1), manifest(4), manifest(8), manifest(9)]
    assert settle(sink(0), manifests, is_per_operator=False).reached == 7
    assert settle(sink(8), manifests, is_per_operator=False).reached == 8


def test_what_was_given_up_is_rewound_or_kept() -> None:
    rewound, kept = settled(sink(5), 1, 2), settled(sink(5, on_rollback="keep"), 1, 2)
    assert (rewound.rewind_to, rewound.reached) == (2, 2)
    assert (kept.rewind_to, kept.keeps, kept.reached) == (None, True, 2)


def test_an_evolved_checkpoint_does_not_hide_what_was_given_up_for_it() -> None:
    """Epoch 9 holds what epoch 2 held; epochs 3 to 8 were given up, and the sink has published one of them."""
    manifests = [manifest(1), manifest(2), manifest(9, previous=2, evolved_from=2)]
    one = settle(sink(5), manifests, is_per_operator=False)
    assert (one.rewind_to, one.reached) == (2, 2)
    assert settle(sink(2), manifests, is_per_operator=False).rewind_to is None


def test_a_sink_publishes_nothing_of_epochs_that_have_nothing_of_its_operator() -> None:
    manifests = [manifest(1, operators=[ORDERS]), manifest(2, operators=[ORDERS]), manifest(3)]
    joined = settle(sink(0), manifests, is_per_operator=False)
    assert (joined.reached, joined.published) == (0, 2)
    assert settle(sink(0), manifests, is_per_operator=True).published == 0


@pytest.mark.parametrize(("published", "expected"), [((3, 2), 2), ((3, 9), 3), ((), 5)])
def test_how_far_all_sinks_are(published: tuple[int, ...], expected: int) -> None:
    sinks = [sink(one) for one in published]
    assert published_everywhere(sinks, Epoch(5)) == expected
    assert slowest(sinks, manifest(5), [manifest(4)]) == expected
