"""A few simulated flows, to notice a broken protocol at once; tests/scenarios/test_simulator.py runs many."""

from __future__ import annotations

import pytest

from cutline.testing.simulator import simulate


@pytest.mark.parametrize("seed", range(8))
def test_a_seed_passes(seed: int) -> None:
    outcome = simulate(seed)
    assert not outcome.violation, f"cutline simulate --seed {seed}: {outcome.violation}"
