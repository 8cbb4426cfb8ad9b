"""How a flow that runs was started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cutline.cli.running.former import arguments_of_run, context_of_run, former_run


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("/venv/bin/python /venv/bin/cutline run bad.py --set a=b", ("bad.py", "--set", "a=b")),
        ("python -m cutline run bad.py", ("bad.py",)),
        ("python3 /lib/cutline/__main__.py run bad.py", ("bad.py",)),
        ("python bad.py", None),
        ("python -m pytest run", None),
        ("cutline stop run", None),
        ("cutline", None),
        ("", None),
    ],
)
def test_the_arguments_of_a_command_line(line: str, arguments: tuple[str, ...] | None) -> None:
    assert arguments_of_run(line.split()) == arguments


def test_the_command_and_the_folder_of_a_process(tmp_path: Path) -> None:
    program = tmp_path / "cutline"
    program.write_text("import sys; print(1, flush=True); sys.stdin.read()")
    command = [sys.executable, str(program), "run", "bad.py", "--mode", "aligned"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = former_run(process.pid)
        process.communicate(b"")
    assert found is not None
    assert (found.folder, found.arguments) == (tmp_path, ("bad.py", "--mode", "aligned"))
    assert former_run(process.pid) is None


def test_a_command_is_parsed_as_the_shell_would_have_it() -> None:
    params = context_of_run(["bad.py", "--set", "a=b", "--checkpoint-interval", "1s"]).params
    assert [str(one) for one in params["files"]] == ["bad.py"]
    assert (params["option"], params["checkpoint_interval"], params["restore_to"]) == (["a=b"], "1s", None)
