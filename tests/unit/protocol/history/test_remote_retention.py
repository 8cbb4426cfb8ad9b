"""What the remote tier keeps."""

from __future__ import annotations

import pytest

from cutline.model.ids import NO_EPOCH, Epoch, Generation, SinkId
from cutline.model.remote import SinkProgress
from cutline.protocol.history.remote_retention import (
    ObjectKind,
    RemoteObject,
    kept_when_stopped,
    kept_while_running,
    progress_of_kept,
    progress_when_stopped,
    unreferenced,
)


def epochs(*numbers: int) -> list[Epoch]:
    return [Epoch(number) for number in numbers]


def kept(*, uploaded: int, published: int, pins: tuple[int, ...] = (), retain: int = 2) -> set[int]:
    found = kept_while_running(
        epochs(1, 2, 3, 4, 5),
        uploaded=Epoch(uploaded),
        published=Epoch(published),
        pins=epochs(*pins),
        retain=retain,
    )
    return {int(epoch) for epoch in found}


def test_the_newest_uploaded_ones_stay() -> None:
    assert kept(uploaded=5, published=5) == {4, 5}
    assert kept(uploaded=5, published=5, retain=1) == {5}


def test_nothing_goes_before_this_process_has_uploaded_one() -> None:
    assert kept(uploaded=NO_EPOCH, published=5) == {1, 2, 3, 4, 5}


def test_what_a_sink_has_yet_to_publish_stays_and_so_does_the_epoch_before_it() -> None:
    assert kept(uploaded=5, published=2) == {2, 3, 4, 5}


def test_what_a_later_process_has_uploaded_is_none_of_ours_to_count() -> None:
    assert kept(uploaded=3, published=3) == {2, 3, 4, 5}


def test_pinned_epochs_stay() -> None:
    assert kept(uploaded=5, published=5, pins=(1,)) == {1, 4, 5}


def test_a_stopped_flow_keeps_as_many_as_it_retains_or_has_here() -> None:
    there = epochs(1, 2, 3, 4)
    assert kept_when_stopped(there, here=(), pins=(), retain=2) == {3, 4}
    assert kept_when_stopped(there, here=epochs(1, 3, 4), pins=(), retain=1) == {1, 2, 3, 4}
    assert kept_when_stopped(there, here=(), pins=epochs(1), retain=0) == {1, 4}, "never the last one"
    assert kept_when_stopped([], here=epochs(9), pins=(), retain=3) == {9}


def progress(everywhere: int, **seen: int) -> SinkProgress:
    return SinkProgress(everywhere=Epoch(everywhere), seen={SinkId(sink): Epoch(at) for sink, at in seen.items()})


@pytest.mark.parametrize(
    ("noted", "now", "merged"),
    [
        pytest.param(progress(2, a=3), progress(4, a=4), progress(3, a=3), id="a later epoch does not count"),
        pytest.param(progress(1, a=1), progress(3, a=3), progress(3, a=3), id="the newest that counts"),
        pytest.param(progress(1, a=3), progress(3, a=1), progress(3, a=3), id="whoever says it"),
        pytest.param(progress(4, a=1), progress(2), progress(4, a=1), id="a progress of which nothing is known"),
        pytest.param(progress(0), progress(2, b=2), progress(2, b=2), id="a sink that is new"),
        pytest.param(progress(0), progress(5, b=5), progress(3), id="nothing that counts"),
        pytest.param(progress(1, a=5), progress(2, a=2), progress(2, a=2), id="noted after it was published"),
    ],
)
def test_a_kept_checkpoint_says_more_of_sinks_before_others_go_and_never_less(
    noted: SinkProgress, now: SinkProgress, merged: SinkProgress
) -> None:
    assert progress_of_kept(Epoch(3), noted, now) == merged
    assert progress_of_kept(Epoch(3), merged, now) == merged, "it may be repeated"


def test_the_slowest_sink_of_a_stopped_flow_says_how_far_all_are() -> None:
    a, b = SinkId("a"), SinkId("b")
    found = progress_when_stopped({a: Epoch(4), b: Epoch(2)}, {a: Epoch(3)})
    assert found == SinkProgress(everywhere=Epoch(2), seen={a: Epoch(3)})
    assert progress_when_stopped({}, {}) == SinkProgress(), "without records nothing is known"


def one(path: str, kind: ObjectKind, *, modified_ms: int = 0, generation: int | None = None) -> RemoteObject:
    return RemoteObject(
        path=f"{path}.zst",
        name=path,
        kind=kind,
        modified_ms=modified_ms,
        generation=Generation(generation) if generation is not None else None,
    )


@pytest.mark.parametrize(
    ("found", "goes"),
    [
        (one("blobs/aa/needed", ObjectKind.NEEDED_BY_NAME), False),
        (one("blobs/aa/other", ObjectKind.NEEDED_BY_NAME), True),
        (one("blobs/aa/other", ObjectKind.NEEDED_BY_NAME, modified_ms=901), False),
        (one("blobs/aa/other", ObjectKind.NEEDED_BY_NAME, modified_ms=900), True),
        (one("checkpoints/1/manifest.json", ObjectKind.MANIFEST), False),
        (one("flow.json", ObjectKind.PERMANENT), False),
        (one("ahead/000003.json", ObjectKind.EARLY_UPLOADS, generation=3), True),
        (one("ahead/000004.json", ObjectKind.EARLY_UPLOADS, generation=4), False),
        (one("ahead/000005.json", ObjectKind.EARLY_UPLOADS, generation=5), False),
    ],
)
def test_old_objects_go_that_no_checkpoint_names(found: RemoteObject, goes: bool) -> None:
    gone = unreferenced([found], needed={"blobs/aa/needed"}, newest=Generation(4), now_ms=1_000, grace_ms=100)
    assert gone == ([found] if goes else [])
