"""One word per idea: retired words stay out of the code and the pages. The word list is in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Retired word → the word for the idea.
RETIRED = {
    r"whoever|nobody|somebody": "name the actor",
    r"borne|mends?|mended|mending": "tolerate; fix",
    r"for people": "human-readable, or leave it out",
    r"patien(ce|tly)": "retry",
    r"incarnations?|(earlier|former|old|new|next|last|every|each|one) li(fe|ves)": "generation",
    r"(go|goes|going|gone|went|come|comes|came|coming|bring|brings|brought|way|ways) back": "restore, recover",
    r"(take|takes|taken|taking|took) back": "rewind (a sink), restore (a flow)",
    r"TakenBack\w*|take_back": "rewind",
    r"(let|lets|letting) go|let_go": "release",
    r"(throw|throws|thrown|threw|throwing) away|throw_away\w*": "discard",
    r"sweeps?|swept|sweeping|tidy|tidied|tidies|condense\w*": "collect",
    r"books": "ledger",
    r"PostBox|Letters?|letters?": "mailbox, envelope",
    r"wish(es)?|Wish(es)?|\w+_wish|\w*Wish": "restore request, read request",
    r"carr(y|ies|ied|ying) over|CarryOver|carried_over|sent ahead|send ahead|sending ahead": "evolution; early upload",
    r"AtOnce|at_once_\w+|with_at_once": "immediate publishing",
}
#: Names that users write, and where: they stay.
STAYS = {
    "TakenBackError": ("",),
    "books": ("connectors/postgres", "docs/sinks.md"),
    "Whoever": ("protocol/deploys.py",),  # to be reworded
}
FILES = (*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")


def found_in(path: Path, text: str, pattern: re.Pattern[str]) -> list[str]:
    name = str(path.relative_to(ROOT))
    return [
        f"{name}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        if any(not any(place in name for place in STAYS.get(one.group(), ())) for one in pattern.finditer(line))
    ]


@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_stay_retired(word: str) -> None:
    pattern = re.compile(rf"(?<![\w])({word})(?![\w])", re.IGNORECASE)
    found = [line for path in FILES for line in found_in(path, path.read_text(), pattern)]
    assert not found, f"say {RETIRED[word]!r} instead:\n" + "\n".join(found)


def test_a_word_is_found_however_it_is_written() -> None:
    pattern = re.compile("whoever", re.IGNORECASE)
    assert found_in(ROOT / "docs/guide.md", "fine\nWhoever reads", pattern) == ["docs/guide.md:2: Whoever reads"]
