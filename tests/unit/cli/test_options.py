"""Options that several commands share."""

from __future__ import annotations

import pytest

from cutline.cli.options import parse_renames
from cutline.errors import ConfigError


def test_renames_are_pairs_of_old_and_new() -> None:
    assert parse_renames([]) == {}
    assert parse_renames(["totals=sums", "a=b"]) == {"totals": "sums", "a": "b"}


@pytest.mark.parametrize("item", ["totals", "=sums", "totals="])
def test_half_a_pair_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match=f"--rename {item}: not a pair"):
        parse_renames([item])
