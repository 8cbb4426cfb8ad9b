"""Types that several threads use for the first time at the same moment."""

from __future__ import annotations

import subprocess
import sys

#: In a process of its own, because what goes wrong is a segmentation fault; threads change hands as often as they can.
RACE = """
import sys, threading
sys.setswitchinterval(1e-6)
import msgspec
from cutline.base.decoding import decoder_of
from cutline.ports import OperatorRecord
record = b'{"flow":"x","timings":{"alignment_ms":1.0},"shared":[{"path":"p"}],"subtasks":[{"subtask":1,"files":[]}]}'
together = threading.Barrier(4)
def decode():
    together.wait()
    try:
        %s
    except msgspec.ValidationError:
        pass
threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def crashes(how: str, times: int) -> int:
    runs = [subprocess.run([sys.executable, "-c", RACE % how], check=False) for _ in range(times)]
    return sum(run.returncode < 0 for run in runs)


def test_a_type_may_be_used_by_several_threads_at_once() -> None:
    """With ``msgspec.json.decode(record, type=OperatorRecord)`` instead, 28 of 60 runs crashed (msgspec 0.22.0)."""
    assert crashes("decoder_of(OperatorRecord).decode(record)", times=12) == 0
