"""The harness that runs the commands of the pages: it must notice whatever a page says wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doc_commands import Command, PageFile, Shell, matches, perform, read_steps

PAGE = """# A page

## First

```python title="hello.py"
print("hello", 1 + 1)
```

```console
$ python hello.py
hello …
$ here=$(pwd)
$ sleep 30 &
$ job=$!
```

## Second

```console
$ cat <<END |
> two
> END
> tr a-z A-Z
TWO
$ cd "$here" && kill $job
```

<!-- exit code 3 -->
```console
$ true
$ echo "as it says"; sh -c "exit 3"
as it says
```

<!-- keeps running -->
```console
$ sleep 60
```

```sh
this is not run
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def run(page: Path, folder: Path, timeout_seconds: float = 30.0) -> list[Command]:
    with Shell(folder, timeout_seconds=timeout_seconds) as shell:
        return list(perform(read_steps(page), shell))


def test_files_and_commands_are_read_in_order(page: Path) -> None:
    steps = read_steps(page)
    assert [type(step) for step in steps] == [PageFile] + 9 * [Command]
    assert [step.section for step in steps] == 5 * ["First"] + 5 * ["Second"]
    assert [step.code for step in steps if isinstance(step, Command)] == [*7 * [0], 3, 0]
    assert [step.text for step in steps if isinstance(step, Command) and step.keeps_running] == ["sleep 60"]
    assert read_steps(page, section="Second") == steps[5:]


def test_one_shell_runs_the_whole_page(page: Path, tmp_path: Path) -> None:
    assert len(run(page, tmp_path / "work")) == 9


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("hello …", "hallo …", "other output"),
        ("TWO", "TWO\nTHREE", "other output"),
        ("exit 3", "exit 4", "exit code 4"),
        ("$ true", "$ false", "exit code 1"),
        ("$ python hello.py", "$ python hallo.py", "exit code 2"),
    ],
)
def test_a_page_that_is_wrong_is_noticed(page: Path, tmp_path: Path, right: str, wrong: str, told: str) -> None:
    page.write_text(PAGE.replace(right, wrong))
    with pytest.raises(AssertionError, match=told):
        run(page, tmp_path / "work")


def test_a_command_that_does_not_end_is_noticed(page: Path, tmp_path: Path) -> None:
    page.write_text("```console\n$ sleep 30\n```\n")
    with pytest.raises(AssertionError, match="not done after"):
        run(page, tmp_path / "work", timeout_seconds=0.5)


@pytest.mark.parametrize(
    ("shown", "output", "fits"),
    [
        (["a", "…", "c"], "a\nb\nb\nc\n", True),
        (["a", "…", "c"], "a\nc\n", True),
        (["a", "c"], "a\nb\nc\n", False),
        (["epoch … of … complete"], "epoch 7 of shop complete  \n", True),
        (["epoch … complete"], "epoch 7\ncomplete\n", False),
        (["a.c"], "abc\n", False),
        (["a"], "a", True),
        (["…"], "", True),
    ],
)
def test_output_fits_what_a_page_shows(shown: list[str], output: str, fits: bool) -> None:
    assert matches(shown, output) is fits
