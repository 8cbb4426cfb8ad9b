"""The replay guard of NATS sources, and going on without what is gone, against a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutline.base import durable
from cutline.connectors.nats.spark_reader import NatsReader
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import LostInputError, NotDone
from cutline.model.ids import OperatorId
from cutline.spark_dir import skip_input, source_check
from cutline.testing.servers.nats import NatsServer
from tests.support.streams import Stream

GUARD = ReplayGuard()

NUMBERS = OperatorId("numbers")


class Read:
    """A stream of ten messages in batches of two; Spark has committed those up to ``committed`` and planned all."""

    def __init__(self, server: NatsServer, live: Path, *, committed: int = 4) -> None:
        self.stream = Stream(server.url, server.fresh_stream())
        self.stream.publish(*range(1, 11))
        self.live = live
        reader = self.reader()
        offset = reader.initialOffset()
        self.offsets = []
        for batch in range(5):
            offset = reader.latestOffset(offset, None)
            self.offsets.append(json.dumps(offset).encode())
            for folder, number in (("offsets", batch), ("commits", min(batch, committed))):
                (live / folder).mkdir(parents=True, exist_ok=True)
                (live / folder / str(number)).write_text(f"v1\n{{}}\n{json.dumps(offset)}")
        reader.stop()

    def reader(self) -> NatsReader:
        return NatsReader({"url": self.stream.url, "stream": self.stream.name, "max_per_batch": "2"})

    def lost(self, batch: int) -> list[tuple[str, int]]:
        """What a restore to this batch would miss."""
        report = source_check.check_sources(GUARD, {"0": self.offsets[batch]}, self.live)
        assert not report.notes
        return [
            (problem.path.removeprefix(f"stream {self.stream.name}: "), problem.parts) for problem in report.problems
        ]

    def position(self, batch: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.live / "offsets" / str(batch)).read_text().splitlines()[2])
        return found

    def rest(self, batch: int) -> list[int]:
        """What a query reads that goes on after this batch."""
        reader, found = self.reader(), []
        start = self.position(batch)
        try:
            while (end := reader.latestOffset(start, None)) != start:
                for part in reader.partitions(start, end):
                    found += [row for rows in reader.read(part) for row in rows.column("sequence").to_pylist()]
                start = end
        finally:
            reader.stop()
        return found


@pytest.fixture
def read(nats_server: NatsServer, tmp_path: Path) -> Iterator[Read]:
    made = Read(nats_server, tmp_path)
    with made.stream:
        yield made


def test_nothing_is_wrong_with_a_stream_that_keeps_all(read: Read) -> None:
    assert [read.lost(batch) for batch in range(5)] == [[]] * 5
    assert skip_input.lost_ahead(GUARD, read.live) == []


def test_the_exact_range_that_was_dropped_is_named(read: Read) -> None:
    read.stream.purge(below=7)
    assert read.lost(1) == [("sequences 5 to 6", 2)]
    assert read.lost(0) == [("sequences 3 to 6", 4)]
    assert read.lost(2) == [], "what is before the checkpoint is not needed"


def test_messages_deleted_in_between_are_counted(read: Read) -> None:
    read.stream.delete(6)
    read.stream.delete(9)
    assert read.lost(1) == [("2 of the sequences 5 to 10", 2)]
    assert read.lost(3) == [("1 of the sequences 9 to 10", 1)]
    assert read.lost(4) == []


def test_all_that_is_gone_is_named_and_not_only_the_beginning(read: Read) -> None:
    read.stream.purge(below=6)
    read.stream.delete(9)
    assert read.lost(1) == [("sequences 5 to 5", 1), ("1 of the sequences 6 to 10", 1)]


def test_a_stream_of_the_same_name_is_not_the_same_stream(read: Read) -> None:
    read.stream.remove()
    assert read.lost(1) == [("sequences 5 to 10", 6)]
    read.stream.make()
    read.stream.publish(*range(20))
    assert read.lost(1) == [("sequences 5 to 10", 6)]
    assert read.lost(4) == [("everything from sequence 11 on", 0)]


def test_what_was_read_since_a_checkpoint_before_the_first_batch_is_missed_too(read: Read) -> None:
    assert source_check.check_sources(GUARD, {}, read.live).problems == []
    read.stream.purge(below=4)
    (problem,) = source_check.check_sources(GUARD, {}, read.live).problems
    assert problem.path.endswith("sequences 1 to 3")


def test_without_the_live_directory_the_stream_alone_is_asked(read: Read, tmp_path: Path) -> None:
    nowhere = tmp_path / "gone"
    assert source_check.check_sources(GUARD, {"0": read.offsets[1]}, nowhere).problems == []
    read.stream.purge(below=7)
    (problem,) = source_check.check_sources(GUARD, {"0": read.offsets[1]}, nowhere).problems
    assert problem.path.endswith("sequences 5 to 6")


def test_a_server_that_cannot_be_reached_is_an_error_and_not_fine(tmp_path: Path) -> None:
    server = NatsServer()
    server.start()
    try:
        read = Read(server, tmp_path)
        read.stream.__exit__()
        server.kill()
        with pytest.raises(NotDone, match="cannot be reached"):
            read.lost(1)
    finally:
        server.remove()


# ------------------------------------------------------------------------------------------------- going on


def keep_up_to(live: Path, batch: int) -> None:
    """As a restore to this batch leaves the directory."""
    for folder in ("offsets", "commits"):
        for path in (live / folder).glob("*"):
            if int(path.name) > batch:
                path.unlink()


def test_a_restored_query_goes_on_with_the_earliest_that_is_there(read: Read) -> None:
    read.stream.purge(below=8)
    keep_up_to(read.live, 1)
    with pytest.raises(LostInputError, match="sequences 5 to 7"):
        read.rest(1)
    skip_input.skip_lost(GUARD, read.live, read.live)
    assert read.position(1)["sequence"] == 8
    assert read.rest(1) == [8, 9, 10]
    before = read.position(1)
    skip_input.skip_lost(GUARD, read.live, read.live)
    assert read.position(1) == before, "a second time changes nothing"


def test_a_stream_that_was_made_again_is_read_from_its_beginning(read: Read) -> None:
    read.stream.remove()
    with pytest.raises(LostInputError, match="does not exist any more"):
        skip_input.skip_lost(GUARD, read.live, read.live)
    read.stream.make()
    read.stream.publish(*"abc")
    skip_input.skip_lost(GUARD, read.live, read.live)
    assert read.rest(4) == [1, 2, 3]


def test_positions_that_were_moved_half_way_are_moved_to_the_end(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two files: what Spark has committed and what it has planned must not be of two streams."""
    read = Read(nats_server, tmp_path, committed=2)
    with read.stream:
        (tmp_path / "offsets/4").unlink()
        read.stream.remove()
        read.stream.make()
        read.stream.publish(*"abc")
        with monkeypatch.context() as patch:
            replace, replaced = durable.replace, []

            def die_at_the_second(path: Path, content: bytes) -> None:
                replaced.append(path)
                if len(replaced) > 1:
                    raise KeyboardInterrupt
                replace(path, content)

            patch.setattr("cutline.spark_dir.skip_input.durable.replace", die_at_the_second)
            with pytest.raises(KeyboardInterrupt):
                skip_input.skip_lost(GUARD, read.live, read.live)
        assert skip_input.lost_ahead(GUARD, read.live), "the next start sees that there is something to do"
        skip_input.skip_lost(GUARD, read.live, read.live)
        start, end = read.position(2), read.position(3)
        reader = read.reader()
        assert reader.partitions(start, end) == []
        reader.stop()
        assert read.rest(3) == [1, 2, 3]


