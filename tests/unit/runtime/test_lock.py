"""One process per flow and storage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.errors import FlowLockedError
from cutline.runtime import lock as lock_module
from cutline.runtime.lock import FlowLock

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
