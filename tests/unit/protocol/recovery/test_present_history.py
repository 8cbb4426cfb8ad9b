"""Gaps in a history: epochs that retention has released, and epochs that are lost."""

from __future__ import annotations

from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, SinkId
from cutline.protocol.recovery.facts import SinkFacts
from cutline.protocol.recovery.present_history import present_history
from tests.support.recovery_facts import definition, manifest, sink, stored


def usable(*manifests: Manifest, sinks: tuple[SinkFacts, ...]) -> list[int]:
    history = present_history(stored(*manifests), definition(), sinks, (), lambda _: None)
    return [one.epoch for one in history.manifests]


def thinned(published: int | None) -> list[Manifest]:
    return [manifest(epoch, published=published) for epoch in (1, 4, 8, 9)]


def test_a_gap_below_what_the_sinks_had_published_is_no_loss() -> None:
    """A ledger shows no epochs without rows, and the coordinator's records may be lost."""
    assert usable(*thinned(8), sinks=(sink(1),)) == [1, 4, 8, 9]
    assert usable(*thinned(7), sinks=(sink(1),)) == [1, 4, 8, 9]


def test_an_epoch_that_is_missing_above_it_is_lost() -> None:
    assert usable(*thinned(6), sinks=(sink(1),)) == [1, 4]
    assert usable(*thinned(2), sinks=(sink(1),)) == [1]
    assert usable(*thinned(2), sinks=(sink(1, recorded=Epoch(7)),)) == [1, 4, 8, 9], "the records know better"


def test_a_sink_that_was_added_since_has_no_part_in_older_epochs() -> None:
    added = SinkFacts(sink=SinkId("added"), operator=sink().operator)
    assert usable(*thinned(8), sinks=(sink(1), added)) == [1, 4, 8, 9]
    assert usable(*thinned(2), sinks=(sink(1), added)) == [1], "the others have"


def test_a_checkpoint_of_a_former_version_tells_nothing_of_sinks() -> None:
    assert usable(*thinned(None), sinks=(sink(1),)) == [1]
    assert usable(*thinned(None), sinks=(sink(8),)) == [1, 4, 8, 9]
