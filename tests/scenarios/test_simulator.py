"""The simulator itself: it is deterministic, it passes, its old failures stay mended, and it bites."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter

import pytest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.testing.simulator import simulate
from cutline.testing.simulator.simulation import FAULTS
from tests.support.mutation_seeds import CAUGHT_BY
from tests.support.mutations import all_mutations

MUTATIONS = all_mutations()
#: If a recorded seed no longer catches its mutation, so many others are tried for the message.
OTHER_SEEDS = 30
COMMAND = "from cutline.cli.main import app; app()"

#: Seeds that failed once, and what they had found.
REGRESSIONS = {
    7: "aligned operators and one that had cut early waited for each other's room",
    18: "collections overlapped: the logs were truncated before an epoch's manifest was gone",
    37: "the record of a barred epoch was never collected",
    39: "two regions went back at once, in one generation",
    77: "an operator that died between its entry and its report never gave credit back",
    78: "an old life of Spark committed into the directory of the new one",
    194: "killed right after a restore: sinks kept what had been given up",
    467: "a backup whose checkpoints no sink shares left no way out that a person could take",
    468: "a copy made while an epoch was pending took that epoch for its own",
    799: "what a replaced process had completed in its own logs kept the flow from beginning anew",
    1156: "a coordinator thought dead completed an epoch whose tombstone had been collected",
    46: "barriers that a dead process left were acknowledged and never synced; so did 94 and 107",
    212: "the holder of a claim was refused what an older generation had completed while it took over",
    254: "the remote tier dropped an epoch, and its notes did not say that it had been published",
    325: "two hosts numbered batches by the same generation, and a sink refused them for good",
    297: "a new host took the number of a generation in which the lost host still published",
    236: "a new host did not record what sinks had published before; restarted, it took epochs for lost",
    237: "a new host took epochs of the remote tier for lost, and refused to start",
}


def test_one_seed_is_one_story_byte_for_byte() -> None:
    """Also in another process, where strings have other hashes."""
    script = "from cutline.testing.simulator import simulate; print(simulate(2, with_story=True).story)"
    stories = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": number},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for number in ("1", "2")
    }
    assert stories == {simulate(2, with_story=True).story + "\n"}


def test_two_hundred_seeds_pass_and_see_every_kind_of_fault() -> None:
    faults: Counter[str] = Counter()
    for seed in range(200):
        outcome = simulate(seed)
        assert not outcome.violation, f"cutline simulate --seed {seed}: {outcome.violation}"
        faults.update(outcome.faults)
    assert not [kind for kind in FAULTS if not faults[kind]]
    for kind in ("host_loss", "power_cut", "claim_lost", "remote_away"):
        assert faults[kind] >= 15, kind


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_failed_once_passes(seed: int) -> None:
    assert not simulate(seed, is_per_operator=False).violation


def test_every_wrong_change_has_a_seed() -> None:
    assert set(CAUGHT_BY) == set(MUTATIONS), "run: python tools/find_mutation_seeds.py"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_change_is_caught(name: str) -> None:
    with MUTATIONS[name]():
        if simulate(CAUGHT_BY[name]).violation:
            return
        others = (seed for seed in range(OTHER_SEEDS) if simulate(seed).violation)
        other = next(others, None)
    known = f"seed {other} does" if other is not None else f"none of the first {OTHER_SEEDS} seeds does"
    pytest.fail(
        f"seed {CAUGHT_BY[name]} no longer catches {name}, {known}; "
        f"find one with: python tools/find_mutation_seeds.py {name}"
    )


def test_the_command_adds_up_and_replays() -> None:
    result = CliRunner().invoke(app, ["simulate", "--seeds", "4", "--workers", "1", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["seeds"], report["violations"]) == (4, 0)
    assert report["checkpoints"] > 0
    assert set(report["faults"]) == set(FAULTS)
    story = CliRunner().invoke(app, ["simulate", "--seed", "2"])
    assert story.exit_code == 0
    assert simulate(2, with_story=True).story in story.stdout


def test_the_command_prints_one_line_of_json_and_nothing_else() -> None:
    """Although sinks are rewound in these seeds, of which the product's own code warns."""
    seeds = ["--first", "0", "--seeds", "12"]
    for workers in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", COMMAND, "simulate", *seeds, "--workers", workers, "--json"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert json.loads(result.stdout)["events"]["sink_rewinds"] > 0
        assert (result.stdout.count("\n"), result.stderr) == (1, "")


def test_a_run_leaves_the_log_level_as_it_was() -> None:
    logger = logging.getLogger("cutline")
    before = logger.level
    simulate(0)
    assert logger.level == before


def test_the_command_fails_and_tells_the_story_of_a_violation() -> None:
    with MUTATIONS["truncation_goes_one_entry_too_far"]():
        result = CliRunner().invoke(app, ["simulate", "--seeds", "2", "--workers", "1"])
    assert result.exit_code == 1
    assert "Replay with: cutline simulate --seed" in result.stdout
