"""One process per flow and storage."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.errors import FlowLockedError
from cutline.runtime import lock as lock_module
from cutline.runtime.lock import FlowLock, is_copied, running_pid

HOLDER = """
import sys
from pathlib import Path
from cutline.runtime.lock import FlowLock
lock = FlowLock(Path(sys.argv[1]), "payments")
lock.acquire()
if len(sys.argv) > 2:
    lock.note_jvm(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def jvm() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for the JVM: a process that lives on until somebody ends it."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def hold(path: Path, *jvm_pid: int) -> subprocess.Popen[bytes]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *map(str, jvm_pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_second_process_is_refused_and_told_which_one_runs(path: Path) -> None:
    other = hold(path)
    try:
        with pytest.raises(FlowLockedError, match=f"pid {other.pid}") as caught:
            FlowLock(path, "payments").acquire()
        assert caught.value.where == {"flow": "payments"}
    finally:
        kill(other)


def test_a_killed_process_holds_nothing(path: Path) -> None:
    kill(hold(path))
    lock = FlowLock(path, "payments")
    lock.acquire()
    lock.release()


def test_a_second_start_in_the_same_process_is_refused(path: Path) -> None:
    first, second = FlowLock(path, "payments"), FlowLock(path, "payments")
    first.acquire()
    with pytest.raises(FlowLockedError, match=f"pid {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_refused_start_leaves_the_lock_with_its_holder(path: Path) -> None:
    first = FlowLock(path, "payments")
    first.acquire()
    for _ in range(3):
        with pytest.raises(FlowLockedError):
            FlowLock(path, "payments").acquire()
    first.release()


def test_releasing_twice_or_without_holding_does_nothing(path: Path) -> None:
    lock = FlowLock(path, "payments")
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()


def test_a_start_waits_for_the_jvm_of_the_killed_process(path: Path, jvm: subprocess.Popen[bytes]) -> None:
    """Until it notices, that JVM may still write Spark's own files."""
    kill(hold(path, jvm.pid))
    acquired = threading.Event()
    lock = FlowLock(path, "payments")

    def start() -> None:
        lock.acquire()
        acquired.set()

    thread = threading.Thread(target=start)
    thread.start()
    assert not acquired.wait(0.2)
    with pytest.raises(FlowLockedError):
        FlowLock(path, "payments").acquire()
    jvm.kill()
    jvm.wait()
    assert acquired.wait(10)
    thread.join()
    lock.release()


def test_a_jvm_that_never_ends_is_named(
    path: Path, jvm: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_JVM_EXIT_SECONDS", 0.0)
    kill(hold(path, jvm.pid))
    for _ in range(2):
        with pytest.raises(FlowLockedError, match=f"pid {jvm.pid}"):
            FlowLock(path, "payments").acquire()


def test_a_jvm_that_has_ended_is_not_waited_for(path: Path, jvm: subprocess.Popen[bytes]) -> None:
    kill(hold(path, jvm.pid))
    jvm.kill()
    jvm.wait()
    lock = FlowLock(path, "payments")
    lock.acquire()
    lock.release()


def test_another_process_with_the_number_of_the_jvm_is_not_waited_for(path: Path, jvm: subprocess.Popen[bytes]) -> None:
    path.write_text(f"1 {jvm.pid} 12345")
    lock = FlowLock(path, "payments")
    lock.acquire()
    lock.release()


def test_a_process_that_released_the_lock_leaves_no_jvm_to_wait_for(path: Path, jvm: subprocess.Popen[bytes]) -> None:
    first = FlowLock(path, "payments")
    first.acquire()
    first.note_jvm(jvm.pid)
    first.release()
    second = FlowLock(path, "payments")
    second.acquire()
    second.release()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"not numbers at", b"1 2", b"1 2 3 4"])
def test_whatever_the_file_says_the_lock_can_be_taken(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    lock = FlowLock(path, "payments")
    lock.acquire()
    lock.release()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The lock file of a copied folder."""
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy" / "lock"


def test_the_copy_of_a_running_flow_is_refused_immediately_and_told_where_the_original_runs(
    path: Path, copy: Path, jvm: subprocess.Popen[bytes]
) -> None:
    """The process it names is healthy: nothing is waited for, and nothing is to be ended."""
    other = hold(path, jvm.pid)
    try:
        shutil.copy2(path, copy)
        began = time.monotonic()
        with pytest.raises(FlowLockedError, match=f"copy of a storage that is in use: pid {other.pid} on") as caught:
            FlowLock(copy, "payments").acquire()
        assert time.monotonic() - began < 5
        assert f"in {path.parent}" in caught.value.what
        assert "end that process" not in str(caught.value)
        assert caught.value.where == {"flow": "payments", "path": copy.parent}
        assert running_pid(path) == other.pid
        assert running_pid(copy) is None
        assert is_copied(copy) and not is_copied(path)
    finally:
        kill(other)


def test_the_copy_of_a_stopped_flow_starts_and_waits_for_no_jvm(
    path: Path, copy: Path, jvm: subprocess.Popen[bytes]
) -> None:
    """The JVM of the original may still write, but into the original's folder."""
    other = hold(path, jvm.pid)
    shutil.copy2(path, copy)
    kill(other)
    lock = FlowLock(copy, "payments")
    lock.acquire()
    assert running_pid(copy) == os.getpid()
    lock.release()


def test_the_copy_of_a_flow_that_was_stopped_starts_while_its_process_lives(path: Path, copy: Path) -> None:
    """A process outlives its flows. The copy may also have taken the place of the original."""
    original = FlowLock(path, "payments")
    original.acquire()
    shutil.copy2(path, copy)
    original.release()
    shutil.copy2(copy, spare := copy.with_name("spare"))
    lock = FlowLock(copy, "payments")
    lock.acquire()
    lock.release()
    path.unlink()
    spare.rename(path)
    assert is_copied(path)
    original.acquire()
    original.release()


def test_the_copy_of_a_flow_that_this_process_runs_is_refused(path: Path, copy: Path) -> None:
    original = FlowLock(path, "payments")
    original.acquire()
    shutil.copy2(path, copy)
    with pytest.raises(FlowLockedError, match="copy of a storage that is in use"):
        FlowLock(copy, "payments").acquire()
    original.release()


def test_a_copied_note_whose_folder_only_its_process_sees_counts_while_that_process_lives(
    path: Path, copy: Path
) -> None:
    other = hold(path)
    shutil.copy2(path, copy)
    path.unlink()
    try:
        with pytest.raises(FlowLockedError, match=f"pid {other.pid}"):
            FlowLock(copy, "payments").acquire()
    finally:
        kill(other)
    # This process knows what it runs, also if a former one on another machine had its number and its beginning.
    copy.write_text(f"{os.getpid()}\n{lock_module.started_at(os.getpid())} 99:1234 host {path.parent}")
    lock = FlowLock(copy, "payments")
    lock.acquire()
    lock.release()


def test_a_copy_in_the_place_of_its_original_waits_for_the_jvm_of_the_killed_process(
    path: Path, copy: Path, jvm: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That JVM writes by path."""
    monkeypatch.setattr(lock_module, "_JVM_EXIT_SECONDS", 0.0)
    other = hold(path, jvm.pid)
    shutil.copy2(path, copy)
    kill(other)
    path.unlink()
    copy.rename(path)
    with pytest.raises(FlowLockedError, match=f"pid {jvm.pid}"):
        FlowLock(path, "payments").acquire()


def test_a_folder_that_was_moved_is_no_copy(path: Path, jvm: subprocess.Popen[bytes]) -> None:
    kill(hold(path, jvm.pid))
    moved = path.rename(path.with_name("moved"))
    assert not is_copied(moved)


def test_a_note_of_a_former_version_counts_as_before(path: Path) -> None:
    path.write_text(str(os.getpid()))
    assert running_pid(path) == os.getpid()
    path.write_text(f"{os.getpid()} 1 12345")
    assert running_pid(path) == os.getpid() and not is_copied(path)


def test_a_later_process_with_the_number_of_the_noted_one_does_not_run_the_flow(path: Path) -> None:
    lock = FlowLock(path, "payments")
    lock.acquire()
    first, _, second = path.read_text().partition("\n")
    assert running_pid(path) == os.getpid()
    path.write_text(f"{first}\n1{second}")
    assert running_pid(path) is None
    lock.release()


FULL = """
import resource, sys
from pathlib import Path
from cutline.runtime.lock import FlowLock
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
lock = FlowLock(Path(sys.argv[1]), "payments")
try:
    lock.acquire()
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    FlowLock(Path(sys.argv[1]), "payments").acquire()
    print("acquired")
"""


def test_a_lock_that_cannot_be_noted_is_not_held(path: Path) -> None:
    """On a full disk, for example: the same process can try again when there is room."""
    told = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=False)
    assert told.stdout == "acquired\n", told.stderr
