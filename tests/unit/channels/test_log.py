"""One channel's log on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cutline.base import durable
from cutline.channels.entry_files import entry_path
from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError, DamagedRecordError, FencedError, InvariantViolation
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.ids import NO_BATCH, BatchId, Epoch, Generation, Position
from tests.support.channels import append_barrier, append_batch, open_log, segment_names
from tests.support.killing import is_killed_at


def path_of(log: ChannelLog, seq: int, generation: int = 1) -> Path:
    return entry_path(log.folder, Generation(generation), Position(seq))


def stored(log: ChannelLog) -> list[str]:
    """Every entry file there is, visible or not."""
    return sorted(f"{path.parent.name}/{int(path.stem)}" for path in log.folder.glob("g*/*.json"))


# ------------------------------------------------------------------------------------------------- appending, opening


def test_a_new_log_is_empty(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert (log.start, log.end, log.last_batch, log.last_positions) == (0, 0, NO_BATCH, {})
    assert log.entries() == []


def test_what_was_appended_is_there_when_the_log_is_opened_again(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    first = append_batch(log, rows=3, positions={"in": 2}, staged={"table": [{"path": "a", "size_bytes": 7}]})
    barrier = append_barrier(log, 1, limit_ms=50)
    second = append_batch(log, rows=0, positions={"in": 4})
    again = open_log(tmp_path)
    assert again.entries() == log.entries() == [first, barrier, second]
    assert (again.start, again.end, again.last_batch) == (0, 3, 1)
    assert again.last_positions == {"in": 4}


def test_a_barrier_names_the_batch_it_follows_and_the_positions_of_its_cut(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log, positions={"in": 2})
    append_barrier(log, 1)
    assert (log.last_batch, log.last_positions) == (0, {"in": 2})


def test_a_log_can_begin_with_a_barrier(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_barrier(log, 1, positions={"in": 0})
    append_batch(log)
    assert (open_log(tmp_path).last_batch, log.barriers()[0].batch) == (0, NO_BATCH)


def test_entries_are_found_by_range(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    entries: list[Entry] = [append_batch(log), append_barrier(log, 1), append_batch(log), append_batch(log)]
    log.truncate(Position(1))
    assert log.entries(Position(2)) == entries[2:]
    assert log.entries(Position(0), Position(3)) == entries[1:3]
    assert log.entries(Position(2), Position(2)) == log.entries(Position(0), Position(1)) == []
    assert log.entries(Position(9)) == []
    assert [entry.batch for entry in log.data_entries()] == [1, 2]


def test_a_batch_is_found_by_its_number(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    first, second = append_batch(log), append_batch(log)
    append_barrier(log, 1)
    assert [log.find_batch(BatchId(batch)) for batch in (0, 1, 2)] == [first, second, None]
    log.truncate(Position(1))
    assert log.find_batch(BatchId(0)) is None


def test_rows_are_counted_between_two_batches(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for rows in (1, 2, 4, 8):
        append_batch(log, rows=rows)
        append_barrier(log, rows)
    assert log.rows_between(NO_BATCH, BatchId(3)) == 15
    assert log.rows_between(BatchId(0), BatchId(2)) == 6
    assert log.rows_between(BatchId(2), BatchId(2)) == 0
    assert log.rows_between(BatchId(2), BatchId(4)) is None, "there is no such batch yet"
    log.truncate(Position(3))
    assert log.rows_between(BatchId(1), BatchId(3)) == 12
    assert log.rows_between(BatchId(0), BatchId(3)) is None, "not all of them are there"


def test_leftovers_of_interrupted_writes_are_no_entries(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    path_of(log, 1).with_name(".tmp-000000000001.json-beef").write_bytes(b"{")
    assert open_log(tmp_path).end == 1


def test_an_entry_that_does_not_follow_is_a_bug(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    entry = append_batch(log)
    with pytest.raises(InvariantViolation):
        log.append(entry)
    with pytest.raises(InvariantViolation):
        log.append(replace(append_barrier(open_log(tmp_path / "x"), 1), seq=Position(5)))
    assert log.end == 1


def test_an_entry_of_another_generation_is_a_bug(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    stray = replace(append_barrier(open_log(tmp_path / "x"), 1), generation=Generation(2))
    with pytest.raises(InvariantViolation):
        log.append(stray)


# ------------------------------------------------------------------------------------------------- damage


def test_a_hole_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(4):
        append_batch(log)
    path_of(log, 2).unlink()
    with pytest.raises(DamagedRecordError, match="hole between 1 and 3"):
        open_log(tmp_path)


def test_a_hole_where_generations_meet_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        append_batch(log)
    forked = open_log(tmp_path, (2, 3))
    append_batch(forked)
    path_of(log, 2).unlink()
    with pytest.raises(DamagedRecordError, match="hole between 1 and 3"):
        open_log(tmp_path, (2, 3))


def test_a_lost_end_of_an_old_generation_is_found(tmp_path: Path) -> None:
    """Otherwise the next entry would stand where the old generation's belongs, and nobody would see it."""
    log = open_log(tmp_path)
    for _ in range(3):
        append_batch(log)
    path_of(log, 2).unlink()
    with pytest.raises(DamagedRecordError):
        open_log(tmp_path, (2, 3))


