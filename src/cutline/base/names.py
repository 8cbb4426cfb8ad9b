"""Names and relative paths from outside, judged by their text alone. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_MOST_PATH_CHARS = 1_024
#: What file systems accept for one name.
_MOST_NAME_BYTES = 255
#: The printable characters of ASCII, except the backslash, which some programs take for a slash.
_PLAIN = bytes(range(0x20, 0x7F)).replace(b"\\", b"")
_SHOWN_CHARS = 120
UNTRUSTED = "use an intact copy, or another checkpoint or savepoint; use nothing of a sender whom you do not trust"


def shown(value: object) -> str:
    """A value from outside, as an error may show it: short, and without characters that a terminal obeys."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def are_relative(paths: Sequence[str]) -> bool:
    """Whether every path is relative, normalised, printable and of a length that file systems accept.

    Joined by slashes they are one path, which is as good as the worst of them: many cost hardly more than one.
    """
    if not paths:
        return True
    text = f"/{'/'.join(paths)}/"
    if "//" in text or "/./" in text or "/../" in text:
        return False
    is_ascii = text.isascii()
    if text.encode().translate(None, _PLAIN) if is_ascii else _is_tricky(text):
        return False
    longest = max(map(len, paths))
    if is_ascii and longest <= _MOST_NAME_BYTES:
        return True
    return longest <= _MOST_PATH_CHARS and max(map(len, text.encode().split(b"/"))) <= _MOST_NAME_BYTES


def _is_tricky(text: str) -> bool:
    """Whether a text beyond ASCII has invisible characters, or ones that some systems take for dots and slashes."""
    if not text.isprintable():
        return True
    folded = unicodedata.normalize("NFKC", text)
    return any(part in folded for part in ("\\", "//", "/./", "/../")) or folded.count("/") != text.count("/")


def is_relative(path: str) -> bool:
    """Whether the path stays below any folder that it is appended to, on every file system."""
    return are_relative((path,))


def is_name(name: str) -> bool:
    """Whether it is the name of one file, without folders."""
    return "/" not in name and is_relative(name)
