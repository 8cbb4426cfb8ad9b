"""The commands of the README and of the tutorial, run as they are written, on real Spark.

Console blocks are run. What stands in other blocks is not, and is named below with its reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_commands import Command, Shell, perform, read_steps

pytestmark = [pytest.mark.spark, pytest.mark.kill]

ROOT = Path(__file__).parents[2]
#: Lines of the README that are not run as a part of it.
NOT_RUN = {
    "make demo": "test_the_demo runs what it runs, in the interpreter of the tests",
    "make test": "it is what runs this",
    "pip install '.[all]'": "tests do not install into the environment that they run in",
    "pip install 'cutline[all] @ file:///path/to/cutline-0.1.0-py3-none-any.whl'": "the same; the path is the reader's",
    "cutline doctor": "test_doctor runs it; its answer depends on the machine",
    "cutline restore payments --dry-run --to before-last-deploy": "the runbook's test runs it, after a bad deploy",
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
def test_the_demo(tmp_path: Path) -> None:
    with Shell(tmp_path / "reader", timeout_seconds=280) as shell:
        code, output = shell.run("cutline demo")
    assert code == 0, output
