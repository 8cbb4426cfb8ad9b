"""What a power cut may leave, whenever it comes: the flow starts again, and what it publishes is right.

A story (``tests.support.power``) runs under strace: a flow with real channels, checkpoints, savepoints, a remote tier,
and Parquet, Delta and SQLite sinks; it is killed, continues, loses a directory, loses its folder. From the recording
come states that a power cut may leave, and a flow is started on each. A spy looks for files that are relied upon before
they are synced. And every sync in the source is left out in turn: the spy must notice.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import cutline
from cutline.config.options import ENVIRONMENT_PREFIX
from tests.support.power.disk import Disk
from tests.support.power.exploring import Findings, as_table, explore
from tests.support.power.living import MODES
from tests.support.power.recording import SYNCS, WRITES, Recording, Site, Sync, sites, why_not
from tests.support.power.spy import History, Spy
from tests.support.power.stories import Story

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SOURCE = Path(cutline.__file__).parent
#: States for each mode; ``CUTLINE_EXPLORE=…`` asks for others.
STATES = int(os.environ.get(f"{ENVIRONMENT_PREFIX}EXPLORE", "40"))
SOAK_STATES = int(os.environ.get(f"{ENVIRONMENT_PREFIX}EXPLORE", "210"))
#: The memory of the machine: a state has some hundred files, and nobody pulls the plug here.
MEMORY = Path("/dev/shm")
#: Databases whose library syncs by itself, because the source says ``synchronous=FULL``.
DATABASES = ("coordinator.sqlite", "base.sqlite")
RENAMED = Story("unaligned", ("renamed",))
GOES_BACK = Story("unaligned", ("goes_back",))
PARQUET, CHECKPOINTS = "connectors/parquet/sink.py", "storage/checkpoints.py"
#: Trials of a disk: nothing relies on what they write.
TRIALS = {("cli/upkeep/checks.py", "check_folder")}
#: What only shows after a kill or an error: a sync by its function → what happens and where, and the life after it.
AFTER_TROUBLE = {
    ("base/durable.py", "settle_dir"): ("die", "connectors/sqlite/sink.py", "SQLite.open", 1, "second"),
    # The fourth folder that opening the logs makes: that of the last operator.
    ("base/durable.py", "_settle_inside"): ("die", "channels/log.py", "ChannelLog.open", 4, "second"),
    (PARQUET, "Parquet.open"): ("die", PARQUET, "Parquet._publish", 1, "idle"),
    (PARQUET, "Parquet._is_to_publish"): ("fail", PARQUET, "Parquet._publish", 1, "second"),
    (PARQUET, "_link"): ("nolinks", "", "", 1, "second"),
    # Of the two syncs that creating a manifest takes, the one of its folder.
    (CHECKPOINTS, "LocalCheckpointStore._prepare_folders"): (
        "die",
        CHECKPOINTS,
        "LocalCheckpointStore.store_manifest",
        2,
        "idle",
    ),
}
#: What no story reaches (two processes at a time, a command, a catalog); a test of its own notices it.
ELSEWHERE = {
    (
        CHECKPOINTS,
        "LocalCheckpointStore.store_tombstone",
    ): "test_a_tombstone_that_a_dead_process_left_is_synced_before_anything_rests_on_it",
    (
        CHECKPOINTS,
        "LocalCheckpointStore.store_manifest",
    ): "test_a_manifest_that_a_dead_process_left_is_synced_before_anything_rests_on_it",
    ("storage/detached.py", "_link"): "test_what_is_put_back_without_links_is_synced",
    ("savepoints/set_aside.py", "finish"): "test_nothing_is_removed_before_the_move_is_durable",
    ("storage/restore_requests.py", "withdraw_request"): "test_a_power_cut_does_not_bring_it_back",
    ("storage/restore_requests.py", "remove_request"): "test_a_power_cut_does_not_bring_it_back",
    (
        "connectors/iceberg/file_io.py",
        "_SyncedStream.close",
    ): "test_everything_is_synced_before_the_catalog_names_it",
}
#: It only tries whether a disk syncs: nothing is ever relied upon.
TRIED = {("cli/upkeep/checks.py", "check_folder")}


class Recorder:
    """Records each story once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Story, Recording] = {}

    def __call__(self, story: Story) -> Recording:
        if story not in self._known:
            place = self.folder / f"story-{len(self._known)}"
            self._known[story] = story.recorded(place)
            shutil.rmtree(place)
        return self._known[story]


