"""Small, wrong changes to the rules about whose history it is. Registered beside those of ``mutations``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from cutline.model.ids import Epoch
from cutline.protocol.history import histories
from cutline.protocol.recovery import history_rules
from cutline.testing.simulator.processes import recovery as simulated_start
from cutline.testing.simulator.processes import remote_tier
from tests.support.mutations import mutation


@mutation
def any_storage_may_start_the_flow() -> Iterator[None]:
    with patch.object(history_rules, "refuse_other_histories", lambda *_: None):
        yield


@mutation
def takeovers_of_a_sink_are_not_looked_at() -> Iterator[None]:
    with patch.object(history_rules, "others_after", lambda *_: ()):
        yield


@mutation
def generations_in_the_remote_tier_are_compared_by_number() -> Iterator[None]:
    """And nothing else shows that another host took over."""

    def others_in(newest: Any, known: Any) -> Any:
        return ()

    with (
        patch.object(history_rules, "others_in", others_in),
        patch.object(history_rules, "others_after", lambda *_: ()),
        patch.object(remote_tier, "has_diverged", lambda *_: False),
    ):
        yield


@mutation
def a_storage_that_is_older_than_a_sink_may_start() -> Iterator[None]:
    with patch.object(history_rules, "known_epoch", lambda _: Epoch(10**9)):
        yield


@mutation
def a_request_may_restore_what_a_sink_does_not_share() -> Iterator[None]:
    def error(*values: Any, **more: Any) -> Any:
        return original(*values, **{**more, "up_to": None})

    original = history_rules._error
    with (
        patch.object(history_rules, "refuse_beyond_common", lambda *_, **__: None),
        patch.object(history_rules, "_error", error),
    ):
        yield


@mutation
def a_start_does_not_record_that_it_took_a_sink_over() -> Iterator[None]:
    with patch.object(simulated_start, "with_takeover", lambda claim, *_: histories.history_in(claim)):
        yield


@mutation
def a_start_says_that_it_continues_from_a_later_epoch() -> Iterator[None]:
    original = histories.with_takeover

    def later(claim: str, takeover: Any, own: Any) -> str:
        wrong = type(takeover)(**{**_fields(takeover), "epoch": Epoch(takeover.epoch + 1_000_000)})
        return original(claim, wrong, own)

    with patch.object(simulated_start, "with_takeover", later):
        yield


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
