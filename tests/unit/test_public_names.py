"""What ``import cutline`` offers, and what it loads."""

from __future__ import annotations

import subprocess
import sys

import cutline


def test_every_public_name_can_be_loaded() -> None:
    for name in cutline.__all__:
        assert getattr(cutline, name) is not None
        assert name in dir(cutline)
    assert cutline.errors.RewoundError is cutline.RewoundError
    assert cutline.TakenBackError is cutline.RewoundError, "the old name still works"
    assert "Delta" in dir(cutline.sinks)


def test_importing_the_package_loads_nothing_that_runs_flows() -> None:
    loaded = "import sys, cutline; print(*[name for name in sys.modules if name.startswith('cutline')])"
    told = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert set(told.stdout.split()) == {"cutline", "cutline.launcher"}


def test_declaring_a_flow_does_not_load_what_runs_it() -> None:
    loaded = "import sys; from cutline import Flow; Flow('f'); print('cutline.runtime.launch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False"]