@pytest.fixture(scope="module")
def recorded() -> Iterator[Recorder]:
    with tempfile.TemporaryDirectory(prefix="cutline-power-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Recorder(Path(folder))


@pytest.mark.parametrize("mode", MODES)
def test_whenever_the_power_goes_the_flow_comes_back_and_is_right(recorded: Recorder, mode: str) -> None:
    findings = explore(Disk(recorded(Story(mode))), mode, recorded.folder / "state", STATES, seed=1)
    assert not findings.bad, findings.story()
    assert findings.states == STATES


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_relied_upon_before_it_is_synced(recorded: Recorder, mode: str) -> None:
    found = Spy.look(History(recorded(Story(mode))))
    assert not found, "\n".join(map(str, found[:10]))


def test_nothing_is_relied_upon_while_an_operator_is_renamed(recorded: Recorder) -> None:
    found = Spy.look(History(recorded(RENAMED)))
    assert not found, "\n".join(map(str, found[:10]))


def test_nothing_is_relied_upon_while_an_old_checkpoint_is_restored(recorded: Recorder) -> None:
    found = Spy.look(History(recorded(GOES_BACK)))
    assert not found, "\n".join(map(str, found[:10]))


def test_what_is_put_back_without_links_is_synced(recorded: Recorder) -> None:
    recording = recorded(Story("unaligned", ("goes_back",), "nolinks,,1"))
    assert not Spy.look(History(recording))
    (site,) = [one for one in sites(SOURCE) if (one.module, one.function) == ("storage/detached.py", "_link")]
    assert site in noticed_in([recording])


def test_each_sync_that_is_left_out_is_noticed(recorded: Recorder) -> None:
    """By the spy alone; those that matter only after a kill or an error: see below."""
    stories = (Story("aligned"), Story("per-operator"), Story("at-once-rewind"), RENAMED, GOES_BACK)
    noticed = noticed_in([recorded(story) for story in stories])
    needed = [site for site in sites(SOURCE) if (site.module, site.function) not in TRIALS]
    missed = [site.name for site in needed if site not in noticed and not is_after_trouble(site)]
    assert not missed, f"nothing would notice if these were gone: {missed}"
    assert {name for name in DATABASES if name in noticed} == set(DATABASES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("function", AFTER_TROUBLE, ids=lambda function: function[1])
def test_a_sync_that_matters_after_trouble_is_noticed(recorded: Recorder, function: tuple[str, str]) -> None:
    """A process died, or was told of an error, after something became visible and before it was durable."""
    kind, module, where, number, after = AFTER_TROUBLE[function]
    recording = recorded(Story("unaligned", ("first", after), f"{kind},{place_of(module, where)},{number}"))
    assert not Spy.look(History(recording))
    (site,) = [site for site in sites(SOURCE) if (site.module, site.function) == function]
    assert site in noticed_in([recording])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_in_thousands_of_states_the_flow_is_never_wrong_and_never_refused(recorded: Recorder, seed: int) -> None:
    found: dict[str, Findings] = {}
    for mode in MODES:
        disk = Disk(recorded(Story(mode, seed=seed + 1)))
        found[mode] = explore(disk, mode, recorded.folder / "state", SOAK_STATES, seed)
    sys.stdout.write(as_table(found))
    assert not any(findings.bad for findings in found.values()), "\n".join(one.story() for one in found.values())


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_process_that_dies_before_any_sync_leaves_nothing_to_rely_on(recorded: Recorder) -> None:
    """The next process syncs again what it finds, before it relies on it; and a power cut later is as harmless."""
    wrong = []
    for place in reached_in(recorded(Story("unaligned"))):
        recording = recorded(Story("unaligned", ("first", "second"), f"die,{place},1"))
        wrong += [f"{place}: {one}" for one in Spy.look(History(recording))[:3]]
        findings = explore(Disk(recording), "unaligned", recorded.folder / "state", 10, seed=1)
        wrong += [f"{place}: {findings.story()}"] if findings.bad else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["unaligned", "per-operator"])
def test_states_show_it_too_if_nothing_is_synced(recorded: Recorder, mode: str) -> None:
    """The exploration would find what the spy has no rule for."""
    disk = Disk(recorded(Story(mode)), without=lambda _: True)
    assert explore(disk, mode, recorded.folder / "state", 200, seed=1, until_bad=True).bad


def is_after_trouble(site: Site) -> bool:
    return (site.module, site.function) in {*AFTER_TROUBLE, *ELSEWHERE, *TRIED}


def place_of(module: str, function: str) -> str:
    """The first call there that syncs."""
    known = sites(SOURCE, SYNCS | WRITES)
    return next((site.place for site in known if (site.module, site.function) == (module, function)), "")


def noticed_in(recordings: list[Recording]) -> dict[Site | str, str]:
    """What is noticed if it is left out, and what the spy says then."""
    noticed: dict[Site | str, str] = {}
    for recording in recordings:
        history = History(recording)
        reached = {place for sync in recording.syncs for place in sync.site}
        for site in sites(SOURCE):
            if site not in noticed and site.place in reached:
                found = Spy.look(history, partial(_is_of_site, site.place))
                noticed.update({site: str(found[0])} if found else {})
        for name in DATABASES:
            found = Spy.look(history, partial(_is_of_database, name))
            noticed.update({name: str(found[0])} if found else {})
    return noticed


def _is_of_site(place: str, sync: Sync) -> bool:
    return place in sync.site


def _is_of_database(name: str, sync: Sync) -> bool:
    return not sync.site and name in sync.path


def reached_in(recording: Recording) -> list[str]:
    """The places in the source that asked for a sync, without the functions that serve them all."""
    serving = ("base/durable.py", "objects/staging.py")
    asked = ([place for place in sync.site if not place.startswith(serving)] for sync in recording.syncs)
    return sorted({places[-1] for places in asked if places})
