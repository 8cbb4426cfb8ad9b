"""Any bytes in the place of a record: a clear refusal, or a valid record of which every path stays inside."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cutline.base import records
from cutline.errors import CutlineError, DamagedRecordError
from cutline.tiers.transfer import unpacked
from tests.support.hostile_records import SEEDS, hostile, judge, judge_offsets, stored

NAMES = sorted(SEEDS)
OFFSETS = b'v2\n{"batchWatermarkMs":0,"conf":{}}\n0:{"channel": "numbers", "position": 4}\n1:{"logOffset":3}'


@pytest.mark.parametrize("name", NAMES)
def test_a_record_of_ours_is_accepted(name: str) -> None:
    kind, _, example_ = SEEDS[name]
    assert judge(name, records.encode(kind, example_))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=300), is_wrapped=st.booleans())
@example(data=b"[" * 100_000, is_wrapped=True)
@example(data=b'{"a":' * 50_000, is_wrapped=False)
@example(data=b"9" * 20_000, is_wrapped=True)
def test_arbitrary_bytes(name: str, data: bytes, is_wrapped: bool) -> None:
    judge(name, stored(SEEDS[name][0], data) if is_wrapped else data)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_changed_records(name: str, seed: int) -> None:
    judge(name, hostile(random.Random(seed), name))


def test_most_changes_reach_the_rules() -> None:
    """A fuzz test whose records all fail at the checksum would test nothing."""
    rng, ends = random.Random(1), Counter[str]()
    for _ in range(2_000):
        name = rng.choice(NAMES)
        data = hostile(rng, name)
        try:
            records.decode(SEEDS[name][0], data, SEEDS[name][1])
            ends["accepted"] += 1
        except CutlineError as refused:
            ends["rule" if "field" in refused.where else "form"] += 1
    assert ends["rule"] > 600 and ends["accepted"] > 300


@given(data=st.binary(max_size=200))
@example(data=OFFSETS)
@example(data=OFFSETS.replace(b"\n0:", b"\n../../0:"))
@example(data=b'v1\n{"conf":{"a":' + b"[" * 100_000)
def test_offsets_of_spark(data: bytes) -> None:
    judge_offsets(data)
    judge_offsets(b'v2\n{"conf":{}}\n' + data)


@given(data=st.binary(max_size=100))
@example(data=(2**40).to_bytes(8, "little") + b"x" * 20)
@example(data=b"\xff" * 8)
def test_packed_files(data: bytes) -> None:
    """The size that a packed file claims is not believed."""
    with contextlib.suppress(DamagedRecordError):
        unpacked(data, "blobs/x")


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_a_million_records() -> None:
    """``CUTLINE_FUZZ`` sets another number, ``CUTLINE_FUZZ_SEED`` another beginning."""
    count, seed = int(os.environ.get("CUTLINE_FUZZ", "1000000")), int(os.environ.get("CUTLINE_FUZZ_SEED", "0"))
    rng, begun_s, accepted = random.Random(seed), time.monotonic(), Counter[str]()
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        accepted[name] += judge(name, hostile(rng, name))
    seconds = time.monotonic() - begun_s
    print(f"{count} records, {accepted.total()} accepted, the others refused; {seconds:.0f} s; {dict(accepted)}")  # noqa: T201
    assert all(accepted[name] for name in NAMES)
