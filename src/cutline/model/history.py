"""Which generation an epoch belongs to: the identity of a generation, and what a sink's target records about it.

An epoch number alone says nothing about its history: two hosts, a copied folder and a restored backup can each have an
epoch 60. See ``cutline.protocol.history.histories`` for what is decided from these.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from cutline.model.ids import Epoch, Generation, MomentMs, Text

#: Random: no other host, and no other start from the same storage, has the same one. Empty in records of former
#: versions.
Identity = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]


_DAY_MS = 86_400_000


def utc_text(moment_ms: int) -> str:
    """A moment as text. Computed: what decides about histories must not touch a clock, not even through a library."""
    days, rest_ms = divmod(moment_ms, _DAY_MS)
    # The calendar repeats every 400 years; in it the year begins in March, so that the leap day comes last.
    era, day_of_era = divmod(days + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    year = 400 * era + year_of_era + (month <= 2)
    hours, minutes, seconds = rest_ms // 3_600_000, rest_ms // 60_000 % 60, rest_ms // 1_000 % 60
    return f"{year:04}-{month:02}-{day:02} {hours:02}:{minutes:02}:{seconds:02} UTC"


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """A start that took over a sink, as the sink's target records it."""

    generation: Generation
    identity: Identity
    #: The newest complete epoch that the start continued from: up to here it shares its history with those before it.
    epoch: Epoch
    started_ms: MomentMs
    #: Where it runs, in words that help a person find it.
    host: Text = ""
    #: The flow's folder on that host.
    storage: Text = ""