@pytest.mark.parametrize("is_remade", [False, True])
def test_a_first_batch_that_was_planned_and_not_run_is_planned_over_what_is_left(
    nats_server: NatsServer, tmp_path: Path, is_remade: bool
) -> None:
    read = Read(nats_server, tmp_path)
    with read.stream:
        shutil.rmtree(tmp_path / "commits")
        keep_up_to(read.live, 0)
        assert skip_input.lost_ahead(GUARD, read.live) == []
        if is_remade:
            read.stream.remove()
            read.stream.make()
            read.stream.publish(*"abc")
        else:
            read.stream.purge(below=2)
        (problem,) = skip_input.lost_ahead(GUARD, read.live)
        assert problem.path.endswith("sequences 1 to 2" if is_remade else "sequences 1 to 1")
        skip_input.skip_lost(GUARD, read.live, read.live)
        assert skip_input.lost_ahead(GUARD, read.live) == []
        reader = read.reader()
        parts = reader.partitions(reader.initialOffset(), read.position(0))
        found = [row for part in parts for rows in reader.read(part) for row in rows.column("sequence").to_pylist()]
        reader.stop()
        assert found == ([] if is_remade else [2])
        assert read.rest(0) == ([1, 2, 3] if is_remade else list(range(3, 11)))


def test_a_batch_that_was_planned_and_not_run_is_planned_over_what_is_left(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    read = Read(nats_server, tmp_path, committed=2)
    with read.stream:
        for number in (3, 4):
            (tmp_path / "commits" / str(number)).unlink(missing_ok=True)
        (tmp_path / "offsets/4").unlink()
        assert skip_input.lost_ahead(GUARD, read.live) == []
        read.stream.purge(below=8)
        (problem,) = skip_input.lost_ahead(GUARD, read.live)
        assert problem.path.endswith("sequences 7 to 7")
        skip_input.skip_lost(GUARD, read.live, read.live)
        start, end = read.position(2), read.position(3)
        reader = read.reader()
        (part,) = reader.partitions(start, end)
        assert [row for rows in reader.read(part) for row in rows.column("sequence").to_pylist()] == [8]
        reader.stop()
        assert read.rest(3) == [9, 10]