def test_a_log_of_which_everything_is_lost_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        append_batch(log)
    for path in tmp_path.glob("g*/*"):
        path.unlink()
    with pytest.raises(DamagedRecordError):
        open_log(tmp_path, (2, 3))


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_flip, damage_cut, damage_empty])
def test_a_damaged_entry_is_found(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        append_batch(log)
    damage(path_of(log, 1))
    with pytest.raises(DamagedRecordError):
        open_log(tmp_path)


def test_damage_before_the_part_that_is_needed_does_not_matter(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(4):
        append_batch(log)
    damage_flip(path_of(log, 0))
    path_of(log, 1).unlink()
    again = ChannelLog.open(log.operator, log.folder, log.lineage, Position(2))
    assert (again.start, again.end) == (2, 4)


def test_an_entry_under_the_wrong_number_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_batch(log)
    path_of(log, 1).rename(path_of(log, 3))
    with pytest.raises(DamagedRecordError):
        open_log(tmp_path)


# ------------------------------------------------------------------------------------------------- amounts


def counted(log: ChannelLog, first: int, end: int) -> tuple[int, int, int]:
    """One entry at a time, as ``amount`` does not do it."""
    entries = [entry for entry in log.data_entries(Position(first), Position(end)) if entry.rows]
    return len(entries), sum(entry.rows for entry in entries), sum(entry.size_bytes for entry in entries)


def test_the_amount_of_any_range_is_what_lies_in_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for number in range(1, 6):
        append_batch(log, rows=number, content=b"x" * number)
        append_barrier(log, number)
        append_batch(log, rows=0)
    for at in (0, 4, 9):
        log.truncate(Position(at))
        for reopened in (log, open_log(tmp_path)):
            for first in range(at, 17):
                for end in range(first, 17):
                    assert reopened.amount(Position(first), Position(end)) == counted(reopened, first, end)


def test_the_amount_of_a_large_backlog_looks_at_no_entry(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(50):
        append_batch(log, rows=2, content=b"abc")
    log._entries = Untouchable(log._entries)  # type: ignore[assignment]
    assert log.amount(Position(10), Position(50)) == (40, 80, 120)


class Untouchable:
    """Knows where it begins and how long it is, and hates to be read."""

    def __init__(self, entries: list[Entry]) -> None:
        self._first, self._length = entries[0], len(entries)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Entry:
        assert index == 0
        return self._first


def test_an_empty_range_holds_nothing(tmp_path: Path) -> None:
    assert open_log(tmp_path).amount(Position(0), Position(9)) == (0, 0, 0)


def test_a_barrier_is_found_by_its_epoch(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    first, second = append_barrier(log, 3), append_barrier(log, 7)
    assert [log.find_barrier(Epoch(epoch)) for epoch in (3, 7, 4)] == [first, second, None]


# ------------------------------------------------------------------------------------------------- fencing


def test_a_second_writer_of_the_same_generation_is_fenced(tmp_path: Path) -> None:
    one, other = open_log(tmp_path), open_log(tmp_path)
    mine = append_batch(one)
    with pytest.raises(FencedError):
        append_batch(other)
    assert open_log(tmp_path).entries() == [mine]


def test_a_fenced_writer_tells_nobody(tmp_path: Path) -> None:
    one, other = open_log(tmp_path), open_log(tmp_path)
    append_batch(one)
    heard: list[Entry] = []
    other.on_append(heard.append)
    with pytest.raises(FencedError):
        append_barrier(other, 1)
    assert heard == []
    assert other.end == 0


def test_of_racing_writers_one_wins(tmp_path: Path) -> None:
    logs = [open_log(tmp_path) for _ in range(6)]
    begin = threading.Barrier(len(logs))
    outcomes: list[str] = []

    def write(log: ChannelLog) -> None:
        begin.wait()
        try:
            append_barrier(log, 1)
        except FencedError:
            outcomes.append("fenced")
        else:
            outcomes.append("won")

    threads = [threading.Thread(target=write, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["fenced"] * 5 + ["won"]


# ------------------------------------------------------------------------------------------------- forks


def test_a_fork_goes_on_after_the_barrier(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_barrier(log, 1)
    append_batch(log)
    forked = open_log(tmp_path, (2, 2))
    assert (forked.end, forked.last_batch) == (2, 0)
    new = append_batch(forked)
    assert (new.seq, new.batch, new.generation) == (2, 1, 2)
    assert open_log(tmp_path, (2, 2)).entries()[-1] == new


def test_what_a_zombie_writes_is_seen_by_nobody(tmp_path: Path) -> None:
    zombie = open_log(tmp_path)
    append_batch(zombie)
    append_barrier(zombie, 1)
    forked = open_log(tmp_path, (2, 2))
    mine = append_batch(forked)
    late = append_batch(zombie)
    assert late.seq == mine.seq
    assert open_log(tmp_path, (2, 2)).entries()[2:] == [mine]


def test_a_fork_of_a_fork_sees_both_parents(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        append_batch(log)
    second = open_log(tmp_path, (2, 2))
    for _ in range(3):
        append_batch(second)
    third = open_log(tmp_path, (2, 2), (3, 4))
    append_batch(third)
    assert [(entry.seq, entry.generation) for entry in third.entries()] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3)]


def test_a_forked_log_without_entries_ends_where_it_begins(tmp_path: Path) -> None:
    forked = open_log(tmp_path, (2, 0))
    assert (forked.start, forked.end) == (0, 0)
    append_batch(forked)
    assert forked.end == 1


# ------------------------------------------------------------------------------------------------- listeners


def test_a_listener_hears_every_entry_once_and_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    there = append_batch(log)
    heard: list[Entry] = []
    assert log.on_append(heard.append) == [there]
    later = [append_barrier(log, 1), append_batch(log)]
    assert heard == later


def test_a_listener_that_comes_while_entries_are_appended_misses_none(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    writer = threading.Thread(target=lambda: [append_barrier(log, epoch) for epoch in range(1, 60)])
    heard: list[Entry] = []
    writer.start()
    there = log.on_append(heard.append)
    writer.join()
    assert [entry.seq for entry in [*there, *heard]] == list(range(59))


def test_an_entry_is_on_disk_before_anybody_hears_of_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.on_append(lambda entry: found.append(path_of(log, entry.seq).exists()))
    found: list[bool] = []
    append_batch(log)
    assert found == [True]


def test_forgotten_listeners_hear_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    heard: list[Entry] = []
    listener = heard.append
    log.on_append(listener)
    log.remove_listener(listener)
    append_batch(log)
    assert heard == []


# ------------------------------------------------------------------------------------------------- truncation


def test_truncation_deletes_entries_and_their_segments(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    gone = [append_batch(log), append_batch(log)]
    append_barrier(log, 1)
    append_batch(log)
    assert log.truncate(Position(2)) == gone
    assert log.start == 2
    assert segment_names(log) == {"g1-b2.arrow"}
    assert open_log(tmp_path).entries() == log.entries()


def test_truncation_across_generations_deletes_the_visible_entries(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_batch(log)
    forked = open_log(tmp_path, (2, 2))
    append_batch(forked)
    append_batch(forked)
    forked.truncate(Position(3))
    assert stored(forked) == ["g000002/3"]


def test_the_newest_entry_is_never_truncated(tmp_path: Path) -> None:
    """It alone tells a restart the end of the log, the last batch and how far the inputs were read."""
    log = open_log(tmp_path)
    append_batch(log, positions={"in": 1})
    append_batch(log, positions={"in": 7})
    log.truncate(Position(99))
    again = open_log(tmp_path)
    assert (again.start, again.end, again.last_batch, again.last_positions) == (1, 2, 1, {"in": 7})


def test_a_log_that_keeps_only_a_barrier_still_knows_everything(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log, positions={"in": 7})
    append_barrier(log, 1)
    log.truncate(Position(99))
    again = open_log(tmp_path)
    assert [type(entry) for entry in again.entries()] == [BarrierEntry]
    assert (again.end, again.last_batch, again.last_positions) == (2, 0, {"in": 7})


def test_truncating_an_empty_log_or_what_is_gone_does_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert log.truncate(Position(5)) == []
    append_batch(log)
    append_batch(log)
    log.truncate(Position(1))
    assert log.truncate(Position(1)) == log.truncate(Position(0)) == []


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_truncation_killed_half_way_leaves_a_log_without_holes(tmp_path: Path, after: int) -> None:
    log = open_log(tmp_path)
    for _ in range(5):
        append_batch(log)
    assert is_killed_at(f"mid-truncate:op#{after}", lambda: log.truncate(Position(4)))
    again = open_log(tmp_path)
    assert (again.start, again.end, again.last_batch) == (after, 5, 4)
    assert len(segment_names(again)) == 5
    again.collect()
    assert len(segment_names(again)) == 5 - after
    again.truncate(Position(4))
    assert (open_log(tmp_path).start, segment_names(again)) == (4, {"g1-b4.arrow"})


def test_a_deletion_that_fails_leaves_no_hole_and_the_next_truncation_covers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    for _ in range(10):
        append_batch(log)
    unlink, bad = Path.unlink, path_of(log, 2)

    def failing(path: Path, *, missing_ok: bool = False) -> None:
        if path == bad:
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        with pytest.raises(OSError, match="Input/output"):
            log.truncate(Position(4))
    assert log.start == 4
    assert open_log(tmp_path).start == 2
    assert [entry.seq for entry in log.truncate(Position(7))] == [2, 3, 4, 5, 6]
    assert open_log(tmp_path).entries() == log.entries()
    assert segment_names(log) == {f"g1-b{batch}.arrow" for batch in (7, 8, 9)}


def test_what_a_failed_deletion_has_left_is_collected_without_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    for _ in range(6):
        append_batch(log)
    unlink, order = Path.unlink, list[str]()

    def failing(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    def noted(path: Path, *, missing_ok: bool = False) -> None:
        order.append(path.name)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        with pytest.raises(OSError, match="Input/output"):
            log.truncate(Position(4))
    monkeypatch.setattr(Path, "unlink", noted)
    log.collect()
    assert [name for name in order if name.endswith(".json")] == [path_of(log, seq).name for seq in range(4)]


def test_two_truncations_at_once_leave_no_hole_when_both_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live collection and a release: the later one must not delete what follows before the earlier one is done."""
    log = open_log(tmp_path)
    for _ in range(12):
        append_batch(log)
    begun, go = threading.Event(), threading.Event()
    unlink = Path.unlink

    def slow(path: Path, *, missing_ok: bool = False) -> None:
        if path == path_of(log, 1):
            begun.set()
            assert go.wait(10)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    first = threading.Thread(target=log.truncate, args=(Position(5),))
    second = threading.Thread(target=log.truncate, args=(Position(9),))
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.1)
    try:
        assert open_log(tmp_path).start == 1
    finally:
        go.set()
        first.join(10)
        second.join(10)
    assert open_log(tmp_path).start == log.start == 9


# ------------------------------------------------------------------------------------------------- sweeping


def test_a_sweep_of_a_sound_log_deletes_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_barrier(log, 1)
    append_batch(log)
    assert log.collect() == 0
    assert open_log(tmp_path).entries() == log.entries()
    assert segment_names(log) == {"g1-b0.arrow", "g1-b1.arrow"}


def test_a_sweep_deletes_exactly_what_no_visible_entry_names(tmp_path: Path) -> None:
    zombie = open_log(tmp_path)
    append_batch(zombie)
    append_barrier(zombie, 1)
    append_batch(zombie)
    forked = open_log(tmp_path, (2, 2))
    append_batch(forked)
    (tmp_path / "data" / "orphan-of-a-failed-task.arrow").write_bytes(b"rows")
    path_of(forked, 3, 2).with_name(".tmp-x").write_bytes(b"{")
    assert forked.collect() == 4
    assert stored(forked) == ["g000001/0", "g000001/1", "g000002/2"]
    assert segment_names(forked) == {"g1-b0.arrow", "g2-b1.arrow"}
    assert open_log(tmp_path, (2, 2)).entries() == forked.entries()


def test_invisible_entries_are_those_that_were_given_up(tmp_path: Path) -> None:
    zombie = open_log(tmp_path)
    append_batch(zombie)
    append_barrier(zombie, 1)
    given_up = [append_batch(zombie), append_batch(zombie)]
    forked = open_log(tmp_path, (2, 2))
    append_batch(forked)
    assert forked.invisible_entries() == given_up


def test_unreadable_invisible_entries_are_left_out(tmp_path: Path) -> None:
    zombie = open_log(tmp_path)
    append_batch(zombie)
    append_batch(zombie)
    damage_cut(path_of(zombie, 1))
    assert open_log(tmp_path, (2, 1)).invisible_entries() == []


def test_entries_left_out_when_opening_were_not_given_up(tmp_path: Path) -> None:
    """What they staged may belong to a complete epoch that a sink has yet to publish: it must not be thrown away."""
    log = open_log(tmp_path)
    for _ in range(3):
        append_batch(log, staged={"table": [{"path": "a"}]})
    append_barrier(log, 1)
    path_of(log, 0).unlink()
    forked = ChannelLog.open(log.operator, log.folder, log.lineage.fork(Generation(2), Position(4)), Position(3))
    assert forked.start == 3
    assert forked.invisible_entries() == []


# ------------------------------------------------------------------------------------------------- any history


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["batch", "empty", "barrier", "truncate", "reopen", "fork", "sweep"]), st.floats(0, 1)
        ),
        max_size=15,
    )
)
def test_a_log_holds_what_was_written_after_any_history(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, float]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = open_log(folder)
    model: list[Entry] = []
    for what, choice in steps:
        match what:
            case "batch" | "empty":
                model.append(append_batch(log, rows=1 if what == "batch" else 0))
            case "barrier":
                model.append(append_barrier(log, log.end + 1))
            case "truncate" if model:
                at = int(choice * (len(model) - 1))
                log.truncate(model[at].seq)
                model = model[at:]
            case "reopen":
                log = ChannelLog.open(log.operator, folder, log.lineage)
            case "fork" if model:
                at = int(choice * (len(model) - 1)) + 1
                lineage = log.lineage.fork(Generation(log.lineage.generation + 1), Position(model[at - 1].seq + 1))
                model = model[:at]
                log = ChannelLog.open(log.operator, folder, lineage)
            case "sweep":
                log.collect()
            case _:
                pass
        assert log.entries() == model
        assert needed_of(model) <= segment_names(log)
    log.collect()
    assert needed_of(model) == segment_names(log)
    assert ChannelLog.open(log.operator, folder, log.lineage).entries() == model


def needed_of(entries: list[Entry]) -> set[str]:
    return {segment.name for entry in entries if isinstance(entry, DataEntry) for segment in entry.segments}


def test_every_error_says_which_channel(tmp_path: Path) -> None:
    log = open_log(tmp_path, operator="totals")
    append_batch(log)
    append_batch(log)
    append_batch(log)
    path_of(log, 1).unlink()
    with pytest.raises(CutlineError) as caught:
        open_log(tmp_path, operator="totals")
    assert caught.value.where["channel"] == "totals"


def test_sweeping_a_log_that_was_opened_in_part_leaves_what_was_not_read(tmp_path: Path) -> None:
    """Older epochs may need it; that it could not be read once does not make it nobody's."""
    log = open_log(tmp_path)
    for _ in range(4):
        append_batch(log)
    files = sorted(path for path in log.folder.rglob("*") if path.is_file())
    part = ChannelLog.open(log.operator, log.folder, log.lineage, Position(2))
    assert part.collect() == 0
    assert sorted(path for path in log.folder.rglob("*") if path.is_file()) == files


# ------------------------------------------------------------------------------------------------- appending again


@pytest.mark.parametrize("point", ["_write_temp", "fsync_dir"])
def test_an_append_that_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Before its file exists, or after: there the second attempt finds the file of the first."""
    log = open_log(tmp_path)
    append_batch(log)
    done, failures = getattr(durable, point), [OSError(28, "No space left on device")]

    def fail_once(*arguments: object, **more: object) -> object:
        if failures:
            raise failures.pop()
        return done(*arguments, **more)

    monkeypatch.setattr(durable, point, fail_once)
    with pytest.raises(OSError, match="No space left"):
        append_batch(log)
    assert log.last_batch == 0
    append_batch(log)
    assert stored(log) == ["g000001/0", "g000001/1"]
    assert open_log(tmp_path).last_batch == 1


def test_the_entry_of_another_process_is_never_taken_for_one_of_a_failed_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    with monkeypatch.context() as patched:
        patched.setattr(durable, "_write_temp", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            append_batch(log)
    path_of(log, 1).write_bytes(b"another process wrote this")
    with pytest.raises(FencedError):
        append_batch(log)
