"""The commands of the README and of the tutorial, run as they are written, on real Spark.

Console blocks are run. What stands in other blocks is not, and is named below with its reason.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import cutline
from tests.support.doc_commands import Command, Shell, perform, read_steps

pytestmark = [pytest.mark.spark, pytest.mark.kill]

ROOT = Path(__file__).parents[2]
#: Lines of the README that are not run as a part of it.
NOT_RUN = {
    "make demo": "test_the_demo runs what it runs, in the interpreter of the tests",
    "make test": "it is what runs this",
    "pip install '.[all]' -c constraints.txt": "tests do not install into the environment that they run in",
    "pip install 'cutline[all] @ file:///path/to/cutline-0.1.0-py3-none-any.whl'": "the same; the path is the reader's",
    "cutline doctor": "test_doctor runs it; its answer depends on the machine",
    "cutline restore payments --dry-run --to before-last-deploy": "test_the_restore_of_the_readme runs it",
    "cutline restore payments --now --to before-last-deploy --run flow.py": "the same",
}


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_every_command_of_the_page_does_what_the_page_says(page: str, tmp_path: Path) -> None:
    steps = read_steps(ROOT / page)
    with Shell(tmp_path / "reader") as shell:
        ran = list(perform(steps, shell))
    assert ran == [step for step in steps if isinstance(step, Command)]


def test_what_is_not_run_is_named() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    lines = [re.split(r"\s{2,}#", line)[0] for block in blocks for line in block.splitlines()]
    assert lines == list(NOT_RUN)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_restore_of_the_readme(tmp_path: Path) -> None:
    """After a bad deploy: the README's two commands, as they are written."""
    steps = read_steps(ROOT / "README.md")
    dry_run, restore = [line for line in NOT_RUN if line.startswith("cutline restore")]
    with Shell(tmp_path / "reader", timeout_seconds=280) as shell:
        list(perform(steps, shell))
        code = shell.folder / "flow.py"
        good = code.read_text()
        code.write_text(good.replace('F.sum("amount")', 'F.max("amount")'))
        assert shell.run('echo \'{"merchant": "bakery", "amount": 5000}\' > in/upi/2.json')[0] == 0
        shell.run("cutline run flow.py --checkpoint-interval 1s > bad.log 2>&1 &")
        wait_for(shell, 5000)
        told, output = shell.run(dry_run)
        assert told == 0 and "would restore epoch" in output and "it runs now" in output, output
        wait_for(shell, 5000)
        code.write_text(good)
        shell.run(f"{restore} > good.log 2>&1 &")
        wait_for(shell, 5650)


def wait_for(shell: Shell, amount: int) -> None:
    """Until readers of the table see this total."""
    table = cutline.sinks.Delta(shell.folder / "out" / "totals")
    deadline = time.monotonic() + 300
    while (found := cutline.read(table).to_arrow().to_pylist()) != [{"merchant": "bakery", "amount": amount}]:
        logs = "".join(path.read_text() for path in shell.folder.glob("*.log"))
        assert time.monotonic() < deadline, f"{found}\n{logs[-4000:]}"
        time.sleep(0.5)


@pytest.mark.soak
def test_the_demo(tmp_path: Path) -> None:
    with Shell(tmp_path / "reader", timeout_seconds=280) as shell:
        code, output = shell.run("cutline demo")
    assert code == 0, output
