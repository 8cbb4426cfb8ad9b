"""When retention will release checkpoints, if the flow goes on as it does."""

from __future__ import annotations

from cutline.model.ids import BatchId, Epoch, Generation, OperatorId
from cutline.protocol.history.retention import RetentionPolicy
from cutline.protocol.publish.publishing import CompleteEpoch
from cutline.protocol.recovery.restorable import kept_until, released_at

NOW_MS = 1_000_000
INTERVAL_MS = 10_000


def complete(*ages_ms: int) -> list[CompleteEpoch]:
    """The oldest first."""
    return [
        CompleteEpoch(
            epoch=Epoch(number),
            generation=Generation(1),
            previous_epoch=Epoch(number - 1),
            batches={OperatorId("numbers"): BatchId(number)},
            completed_ms=NOW_MS - age_ms,
        )
        for number, age_ms in enumerate(ages_ms, start=1)
    ]


def released(policy: RetentionPolicy, epochs: list[CompleteEpoch], **more: int) -> dict[int, int]:
    """In how many ms each is released."""
    found = released_at(
        policy,
        epochs,
        published_everywhere=Epoch(more.get("published", epochs[-1].epoch if epochs else 0)),
        pins={Epoch(more["pinned"])} if "pinned" in more else set(),
        interval_ms=more.get("interval_ms", INTERVAL_MS),
        now_ms=NOW_MS,
    )
    return {int(epoch): one.at_ms - NOW_MS for epoch, one in found.items()}


def test_by_number_each_goes_when_enough_newer_ones_are_complete() -> None:
    epochs = complete(24_000, 14_000, 4_000)
    assert released(RetentionPolicy(count=3), epochs) == {1: 6_000, 2: 16_000, 3: 26_000}


def test_those_that_are_too_many_already_go_now() -> None:
    epochs = complete(34_000, 24_000, 14_000, 4_000)
    assert released(RetentionPolicy(count=2), epochs)[1] == 0


def test_without_an_interval_the_newest_have_no_end_in_sight() -> None:
    epochs = complete(34_000, 24_000, 14_000, 4_000)
    assert released(RetentionPolicy(count=2), epochs, interval_ms=0) == {1: 0, 2: 0}


def test_by_age_each_goes_when_it_is_old_enough() -> None:
    epochs = complete(24_000, 14_000, 4_000)
    assert released(RetentionPolicy(count=1, age_ms=60_000), epochs) == {1: 36_000, 2: 46_000, 3: 56_000}


def test_age_does_not_release_the_newest_ones() -> None:
    epochs = complete(24_000, 14_000, 4_000)
    assert released(RetentionPolicy(count=2, age_ms=1_000), epochs) == {1: 0, 2: 6_000, 3: 16_000}


def test_a_pinned_one_is_never_released() -> None:
    epochs = complete(24_000, 14_000, 4_000)
    assert released(RetentionPolicy(count=1), epochs, pinned=2) == {1: 0, 3: 6_000}


def test_what_a_sink_has_yet_to_publish_stays_until_then() -> None:
    epochs = complete(24_000, 14_000, 4_000)
    assert released(RetentionPolicy(count=1), epochs, published=1) == {1: 6_000, 2: 6_000, 3: 6_000}


def test_a_flow_that_is_stopped_would_go_on_from_now() -> None:
    epochs = complete(10_000_000, 9_990_000)
    assert released(RetentionPolicy(count=2), epochs) == {1: 10_000, 2: 20_000}


def test_without_checkpoints_there_is_nothing_to_release() -> None:
    assert released(RetentionPolicy(count=3), []) == {}


def test_a_message_is_kept_until_it_is_old_or_much_follows_it() -> None:
    assert kept_until(1_000, 5_000) is None, "nothing drops it"
    assert kept_until(1_000, 5_000, age_ms=10_000) == 11_000
    assert kept_until(1_000, 5_000, most_bytes=100) is None, "nothing follows it yet"
    # 50 of 100 bytes came in four seconds: the rest comes in four more.
    assert kept_until(1_000, 5_000, most_bytes=100, ahead_bytes=50) == 9_000
    assert kept_until(1_000, 5_000, most_bytes=100, ahead_bytes=200) == 3_000, "it may be dropped at any moment"
    assert kept_until(1_000, 5_000, age_ms=6_000, most_bytes=100, ahead_bytes=50) == 7_000, "whatever comes first"
    assert kept_until(5_000, 5_000, most_bytes=100, ahead_bytes=50) == 5_002, "written this moment"
