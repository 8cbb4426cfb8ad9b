"""The generator as Spark's driver and executors drive it, without Spark."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cutline.connectors.generator.spark_reader import GeneratorReader, payments


def rows(reader: GeneratorReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[Any, ...]]:
    there: GeneratorReader = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in reader.partitions(start, end) for batch in there.read(part)]
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_the_same_seed_gives_the_same_rows_in_whatever_batches() -> None:
    options = {"rows": "1000", "keys": "10", "seed": "7", "first": "50"}
    whole = GeneratorReader(options)
    begin = whole.initialOffset()
    end = whole.latestOffset(begin, None)
    assert whole.latestOffset(end, None) == end, "it is exhausted"
    parts, at = [], begin
    small = GeneratorReader(options | {"rows_per_batch": "300", "partitions": "3"})
    while (following := small.latestOffset(at, None)) != at:
        parts += rows(small, at, following)
        at = following
    assert at == end and parts == rows(whole, begin, end)
    truth = payments(50, 1050, keys=10, seed=7)
    assert [row[:3] for row in parts] == list(
        zip(*(truth[name].tolist() for name in ("payment_id", "merchant", "amount")), strict=True)
    )
    assert parts != rows(GeneratorReader(options | {"seed": "8"}), *(begin | {"seed": 8}, end | {"seed": 8}))


def test_a_position_of_other_options_is_refused() -> None:
    before, after = (GeneratorReader({"rows": "100", "seed": seed}) for seed in ("1", "2"))
    end = before.latestOffset(before.initialOffset(), None)
    for ask in (lambda: after.latestOffset(end, None), lambda: after.partitions(after.initialOffset(), end)):
        with pytest.raises(ValueError, match=r"row 100: its options have changed \(seed was 1, is 2\)"):
            ask()
    assert GeneratorReader({"rows": "200", "seed": "1"}).latestOffset(end, None)["row"] == 200, "more rows are no harm"
    assert before.latestOffset({"row": 30}, None)["row"] == 100, "a position of an older version"


def test_bad_options_are_named() -> None:
    for name, value in [("rows", "many"), ("keys", "0"), ("rows_per_second", "-1"), ("rows_per_batch", "0")]:
        with pytest.raises(ValueError, match=f"{name} is '{value}'"):
            GeneratorReader({name: value})
