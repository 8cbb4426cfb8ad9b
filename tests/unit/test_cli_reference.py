"""docs/cli.md is what the commands say of themselves: an undocumented command or option cannot exist."""

from __future__ import annotations

from cutline.cli.failures import MEANINGS, ExitCode
from tools.cli_reference import PAGE, page


def test_the_page_on_disk_is_what_the_commands_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_the_page_names_every_exit_code_and_no_hidden_option() -> None:
    assert set(MEANINGS) == set(ExitCode)
    text = page()
    assert all(f"| {code.value} | " in text for code in ExitCode)
    assert "flow_option" not in text
