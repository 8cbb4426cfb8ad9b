"""The suite that every generation store must pass."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from cutline.model.generation import GenerationRecord
from cutline.model.ids import Generation
from cutline.ports.generation_store import GenerationStore


def generation(number: int, *, reason: str = "") -> GenerationRecord:
    return GenerationRecord(
        generation=Generation(number),
        started_ms=1,
        path="fresh",
        restored_epoch=None,
        reason=reason,
        lineage={},
        spark_dirs={},
        inputs={},
        schemas={},
    )


class GenerationStoreConformance:
    """Subclasses have a fixture ``store``, which opens an empty store."""

    def test_a_flow_that_has_never_started_has_none(self, store: GenerationStore) -> None:
        assert store.load_all() == []

    def test_the_first_record_of_a_number_stays(self, store: GenerationStore) -> None:
        assert store.create(generation(1))
        assert not store.create(generation(1, reason="another process"))
        assert not store.create(generation(1)), "not even the same one counts twice"
        assert store.load_all() == [generation(1)]

    def test_numbers_may_be_skipped_but_never_go_back(self, store: GenerationStore) -> None:
        for number in (2, 9, 10):
            assert store.create(generation(number))
        assert not store.create(generation(5)), "a newer one has taken over"
        assert [one.generation for one in store.load_all()] == [2, 9, 10]

    def test_a_record_comes_back_as_it_was(self, store: GenerationStore) -> None:
        record = replace(generation(3), path="remote", reason="the host was lost", schemas={"a": "c2NoZW1h"})
        store.create(record)
        assert store.load_all() == [record]

    def test_of_many_that_want_one_number_exactly_one_gets_it(self, store: GenerationStore) -> None:
        begin = threading.Barrier(4)

        def race(me: int) -> bool:
            begin.wait()
            return store.create(generation(1, reason=str(me)))

        with ThreadPoolExecutor(4) as pool:
            won = [me for me, created in enumerate(pool.map(race, range(4))) if created]
        assert [one.reason for one in store.load_all()] == [str(me) for me in won]
